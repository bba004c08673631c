"""Poll sockets for the coroutines of an event loop, and keep its timer, both without a thread."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from .polling import SharedPoll
from .timer import Timer

__all__ = ["LoopEvent", "LoopPoll", "LoopTimer"]


class LoopEvent:
    """An event like `PolledEvent`: any thread sets it, and a coroutine of the loop waits for it."""

    def __init__(self, poll: LoopPoll) -> None:
        self._poll = poll
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake the coroutine that waits, or that will wait next."""
        self._poll.call(self._event.set)

    def clear(self) -> None:
        """Forget that it was set."""
        self._event.clear()

    async def waited(self, timeout: float) -> None:
        """Wait until it is set, for at most `timeout` seconds, and clear it."""
        await self._poll.sleep_on(self._event, timeout)
        self._event.clear()


class LoopPoll(SharedPoll):
    """Sockets that an event loop polls, for the coroutines that wait for them.

    Args:
        loop: The loop; this is its thread.
        lock, read, then: See `SharedPoll`.
    """

    reads_on = True

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lock: AbstractContextManager[bool],
        read: Callable[[Sequence[int]], object],
        then: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(lock, read, then)
        self._loop, self._thread = loop, threading.get_ident()
        # Duplicates of the descriptors: the loop must forget a descriptor before it is closed,
        # because its number may soon be reused.
        self._streams: dict[int, socket.socket] = {}
        self._next: asyncio.TimerHandle | None = None
        self._aside: asyncio.Future[object] | None = None

    def watch(self, index: int, fd: int) -> None:
        """Poll a socket from now on. Call it with the lock held, in any thread."""
        super().watch(index, fd)
        self.call(self._begin, index, fd)

    def forget(self, index: int) -> None:
        """Stop polling a socket. Call it with the lock held."""
        super().forget(index)
        stream = self._streams.pop(index, None)
        if stream is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(stream)
            stream.close()

    async def until(
        self, done: Callable[[], bool], seconds: float, most: Callable[[], float] = lambda: math.inf
    ) -> None:
        """Wait until `done()`, for some seconds; not at all if there are none."""
        most()
        if seconds <= 0 or done():
            return
        news = asyncio.Event()
        self._sleeping[news] = done
        try:
            await self.sleep_on(news, seconds)
        finally:
            self._sleeping.pop(news, None)
        if not done():
            self._ready(*self._streams)  # an unread answer is no silence, however late it is

    async def sleep_on(self, news: asyncio.Event, seconds: float) -> None:
        """Wait until an event is set, or until the time is over, and then set it."""
        timer = self._loop.call_later(seconds, news.set)
        try:
            await news.wait()
        finally:
            timer.cancel()

    def event(self) -> LoopEvent:  # type: ignore[override]
        """Return an event for a coroutine of the loop; to set it costs the same for any number."""
        return LoopEvent(self)

    def wake(self) -> None:
        """Wake the coroutines whose wait is over. Any thread that has the lock may call it."""
        self.call(self._look)

    def leave(self) -> None:
        """Do nothing: no coroutine polls for the others."""

    def read_in(self, seconds: float) -> None:
        """Read in some seconds at the latest, also without data. Any thread may call it."""
        self.call(self._read_in, seconds)

    async def aside(self, call: Callable[[], object]) -> None:
        """Make a call in another thread, once for all coroutines that ask for it meanwhile."""
        if self._aside is None or self._aside.done():
            self._aside = self._loop.run_in_executor(None, call)
            # Retrieve the exception even if all waiting coroutines were cancelled.
            self._aside.add_done_callback(lambda made: made.cancelled() or made.exception())
        await asyncio.shield(self._aside)

    def call(self, call: Callable[..., object], *args: Any) -> None:
        """Make a call in the loop's thread: at once, if this is it."""
        if threading.get_ident() == self._thread and not self._loop.is_closed():
            call(*args)
            return
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, *args)

    def _begin(self, index: int, fd: int) -> None:
        with self._lock:
            if self._poll.watches(index, fd) and index not in self._streams:
                stream = self._streams[index] = socket.socket(fileno=os.dup(fd))
                self._loop.add_reader(stream, self._ready, index)

    def _ready(self, *indexes: int) -> None:
        with self._lock:
            self._read(indexes)
        self._look()

    def _look(self) -> None:
        self._then()
        with self._lock:
            super().wake()

    def _read_in(self, seconds: float) -> None:
        when = self._loop.time() + seconds
        if self._next is None or when < self._next.when():
            if self._next is not None:
                self._next.cancel()
            self._next = self._loop.call_at(when, self._tick)

    def _tick(self) -> None:
        self._next = None
        self._ready()


class LoopTimer(Timer):
    """A timer of an event loop, in place of a thread.

    Not an asyncio task: the end of a program cancels all tasks, and leases must last until each
    task has released its own.
    """

    caught = Exception  # a KeyboardInterrupt must reach the loop

    def __init__(self, loop: asyncio.AbstractEventLoop, turn: Callable[[], float | None]) -> None:
        super().__init__(turn)
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Do nothing: the loop runs."""

    def wake(self) -> None:
        """Take the next turn soon. Any thread may call it."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        left = self._turn()
        if left is not None and left < math.inf:
            self._handle = self._loop.call_later(left, self._run)
