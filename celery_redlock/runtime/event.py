"""An event that survives an exception raised anywhere.

A time limit raises in the main thread at any bytecode. `threading.Condition`, and therefore
`threading.Event`, is written in Python. If it is interrupted right after it has taken its inner
lock, the lock stays taken for ever, and the next caller hangs. A lock written in C cannot be
interrupted there.
"""

from __future__ import annotations

import contextlib
import threading

__all__ = ["SafeEvent"]


class SafeEvent:
    """A flag that one thread waits for and others set. A wait clears it."""

    def __init__(self) -> None:
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        """Wake the thread that waits, or that will wait next."""
        with contextlib.suppress(RuntimeError):  # it is set already
            self._unset.release()

    def wait(self, timeout: float) -> bool:
        """Wait until it is set, for at most `timeout` seconds; return True if it was."""
        return self._unset.acquire(timeout=max(0.0, min(timeout, threading.TIMEOUT_MAX)))

    def clear(self) -> None:
        """Forget that it was set."""
        self._unset.acquire(blocking=False)
