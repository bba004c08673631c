"""Raise an exception inside a body that runs in another thread, and never after its end.

In the main thread (prefork, solo, scripts) our own signal does it, which also ends a sleep or a
read. In other threads `PyThreadState_SetAsyncExc` does it, which takes effect at the next bytecode.
Neither can interrupt a C call that holds the GIL. If threads are greenlets, the exception is thrown
into the body's greenlet while that waits: a signal, or an exception sent to the native thread,
would hit whichever greenlet runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from ..protocol.errors import LeaseLost
from .greenlets import current, in_hub

__all__ = ["Interruptible"]

T = TypeVar("T")

SIGNAL = signal.SIGURG
"""The signal. Nothing happens if it arrives late, because it is ignored by default. Go uses it for
the same reason."""
RESEND_AFTER_S, MAX_RESEND_AFTER_S = 0.002, 0.1
"""First and longest pause between two signals, in seconds; doubled each time."""


class Interruptible:
    """A call that `interrupt()` can end from another thread.

    If the exception could not be raised in the body (for example during a C call that held the
    GIL), and the body returns after its lease was over, `run()` raises the error all the same. If
    the body has caught the exception and gone on, its result counts: that was its decision.

    Args:
        error: Function that makes the exception to raise.
        over: Function that returns True if the lease ended before its release, and no call of the
            body has reported that.
    """

    def __init__(
        self, error: Callable[[], LeaseLost], over: Callable[[], bool] = lambda: False
    ) -> None:
        self._error = error
        self._lease_over = over
        self._guard = threading.Lock()
        self._thread = threading.get_ident()
        self._greenlet = current()
        self._main = (
            self._greenlet is None and threading.current_thread() is threading.main_thread()
        )
        self._inside = self._left = False
        self._interrupted = self._delivered = False
        self._sent: type[LeaseLost] | None = None

    def interrupt(self) -> None:
        """Raise in the body if it runs; in place of it if it has not begun; never after its end."""
        with self._guard:
            if self._left or self._interrupted:
                return
            self._interrupted = True
            if not self._inside:
                return
            if self._greenlet is not None:
                in_hub(self._throw)
            elif not self._main:
                self._delivered = True
                self._sent = _as_class(self._error())
                _raise_in(self._thread, self._sent)
            else:
                name = "celery_redlock interrupt"
                threading.Thread(target=self._signal, name=name, daemon=True).start()

    def run(self, body: Callable[[], T]) -> T:
        """Return what `body` returns, unless it is interrupted."""
        try:
            self._enter()
            try:
                result = body()
            finally:
                self._leave()
            if not self._delivered and self._lease_over():
                raise self._error()
            return result
        except LeaseLost as error:
            if type(error) is self._sent:
                raise self._error() from None
            raise

    def _enter(self) -> None:
        if self._main:
            if signal.getsignal(SIGNAL) is not _deliver:
                signal.signal(SIGNAL, _deliver)
            _blocks[:] = [*(block for block in _blocks if block._inside), self]
        with self._guard:
            self._inside = not self._interrupted
        if not self._inside:
            raise self._error()

    def _leave(self) -> None:
        with self._guard:
            self._inside, self._left = False, True
        if self._main:
            _blocks[:] = [block for block in _blocks if block._inside]
        elif self._interrupted and self._greenlet is None:
            _take_back(self._thread)

    def _throw(self) -> None:
        """Raise in the greenlet, which waits or has just ended; runs in the hub."""
        if self._inside:
            self._inside, self._delivered = False, True  # once
            self._greenlet.throw(self._error())

    def _signal(self) -> None:
        """Send the signal until it has been handled.

        A signal that arrives right before the main thread falls asleep does not wake it; the next
        one does.
        """
        pause = RESEND_AFTER_S
        while True:
            with self._guard:
                if not self._inside:
                    return
                signal.pthread_kill(self._thread, SIGNAL)
            time.sleep(pause)
            pause = min(2 * pause, MAX_RESEND_AFTER_S)


_blocks: list[Interruptible] = []
"""The calls that the main thread is in, outermost first; also calls that it was just leaving when
it was interrupted."""


def _deliver(signum: int, frame: FrameType | None) -> None:
    """Raise in the innermost interrupted block: the signal handler, in the main thread."""
    for block in reversed(_blocks):
        if block._interrupted and block._inside:
            block._inside, block._delivered = False, True  # once
            raise block._error()


def _as_class(error: LeaseLost) -> type[LeaseLost]:
    """Return a class whose instances look like `error`: only a class can be sent to a thread."""
    said = {"__module__": LeaseLost.__module__, **vars(error)}
    said |= {"__str__": error.__str__, "__reduce__": error.__reduce__}
    return type(LeaseLost.__name__, (LeaseLost,), said)


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    target = ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), target)


class _Nothing(BaseException):
    """An exception that replaces another one, sent to this thread and not raised yet."""


def _take_back(thread: int) -> None:
    """Remove the pending exception of `thread`, which is the caller's own.

    Sending NULL would remove it as well, but CPython would then go on looking for one, and make
    every loop of every thread slower.
    """
    with contextlib.suppress(_Nothing):
        _raise_in(thread, _Nothing)
        while True:  # the exception takes effect in here
            pass
