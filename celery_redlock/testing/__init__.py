"""Fixtures and assertions for the tests of a project that uses this library.

`fake_redlock` or `redlock_nodes`, `assert_locked`, `assert_free`, `assert_reserved`,
`assert_skipped` and `redlock_disabled`: see docs/testing.md. Here they are functions and context
managers; the pytest plugin (`pytest_plugin.py`) has fixtures of the same names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .asserts import assert_free, assert_locked, assert_reserved, assert_skipped
    from .nodes import FakeNodes, LocalNodes, fake_redlock, redlock_nodes
    from .redirect import redlock_disabled

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

# The module of each name. It is imported on first use, because pytest loads the plugin, and with it
# this module, for every project where the package is installed.
_HOME = {name: "asserts" for name in __all__ if name.startswith("assert_")}
_HOME["redlock_disabled"] = "redirect"


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME.get(name, 'nodes')}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
