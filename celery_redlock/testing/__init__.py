"""For tests: of projects that use this library, and of this library.

A project's own tests use `fake_redlock` or `redlock_nodes`, `assert_locked`, `assert_free`,
`assert_reserved`, `assert_skipped` and `redlock_disabled`; see docs/testing.md. They are here as
functions and context managers; the pytest plugin (`pytest_plugin.py`) has fixtures of these names.

The rest is for who tests the lock itself: fakes, and a world of them that is run by a seed.

`FakeClock` and `FakeNode` stand in for the clock and for one Redis master. `World` puts many of
them together: processes that want locks, nodes that grant them, connections between, and faults,
all on one virtual clock. It runs the very generators, rounds, claims, channels and schedule that
production runs; only the sockets, and the loop over them in `driver.py`, are replaced.

What the world keeps to, since a lock's safety hangs on it:

- A connection delivers in order, each way, whatever delays it; only connections overtake each
  other. A partition delays what is sent and loses nothing (TCP sends again). What is lost is the
  contents of a connection whose node died or which was reset.
- A paused process or node reads nothing, and finds everything on waking. A dead one finds nothing.
- Every random number is a pure function of the seed, its purpose and a count, so that removing one
  fault leaves the delays of all other messages as they were.

No sockets, no threads, no real time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .asserts import assert_free, assert_locked, assert_reserved, assert_skipped
    from .disabled import redlock_disabled
    from .fakes import FakeClock, FakeNode
    from .keeper import Board, Keeper, Note
    from .nodes import Connection, Link, Server
    from .operation import Operation, Struck
    from .plan import Audit, Fault, Knobs, chance, key_of, without
    from .process import Process
    from .stage import FakeNodes, LocalNodes, fake_redlock, redlock_nodes
    from .worker import Worker
    from .world import World

__all__ = [
    "Audit",
    "Board",
    "Connection",
    "FakeClock",
    "FakeNode",
    "FakeNodes",
    "Fault",
    "Keeper",
    "Knobs",
    "Link",
    "LocalNodes",
    "Note",
    "Operation",
    "Process",
    "Server",
    "Struck",
    "Worker",
    "World",
    "assert_free",
    "assert_locked",
    "assert_reserved",
    "assert_skipped",
    "chance",
    "fake_redlock",
    "key_of",
    "redlock_disabled",
    "redlock_nodes",
    "without",
]

# Which module has them. Imported when asked for: pytest loads the plugin, and with it this module,
# for every project where the package is installed.
_HOME = {
    name: module
    for module, names in {
        "asserts": ("assert_free", "assert_locked", "assert_reserved", "assert_skipped"),
        "disabled": ("redlock_disabled",),
        "fakes": ("FakeClock", "FakeNode"),
        "keeper": ("Board", "Keeper", "Note"),
        "nodes": ("Connection", "Link", "Server"),
        "operation": ("Operation", "Struck"),
        "plan": ("Audit", "Fault", "Knobs", "chance", "key_of", "without"),
        "process": ("Process",),
        "stage": ("FakeNodes", "LocalNodes", "fake_redlock", "redlock_nodes"),
        "worker": ("Worker",),
        "world": ("World",),
    }.items()
    for name in names
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        found: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
