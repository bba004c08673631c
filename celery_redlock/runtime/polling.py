"""Poll sockets for data, with one of the threads of a process polling for all."""

from __future__ import annotations

import contextlib
import os
import select
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any

from .blocking import blocking
from .event import SafeEvent

__all__ = ["SIZE", "WAITS", "Poll", "PolledEvent", "SharedPoll"]

SIZE = 65536
"""Maximum bytes of one read."""

if not hasattr(select, "poll"):
    # The check is here because everything that takes locks imports this module, and the declaration
    # of a task does not.
    raise ImportError(
        "celery_redlock takes locks and makes reservations on POSIX systems only (Linux, macOS): on"
        " this one, tasks can be declared, and published if their scope is 'while_executing'"
    )

WAITS = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""Exceptions of a socket that is not ready. When a TLS connection changes its keys, it may have to
read before it can write, or the other way round."""
LONGEST_S = 1.0
"""Longest poll for an event, or sleep while another thread polls, in seconds. After that the thread
looks again, in case an exception has kept another thread from waking it."""
WAKER = -1
"""Index of our own pipe, among the indexes of sockets."""


class Poll:
    """Sockets that are polled, each under an index."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._index_of: dict[int, int] = {}

    def watch(self, index: int, fd: int) -> None:
        self.forget(index)
        self._index_of[fd] = index
        self._poll.register(fd, select.POLLIN)

    def forget(self, index: int) -> None:
        for fd in [fd for fd, known in self._index_of.items() if known == index]:
            del self._index_of[fd]
            self._poll.unregister(fd)

    def watches(self, index: int, fd: int) -> bool:
        """Return True if this very socket is watched by that index."""
        return self._index_of.get(fd) == index

    def copy(self) -> Poll:
        """Return a copy, because a poll object that is in use cannot be polled a second time."""
        other = Poll()
        for fd, index in list(self._index_of.items()):
            if index != WAKER:
                other.watch(index, fd)
        return other

    def wait(self, timeout: float) -> list[int]:
        """Return the sockets with something to read, after at most `timeout` seconds."""
        ready = self._poll.poll(timeout * 1000)
        return [self._index_of[fd] for fd, _event in ready if fd in self._index_of]


class SharedPoll:
    """Sockets that all threads of a process wait for, while one of them polls for all.

    A lone thread goes straight from poll to read, with no other thread to wake. Other threads sleep
    until the polling thread has read the data that they wait for. When the polling thread leaves,
    another one polls.

    Args:
        lock: A lock that is held during each read, and during each change of a thread's condition.
        read: Function that reads from the sockets with these indexes; the list is empty if the poll
            has timed out.
        then: Function that continues after a read where no thread waits for its end; it is called
            without the lock.

    Attributes:
        reads_on: True if data is read when it arrives, whether or not anyone waits for it.
    """

    reads_on = False

    def __init__(
        self,
        lock: AbstractContextManager[bool],
        read: Callable[[Sequence[int]], object],
        then: Callable[[], object] = lambda: None,
    ) -> None:
        self._lock, self._read, self._then = lock, read, then
        self._poll = Poll()
        self._waker: _Waker | None = None
        self.poller: int | None = None
        self._done: Callable[[], bool] = lambda: False  # what the poller waits for
        self._sleeping: dict[Any, Callable[[], bool]] = {}
        self._closed = False

    def watch(self, index: int, fd: int) -> None:
        """Poll a socket from now on. Call it with the lock held."""
        self._poll.watch(index, fd)
        self._rouse()

    def forget(self, index: int) -> None:
        """Stop polling a socket. Call it with the lock held."""
        self._poll.forget(index)

    async def until(
        self,
        done: Callable[[], bool],
        seconds: float,
        most: Callable[[], float] = lambda: LONGEST_S,
    ) -> None:
        """Wait until `done()`, for some seconds; a thread polls for `most()` of them at a time."""
        until = monotonic() + seconds
        try:
            while True:
                left = until - monotonic()
                # An unread answer is no silence: read once more, however late it is.
                if not self.turn(done, max(0.0, min(left, most()))) or left <= 0:
                    break
        finally:
            self.leave()

    def turn(self, done: Callable[[], bool], timeout: float) -> bool:
        """Poll once, or sleep while another thread polls; return True unless `done()`.

        Call `leave` after the last turn.
        """
        me, mine, poll = threading.get_ident(), False, self._poll
        sleeper: SafeEvent | None = None
        try:
            with self._lock:
                if done():
                    return False
                if self.poller is None:
                    mine, self._done, self.poller = True, done, me
                elif self.poller == me:
                    poll = poll.copy()  # a handler has interrupted the poll of its own thread
                else:
                    sleeper = self.sleeper(done)
            if sleeper is not None:
                self.sleep(sleeper, timeout)
                return True
            ready = poll.wait(timeout)
            with self._lock:
                if mine:
                    mine, self.poller = False, None
                if self._waker is not None and WAKER in ready:
                    ready.remove(WAKER)
                    self._waker.clear()
                self._read(ready)
                if self._sleeping or self.poller is not None:
                    self.wake()
                return not done()
        except BaseException:
            with self._lock:
                if mine:
                    self.poller = None
                if sleeper is not None:
                    self._sleeping.pop(sleeper, None)
                self.wake()
            raise

    def is_over(self) -> bool:
        """Return True if the condition of the thread that is just reading is met."""
        return self._done()

    def leave(self) -> None:
        """Let another thread poll, if there are sleeping threads and none polls."""
        if self._sleeping:  # a thread that falls asleep later has seen that another one polls
            with self._lock:
                self._hand_over()

    def sleeper(self, done: Callable[[], bool]) -> SafeEvent:
        """Return an event that is set once `done()` is true, or its thread must poll."""
        event = SafeEvent()
        self._sleeping[event] = done
        return event

    def sleep(self, sleeper: SafeEvent, timeout: float) -> bool:
        """Wait for such an event, for `timeout` seconds at most; return whether it was set."""
        try:
            return sleeper.wait(timeout)
        finally:
            self._sleeping.pop(sleeper, None)

    def wake(self) -> None:
        """Wake the threads whose wait is over. Call it with the lock held."""
        for event, done in list(self._sleeping.items()):
            if done():
                self._sleeping.pop(event, None)
                event.set()
        if self.poller is not None and self._done():
            self._rouse()

    def read_in(self, seconds: float) -> None:
        """Do nothing: a thread that waits reads at least every `LONGEST_S`."""

    async def aside(self, call: Callable[[], object]) -> None:
        """Make a call that blocks, without blocking an event loop."""
        call()

    def event(self) -> PolledEvent:
        """Return an event; a thread that waits for it polls meanwhile."""
        with self._lock:
            if self._waker is None and not self._closed:
                waker = self._waker = _Waker()
                self._poll.watch(WAKER, waker.fileno())
        return PolledEvent(self)

    def close(self) -> None:
        """Close our own pipe. Call it with the lock held, once all events are set."""
        self._closed = True
        self._poll.forget(WAKER)
        waker, self._waker = self._waker, None
        if waker is not None:
            waker.close()

    def notify(self) -> None:
        """Wake the threads whose wait is over."""
        with self._lock:
            self.wake()

    def _hand_over(self) -> None:
        if self.poller is None and self._sleeping:
            event = next(iter(self._sleeping))
            del self._sleeping[event]
            event.set()

    def _rouse(self) -> None:
        """Make the polling thread return from its poll."""
        if self.poller is not None and self._waker is not None:
            self._waker.wake()


class PolledEvent:
    """A flag that others set while someone waits for it and polls. A wait clears it."""

    def __init__(self, poll: SharedPoll) -> None:
        self._poll = poll
        self._set = False

    def set(self) -> None:
        """Wake who waits, or will wait next."""
        self._set = True
        self._poll.notify()

    def is_set(self) -> bool:
        """Return True if it was set since the last wait."""
        return self._set

    def clear(self) -> None:
        """Forget that it was set."""
        self._set = False

    def wait(self, timeout: float) -> bool:
        """Wait until it is set, for at most `timeout` seconds; return True if it was."""
        return blocking(self.waited(timeout))

    async def waited(self, timeout: float) -> bool:
        """Do the same in a coroutine."""
        await self._poll.until(self.is_set, timeout)
        was_set, self._set = self._set, False
        return was_set


class _Waker:
    """A pipe that ends another thread's poll."""

    def __init__(self) -> None:
        self._ends: tuple[int, ...] = ()
        self._ends = os.pipe()
        for end in self._ends:
            os.set_blocking(end, False)

    def fileno(self) -> int:
        return self._ends[0]

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # it is full, and will be read
            os.write(self._ends[1], b"\0")

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            os.read(self._ends[0], 4096)

    def close(self) -> None:
        ends, self._ends = self._ends, ()
        for end in ends:
            os.close(end)

    __del__ = close  # also in the child of a fork
