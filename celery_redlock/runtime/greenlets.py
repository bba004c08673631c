"""Greenlets in place of threads: the differences if gevent has patched Python.

All greenlets share one native thread, and each runs until it waits. The watchdog is a greenlet,
too: while a body computes and never waits, nothing in this process extends its lease. We never
import `gevent`, but look it up if the program has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..protocol.errors import ConfigurationError

__all__ = ["current", "in_hub", "refuse_eventlet"]


def _patched() -> bool:
    """Return True if gevent has replaced the threads of this process by greenlets."""
    gevent = sys.modules.get("gevent.monkey")
    return gevent is not None and bool(gevent.is_module_patched("threading"))


def current() -> Any:
    """Return the running greenlet if threads are greenlets; otherwise None."""
    return sys.modules["greenlet"].getcurrent() if _patched() else None


def in_hub(call: Callable[[], object]) -> None:
    """Call `call` soon, at a moment at which no greenlet of this native thread runs."""
    sys.modules["gevent"].get_hub().loop.run_callback(call)


def refuse_eventlet() -> None:
    """Raise if eventlet has patched Python.

    Its `select` wakes the caller once for each socket that is ready. The second time the caller may
    be in its next wait already, such as a `sleep` in a task's body, which then ends at once.

    Raises:
        ConfigurationError: eventlet has patched this process.
    """
    eventlet = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        raise ConfigurationError(
            "eventlet has patched this process, and locks do not work there: its select() would"
            " cut sleeps of your tasks short. Use the pool gevent, threads or prefork instead"
        )
