"""Fakes for tests that want no server, and a world of them that is run by a seed.

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

from .fakes import FakeClock, FakeNode
from .keeper import Board, Keeper, Note
from .nodes import Connection, Link, Server
from .operation import Operation, Struck
from .plan import Audit, Fault, Knobs, chance, key_of, without
from .process import Process
from .worker import Worker
from .world import World

__all__ = [
    "Audit",
    "Board",
    "Connection",
    "FakeClock",
    "FakeNode",
    "Fault",
    "Keeper",
    "Knobs",
    "Link",
    "Note",
    "Operation",
    "Process",
    "Server",
    "Struck",
    "Worker",
    "World",
    "chance",
    "key_of",
    "without",
]
