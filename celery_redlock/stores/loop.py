"""Carry rounds to the nodes from an event loop, which polls the same connections.

A coroutine writes its round at once, as a thread does, and is suspended only to wait for answers.
So a cancelled coroutine has written its whole round or nothing of it, and the request that undoes
the round is written behind it before anything else runs. Only the loop's thread, and the threads
that make connections, use this driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ..protocol.round import Round, Steps
from ..runtime.clock import monotonic
from ..runtime.loop_polling import LoopPoll
from ..runtime.polling import SharedPoll
from .driver import UNWATCHED_POLL_S, Driver, decided
from .node import LEAVE_S

__all__ = ["LoopDriver"]

T = TypeVar("T")


class _Asked(NamedTuple):
    """Rounds that a coroutine waits for, and the future that wakes it."""

    rounds: Sequence[Round]
    news: asyncio.Future[None]

    def look(self, *, overdue: bool = False) -> None:
        if not self.news.done() and (overdue or decided(self.rounds)):
            self.news.set_result(None)


class LoopDriver(Driver):
    """The carrier of rounds for one event loop; for its other arguments see `Connections`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *args: Any, **options: Any) -> None:
        self._loop = loop
        self._asked: list[_Asked] = []
        self._first: asyncio.Future[None] | None = None
        self._flush: asyncio.TimerHandle | None = None
        super().__init__(*args, **options)

    def _shared_poll(self) -> SharedPoll:
        return LoopPoll(self._loop, self._lock, self._read_nodes, self._look)

    async def ask(
        self, operation: Callable[[float], Steps[T]], ahead: Callable[[float], Round] | None = None
    ) -> T:
        """Run one operation to its end, as `run` does in a thread."""
        try:
            steps = operation(monotonic())
            round_ = next(steps)
            if not self._ready and not round_.verb.can_wait:
                await self._connected()
                steps = operation(monotonic())
                round_ = next(steps)
            rounds = [round_] if ahead is None else [ahead(monotonic()), round_]
            while True:
                await self._carried(rounds)
                rounds = [steps.send(monotonic())]
        except StopIteration as stop:
            result = stop.value
        self._settle()
        return result  # type: ignore[no-any-return]

    def start(self, operation: Callable[[float], Steps[T]], done: Callable[[T], object]) -> None:
        """Write the only round of an operation; call `done` with its result when it is known."""
        super().start(operation, done)
        for unread in self._unread[-1:]:
            self._loop.call_later(max(0.0, unread.round.until - monotonic()), self._read_all)
        self._look()

    def close(self, wait: float = 0.0) -> None:
        """Close all connections; leases that are not released expire by their ttl."""
        super().close(wait)
        self._look()

    async def _connected(self) -> None:
        """Wait until the first operation may begin; a thread waits for the connections."""
        if self._first is None or self._first.done():
            connect = partial(self.connect, hung=self._node_timeout)
            self._first = self._loop.run_in_executor(None, connect)
            # Retrieve the exception even if all waiting coroutines were cancelled.
            self._first.add_done_callback(lambda first: first.cancelled() or first.exception())
        await asyncio.shield(self._first)

    async def _carried(self, rounds: Sequence[Round]) -> None:
        """Write rounds to their nodes, and wait until each is decided or overdue."""
        with self._lock:
            self._write(rounds)
        self._flush_soon()
        left = max([round_.until for round_ in rounds]) - monotonic()
        if left > 0 and not decided(rounds):
            asked = _Asked(rounds, self._loop.create_future())
            self._asked.append(asked)
            timers = [self._loop.call_later(left, self._overdue, asked)]
            if left > LEAVE_S:
                timers.append(self._loop.call_later(LEAVE_S + UNWATCHED_POLL_S, self._read_all))
            try:
                await asked.news
            finally:
                for timer in timers:
                    timer.cancel()
                self._asked.remove(asked)
        with self._lock:  # skipped if the coroutine was cancelled, because no node was late then
            for round_ in rounds:
                self._close(round_)

    def _overdue(self, asked: _Asked) -> None:
        self._read_all()  # a node whose answer has arrived unread is not silent
        asked.look(overdue=True)

    # -- What the loop calls

    def _read_all(self) -> None:
        with self._lock:
            for node in self.nodes:
                node.receive()
            self._read_nodes(())
        self._look()

    def _look(self) -> None:
        """Continue operations after a read, or after a new connection."""
        self._flush_soon()
        if self._unread:
            with self._lock:
                self._conclude()
        for asked in self._asked:
            asked.look()
        self._settle()

    def _flush_soon(self) -> None:
        """Write, before long, the rest of requests that did not fit into a socket's buffer."""
        self._clogged = [node for node in self.nodes if node.unsent]
        if self._clogged and (self._flush is None or self._flush.when() <= self._loop.time()):
            self._flush = self._loop.call_later(UNWATCHED_POLL_S, self._read_all)
