"""Watch that a body makes progress: `progress_timeout`.

A body that hangs is alive, so its lease is extended. If it must report its progress and does not,
an exception is raised in it. It keeps its lock until it has ended, because it may be in the middle
of a write, and nobody can know if the exception has reached it. If it is silent for as long again,
the supervisor kills its process, if that is a child of a pool (`supervisor.py`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TypeVar

from ..events import emit
from ..protocol.errors import LeaseLost
from ..protocol.texts import event, printable
from ..runtime.interrupt import Interruptible
from .held import HeldLease

__all__ = ["Progress"]

logger = logging.getLogger("celery_redlock")

AWAY_S = 0.5
"""If a look is late by more than this many seconds, and by more than half of the timeout, the
watchdog itself could not run: its whole process was stopped (`docker pause`), and with it the
body."""

T = TypeVar("T")


class Progress:
    """Watcher of the progress of one delivery's body, which stops the body if it makes none.

    Args:
        held: The lock that the body runs under.
        timeout: The longest time without a report; seconds.
        on_lost: With "raise" a silent body is interrupted, and later its process is killed if it is
            a pool child; with anything else the body goes on.
    """

    def __init__(self, held: HeldLease, timeout: float, on_lost: object) -> None:
        self._held, self._timeout = held, timeout
        # Not the block for a lost lease: a body that goes on after this one must still be
        # interruptible when its lease is lost.
        self._block = Interruptible(self._stall) if on_lost == "raise" else None
        # By a clock that stops while the machine is suspended, unlike the clock of leases.
        self._since = math.inf
        self._due = math.inf  # the next look
        self._spared = -math.inf  # until when the watchdog was away
        self._silent = 0.0

    def run(self, body: Callable[[], T]) -> T:
        """Return what `body` returns, unless it is silent for too long."""
        held, client = self._held, self._held.redlock.client
        if held.claim is None or held.lost:
            return body()  # it has no lock, so its silence keeps nobody waiting
        try:
            held._on_progress = self._report
            self._report()
            client.watchdog.look_at(held.claim, self._look)
            return body() if self._block is None else self._block.run(body)
        finally:
            held._on_progress, self._since = None, math.inf
            client.registry.patience(held.claim, math.inf)

    def _report(self) -> None:
        self._since = time.monotonic()
        self._held.stalled = False
        self._may_be_killed(self._since + 2 * self._timeout)

    def _may_be_killed(self, after: float) -> None:
        if self._block is not None:
            self._held.redlock.client.registry.patience(self._held._known_claim(), after)

    def _look(self) -> float:
        """Report a silence that is too long, once; return the seconds until the next look."""
        now = time.monotonic()
        if now - self._due > max(self._timeout / 2, AWAY_S):
            self._spare(now)
        silent = now - max(self._since, self._spared)
        again = self._timeout - silent if silent < self._timeout else self._timeout
        self._due = now + again
        if silent >= self._timeout and not self._held.stalled:
            self._silent, self._held.stalled = silent, True
            self._report_stall(self._stall())
        return again

    def _spare(self, now: float) -> None:
        """Count its silence from now on; only once until its next report.

        Only once, because the watchdog may also have been blocked by a C call of the body that
        keeps the GIL.
        """
        if self._spared < self._since < math.inf:
            self._spared = now
            self._may_be_killed(now + 2 * self._timeout)
            if self._since == math.inf:  # it has just ended
                self._may_be_killed(math.inf)

    def _report_stall(self, loss: LeaseLost) -> None:
        goes_on = self._block is None
        logger.log(
            logging.WARNING if goes_on else logging.ERROR,
            "no progress for %.1f s under the lock %s held by %s: its work %s",
            self._silent,
            printable(self._held.resource),
            loss.owner,
            "goes on" if goes_on else "is interrupted, and keeps the lock until it ends",
            extra=event("progress_stalled", self._held.resource),
        )
        emit("lost", loss)
        if self._block is not None:
            self._block.interrupt()
        elif self._held.on_lost is not None:
            self._held._start_on_lost()

    def _stall(self) -> LeaseLost:
        said = f"no progress was reported for {self._silent:.1f} s (stalled); stop working"
        return self._held._error(said, "stalled")
