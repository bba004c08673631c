"""Ctrl-C and its likes: end in order, once, and never in the middle of starting a process.

An exception that strikes between the start of a process and the note of its pid would leave that
process behind.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

__all__ = ["deferred", "leave_on_signals"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_deferring = False
_pending: int | None = None


def leave_on_signals() -> None:
    """From now on these signals raise SystemExit in the main thread, which unwinds the stack."""
    for name in SIGNALS:
        signal.signal(name, _leave)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """A block that is not interrupted; a signal that came meanwhile takes effect at its end."""
    global _deferring
    _deferring = True
    try:
        yield
    finally:
        _deferring = False
        if _pending is not None:
            _exit(_pending)


def _leave(signum: int, _frame: FrameType | None) -> None:
    global _pending
    if _deferring:
        _pending = signum
    else:
        _exit(signum)


def _exit(signum: int) -> None:
    for name in SIGNALS:
        signal.signal(name, signal.SIG_IGN)  # one is enough: now all is being removed
    raise SystemExit(128 + signum)
