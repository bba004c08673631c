"""An event that an exception may strike anywhere.

A time limit raises in the main thread at whatever bytecode it is at. `threading.Condition`, and so
`threading.Event`, is written in Python: struck between taking its inner lock and owing to give it
back, it stays locked for good, and whoever notifies next hangs. A lock written in C has no such
moment.
"""

from __future__ import annotations

import contextlib
import threading

__all__ = ["SafeEvent"]


class SafeEvent:
    """One waits, others ring. A ring is heard once, and kept until then."""

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def set(self) -> None:
        """Wake who waits, or who will wait next."""
        with contextlib.suppress(RuntimeError):  # it has rung already
            self._silence.release()

    def wait(self, timeout: float) -> bool:
        """Wait for a ring, for `timeout` seconds at most; whether there was one."""
        return self._silence.acquire(timeout=max(0.0, min(timeout, threading.TIMEOUT_MAX)))

    def clear(self) -> None:
        """Take back a ring that nobody has heard."""
        self._silence.acquire(blocking=False)
