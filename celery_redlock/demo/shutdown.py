"""Ctrl-C and its likes: end in order, once, and never in the middle of starting a process.

An exception between the start of a process and the note of its pid would leave that process behind.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

__all__ = ["deferred", "leave_on_signals"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def leave_on_signals() -> None:
    """From now on these signals raise SystemExit in the main thread, which unwinds the stack."""
    for name in SIGNALS:
        signal.signal(name, _leave)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Run a block that is not interrupted; a signal that comes in it takes effect at its end."""
    came: list[int] = []
    before = {
        name: signal.signal(name, lambda signum, _frame: came.append(signum)) for name in SIGNALS
    }
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
        if came:
            signal.raise_signal(came[0])


def _leave(signum: int, _frame: FrameType | None) -> None:
    for name in SIGNALS:
        signal.signal(name, signal.SIG_IGN)  # one is enough: now all is being removed
    raise SystemExit(128 + signum)
