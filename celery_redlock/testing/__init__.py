"""For the tests of a project that uses this library.

`fake_redlock` or `redlock_nodes`, `assert_locked`, `assert_free`, `assert_reserved`,
`assert_skipped` and `redlock_disabled`: see docs/testing.md. They are here as functions and context
managers; the pytest plugin (`pytest_plugin.py`) has fixtures of these names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .asserts import assert_free, assert_locked, assert_reserved, assert_skipped
    from .disabled import redlock_disabled
    from .nodes import FakeNodes, LocalNodes, fake_redlock, redlock_nodes

__all__ = [
    "FakeNodes",
    "LocalNodes",
    "assert_free",
    "assert_locked",
    "assert_reserved",
    "assert_skipped",
    "fake_redlock",
    "redlock_disabled",
    "redlock_nodes",
]

# Which module has them. Imported when asked for: pytest loads the plugin, and with it this module,
# for every project where the package is installed.
_HOME = {
    **dict.fromkeys(("assert_free", "assert_locked"), "asserts"),
    **dict.fromkeys(("assert_reserved", "assert_skipped"), "asserts"),
    "redlock_disabled": "disabled",
    **dict.fromkeys(("FakeNodes", "LocalNodes", "fake_redlock", "redlock_nodes"), "nodes"),
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        found: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
