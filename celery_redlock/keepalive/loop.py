"""Extend leases from an event loop, with a timer of the loop in place of a thread.

Not an asyncio task: the end of a program cancels all tasks, and their leases must last until each
task has released its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..protocol.claim import Claim
from ..protocol.texts import event
from ..runtime.clock import monotonic
from .watchdog import CHASE_EVERY_S, READ_AFTER_S, Watchdog, Watched

__all__ = ["LoopWatchdog"]

logger = logging.getLogger("celery_redlock.watchdog")


class LoopWatchdog(Watchdog):
    """The extender of an event loop's leases; see `Watchdog`.

    Args:
        loop: The loop.
        extend: Function that begins to extend claims, and later calls its second argument with the
            claims that a quorum confirmed.
        chase: See `Driver.chase`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        extend: Callable[[Sequence[Claim], Callable[[Sequence[Claim]], None]], None],
        chase: Callable[[], bool],
    ) -> None:
        super().__init__(lambda _claims: (), monotonic, chase)
        self._loop = loop
        self._start_to_extend = extend
        self._timer: asyncio.TimerHandle | None = None

    def read_soon(self, after: float = READ_AFTER_S) -> None:
        """Do nothing: the loop reads."""

    def chase_soon(self, after: float = CHASE_EVERY_S) -> None:
        """Send postponed requests, and repeat unconfirmed releases, before long."""
        self._loop.call_later(after, self._chase)

    def _chase(self) -> None:
        if not self._closed and not self._read():
            self.chase_soon()

    def wake(self) -> None:
        """Look at the clock and the schedule again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wakes = self.schedule.wakes
        if self._wakes < math.inf:
            left = max(0.0, self._wakes - self._clock())
            self._timer = self._loop.call_later(left, self._tick)

    def extend_due(self, due: Sequence[Watched]) -> None:
        """Begin to extend leases that are due; report those that are over."""
        alive, over = self.schedule.part(due, self._clock())
        self._settle(over, ())
        if not alive:
            return
        try:
            self._start_to_extend([one.claim for one in alive], partial(self._extended, alive))
        except Exception:
            logger.exception(
                "could not extend %d leases", len(alive), extra=event("extension_failed")
            )
            self._extended(alive, ())

    def _begin(self) -> None:
        """Start no thread."""

    def _tick(self) -> None:
        self.extend_due(self.schedule.take(self._clock()))
        self.wake()

    def _extended(self, due: Sequence[Watched], renewed: Sequence[Any]) -> None:
        self._settle(due, renewed)
        self.wake()
