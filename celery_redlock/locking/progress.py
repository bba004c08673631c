"""Watches that a body gets on: `progress_timeout`.

A body that hangs is alive, so its lease is extended, and its key stays locked. One that is to
report its progress, and is silent, is told to end. It keeps its lock until it has ended: it may be
in the middle of a write, and nobody can know whether it has heard. Where its process is a child of
a pool, the supervisor kills that if it is silent for as long again: see `supervisor.py`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TypeVar

from ..events import emit
from ..protocol.claim import Claim
from ..protocol.errors import LeaseLost
from ..protocol.texts import printable
from ..runtime.interrupt import Interruptible
from .held import HeldLease

__all__ = ["Progress"]

logger = logging.getLogger("celery_redlock")

T = TypeVar("T")


class Progress:
    """Whether the body of one delivery gets on, and what becomes of it if it does not.

    Silence is measured by a clock that stands still while the machine is suspended, unlike that of
    leases: nobody works then.

    Args:
        held: The lock that it runs under.
        timeout: For how long it may report nothing; seconds.
        on_lost: "raise": it is told, and killed where it can be. Otherwise others are told.
    """

    def __init__(self, held: HeldLease, timeout: float, on_lost: object) -> None:
        self._held, self._timeout, self._on_lost = held, timeout, on_lost
        self._block = Interruptible(self._stall) if on_lost == "raise" else None
        self._since = math.inf  # no body is silent that has not begun, or has ended
        self._silent = 0.0

    def run(self, body: Callable[[], T]) -> T:
        """Return what `body` returns, unless it is silent for too long."""
        held, claim = self._held, self._held.claim
        if claim is None or held.lost:
            return body()  # without its lock: there is nothing for it to keep
        client = held.redlock.client
        kills = self._block is not None and client.registry.in_pool_child
        try:
            held._on_progress = lambda: self._report(claim, kills)
            held._on_progress()
            client.watchdog.look_at(claim, self._look)
            return body() if self._block is None else self._block.run(body)
        finally:
            held._on_progress = None
            self._since = math.inf
            client.registry.patience(claim, math.inf)

    def _report(self, claim: Claim, kills: bool) -> None:
        self._since = now = time.monotonic()
        self._held.stalled = False
        if kills:
            self._held.redlock.client.registry.patience(claim, now + 2 * self._timeout)

    def _look(self) -> float:
        """Tell of a silence that is too long, once; return when to look again, in seconds."""
        silent = time.monotonic() - self._since
        if silent < self._timeout:
            return self._timeout - silent
        if not self._held.stalled:
            self._silent, self._held.stalled = silent, True
            self._tell()
        return self._timeout

    def _tell(self) -> None:
        held, loss = self._held, self._stall()
        logger.log(
            logging.WARNING if self._block is None else logging.ERROR,
            "no progress for %.1f s under the lock %s held by %s: its work %s",
            self._silent,
            printable(held.resource),
            loss.owner,
            "goes on" if self._block is None else "is told to end, and is locked until then",
        )
        emit("lost", loss)
        if self._block is not None:
            self._block.interrupt()
        elif held.on_lost is not None:
            held._begin_to_tell()

    def _stall(self) -> LeaseLost:
        return self._held._error(
            f"no progress was reported for {self._silent:.1f} s (stalled); stop, the lock is kept"
            " until then",
            "stalled",
        )
