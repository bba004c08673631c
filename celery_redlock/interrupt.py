"""Raises an exception inside a body that runs in another thread; and never after its end.

In the main thread (prefork, solo, scripts) by a signal of our own, which also ends a sleep or a
read; in other threads by `PyThreadState_SetAsyncExc`, which takes effect at the next bytecode. In
neither way can a C call that holds the GIL be interrupted. SIGURG is chosen since nothing happens
when it arrives late: its default is to be ignored (Go's runtime uses it for the same reason).
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from .errors import LeaseLost

__all__ = ["Interruptible"]

SIGNAL = signal.SIGURG


class Interruptible:
    """A block of code that `strike()` can end from another thread.

    Args:
        error: Makes the exception to raise.
    """

    def __init__(self, error: Callable[[], LeaseLost]) -> None:
        self._error = error
        self._guard = threading.Lock()
        self._thread = threading.get_ident()
        self._main = threading.current_thread() is threading.main_thread()
        self._inside = False
        self._struck = False

    def strike(self) -> None:
        """Raise in the block, if it has not ended."""
        with self._guard:
            if not self._inside or self._struck:
                return
            self._struck = True
            if self._main:
                signal.pthread_kill(self._thread, SIGNAL)
            else:
                _raise_in(self._thread, LeaseLost)

    def __enter__(self) -> Interruptible:
        if self._main:
            if signal.getsignal(SIGNAL) is not _deliver:
                signal.signal(SIGNAL, _deliver)
            _blocks.append(self)
        self._inside = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._guard:
            self._inside = False
            if self._struck and not self._main and kind is not LeaseLost:
                _raise_in(self._thread, None)  # take back what has not been delivered yet
        if self._main:
            _blocks.remove(self)
        elif type(error) is LeaseLost and self._struck and error.lease is None:
            # A thread can only be sent a class; this is the instance that says what was lost.
            raise self._error() from None


_blocks: list[Interruptible] = []


def _deliver(signum: int, frame: FrameType | None) -> None:
    """The signal handler, in the main thread: raise in the innermost block that was struck."""
    for block in reversed(_blocks):
        if block._struck and block._inside:
            block._inside = False  # once
            raise block._error()


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    target = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), target)
