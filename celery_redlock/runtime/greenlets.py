"""Greenlets in place of threads: what changes where gevent has patched Python.

All greenlets share one native thread, and each runs until it waits. So does the watchdog: while a
body computes and never waits, nothing in this process extends its lease. `gevent` is never imported
by us, only looked up once a program has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..protocol.errors import ConfigurationError

__all__ = ["current", "in_hub", "refuse_eventlet"]


def _patched() -> bool:
    """Return whether gevent has made the threads of this process greenlets."""
    gevent = sys.modules.get("gevent.monkey")
    return gevent is not None and bool(gevent.is_module_patched("threading"))


def current() -> Any:
    """Return the running greenlet, where threads are greenlets; else None."""
    return sys.modules["greenlet"].getcurrent() if _patched() else None


def in_hub(call: Callable[[], object]) -> None:
    """Call `call` between two greenlets of this native thread, soon: none of them runs then."""
    sys.modules["gevent"].get_hub().loop.run_callback(call)


def refuse_eventlet() -> None:
    """Raise where eventlet has patched Python.

    Its `select` wakes the caller once for each socket that is ready. By the second time the caller
    may be in its next wait, a `sleep` of a task's body say, which then ends at once.

    Raises:
        ConfigurationError: It has.
    """
    eventlet = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        raise ConfigurationError(
            "eventlet has patched this process, and locks do not work there: its select() would"
            " cut sleeps of your tasks short. Use the pool gevent, threads or prefork instead"
        )
