"""Has threads that compute give the GIL up sooner, while leases are being extended.

A thread gives the GIL up at every system call and must get it back afterwards. Beside a body that
computes in Python it waits for that: CPython asks the computing thread to let go only after the
*switch interval*, 5 ms, and then any of those who wait may be next. A round of extensions has a
dozen such steps: 25 ms beside one such thread, 150 beside four, and now and then longer than a ttl
of one second allows. The interval is not the holder's but the waiter's: a thread that waits for the
GIL reads it each time it begins to wait. So who is about to make a round shortens it for that long:
the same round takes 2 ms beside one thread and 9 beside four, and those who compute lose what a
few dozen switches cost, some tenths of a millisecond every ttl/3.

The interval is one for the whole interpreter, and the application's. Nested and overlapping uses
count; it is given back when the last ends, unless somebody else has set it meanwhile. Without a GIL
it is of no effect.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from .greenlets import native_lock

__all__ = ["haste"]

OURS = 97
"""Microseconds: short, but no computing thread gets less done for it. A number that nobody else
chooses: so it is recognised where somebody has read it in mid-round and sets it again later."""
DEFAULT = 5000
"""Microseconds; CPython's own."""


class _Haste:
    def __init__(self) -> None:
        self._usual = DEFAULT
        self.forked()

    def forked(self) -> None:
        """In a child none of the threads lives that were in haste."""
        # Native, for a watchdog of greenlets is in a thread of its own. Held for no longer than it
        # takes to count.
        self._lock = native_lock()
        self._inside = 0
        self._restore()

    def begin(self) -> None:
        with self._lock:
            self._inside += 1
            now = _interval()
            if now > OURS:
                self._usual = now
                _set(OURS)

    def end(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._restore()

    def _restore(self) -> None:
        if _interval() == OURS:
            _set(self._usual)


@contextmanager
def haste() -> Iterator[None]:
    """Get the GIL back sooner than usual, as long as the block runs."""
    _haste.begin()
    try:
        yield
    finally:
        _haste.end()


def _interval() -> int:
    return round(sys.getswitchinterval() * 1e6)


def _set(microseconds: int) -> None:
    sys.setswitchinterval((microseconds + 0.5) / 1e6)  # it is rounded down


_haste = _Haste()
os.register_at_fork(after_in_child=_haste.forked)
