"""Poll sockets in an event loop, and wake the coroutines that wait for them."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from .polling import SharedPoll

__all__ = ["LoopEvent", "LoopPoll"]


class LoopEvent:
    """An event like `SafeEvent`: any thread sets it, and a coroutine of the loop waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake the coroutine that waits, or that will wait next."""
        if threading.get_ident() == self._thread:
            self._event.set()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    def clear(self) -> None:
        """Forget that it was set."""
        self._event.clear()

    async def wait(self, timeout: float) -> None:
        """Wait until it is set, for at most `timeout` seconds, and clear it."""
        timer = self._loop.call_later(timeout, self._event.set)
        try:
            await self._event.wait()
        finally:
            timer.cancel()
        self._event.clear()


class LoopPoll(SharedPoll):
    """Sockets that an event loop polls. All methods but `watch` are called in its thread only.

    Args:
        loop: The loop.
        lock, read: See `SharedPoll`.
        then: Called in the loop after a read, or after a change by another thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lock: AbstractContextManager[bool],
        read: Callable[[Sequence[int]], object],
        then: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(lock, read)
        self._loop, self._then = loop, then
        # Duplicates of the descriptors: the loop must forget a descriptor before it is closed,
        # because its number may soon be reused.
        self._streams: dict[int, socket.socket] = {}
        self._ticks = False

    def watch(self, index: int, fd: int) -> None:
        """Poll a socket from now on. Call it with the lock held, in any thread."""
        super().watch(index, fd)
        self._call(self._begin, index, fd)

    def forget(self, index: int) -> None:
        """Stop polling a socket. Call it with the lock held."""
        super().forget(index)
        stream = self._streams.pop(index, None)
        if stream is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(stream)
            stream.close()

    def wake(self) -> None:
        """Make the loop call `then`."""
        super().wake()
        self._call(self._then)

    def is_over(self) -> bool:
        """Return False: the loop always reads on."""
        return False

    def event(self) -> LoopEvent:  # type: ignore[override]
        """Return an event for a coroutine of the loop."""
        return LoopEvent(self._loop)

    def read_every(self, seconds: float) -> None:
        """Call `read` without a socket every so many seconds, as long as any socket is polled."""
        self._call(self._begin_to_tick, seconds)

    def _call(self, call: Callable[..., object], *args: Any) -> None:
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
        self._then()

    def _begin_to_tick(self, seconds: float) -> None:
        if not self._ticks:
            self._ticks = True
            self._tick(seconds)

    def _tick(self, seconds: float) -> None:
        self._ready()
        self._ticks = bool(self._streams)
        if self._ticks:
            self._loop.call_later(seconds, self._tick, seconds)
