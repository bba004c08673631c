"""Watch that a body makes progress: `progress_timeout`.

A body that hangs is alive, so its lease is extended. If it has to report its progress and does not,
it is told to end. It keeps its lock until it has ended: it may be in the middle of a write, and
nobody can know whether it has noticed. If it is silent for as long again, the supervisor kills its
process, if that is a child of a pool (`supervisor.py`).
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
"""A look that comes later than this, and by more than half of the timeout, finds that the watchdog
itself could not run: all of its process was stopped (`docker pause`), and the body as well."""

T = TypeVar("T")


class Progress:
    """Watches the progress of one delivery's body, and stops the body if it makes none.

    Args:
        held: The lock that it runs under.
        timeout: For how long it may report nothing; seconds.
        on_lost: With "raise" it is told to end, and killed where that is possible; else it goes on.
    """

    def __init__(self, held: HeldLease, timeout: float, on_lost: object) -> None:
        self._held, self._timeout = held, timeout
        # Not the one for a lost lease: a body that goes on after this must still be told of that.
        self._block = Interruptible(self._stall) if on_lost == "raise" else None
        # By a clock that stands still while the machine is suspended, unlike the one of leases.
        self._since = math.inf
        self._due = math.inf  # the next look
        self._spared = -math.inf  # until when the watchdog was away
        self._silent = 0.0

    def run(self, body: Callable[[], T]) -> T:
        """Return what `body` returns, unless it is silent for too long."""
        held, client = self._held, self._held.redlock.client
        if held.claim is None or held.lost:
            return body()  # without its lock: there is nothing for it to keep
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
        """Tell of a silence that is too long, once; return when to look again, in seconds."""
        now = time.monotonic()
        if now - self._due > max(self._timeout / 2, AWAY_S):
            self._spare(now)
        silent = now - max(self._since, self._spared)
        again = self._timeout - silent if silent < self._timeout else self._timeout
        self._due = now + again
        if silent >= self._timeout and not self._held.stalled:
            self._silent, self._held.stalled = silent, True
            self._tell(self._stall())
        return again

    def _spare(self, now: float) -> None:
        """Count its silence from now on; only once until it reports.

        The watchdog may also have been kept away by a C call of the body that keeps the GIL.
        """
        if self._spared < self._since < math.inf:
            self._spared = now
            self._may_be_killed(now + 2 * self._timeout)
            if self._since == math.inf:  # it has just ended
                self._may_be_killed(math.inf)

    def _tell(self, loss: LeaseLost) -> None:
        goes_on = self._block is None
        logger.log(
            logging.WARNING if goes_on else logging.ERROR,
            "no progress for %.1f s under the lock %s held by %s: its work %s",
            self._silent,
            printable(self._held.resource),
            loss.owner,
            "goes on" if goes_on else "is told to end, and is locked until then",
            extra=event("progress_stalled", self._held.resource),
        )
        emit("lost", loss)
        if self._block is not None:
            self._block.interrupt()
        elif self._held.on_lost is not None:
            self._held._begin_to_tell()

    def _stall(self) -> LeaseLost:
        said = f"no progress was reported for {self._silent:.1f} s (stalled); stop working"
        return self._held._error(said, "stalled")
