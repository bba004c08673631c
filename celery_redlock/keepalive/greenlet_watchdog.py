"""The watchdog where threads are greenlets: it lives in a native thread, with a hub of its own.

So a body that computes for long and never lets another greenlet run keeps its lock. The native
thread shares no connection with the greenlets, for neither may wait for the other: it has one to
each node besides theirs, and its own hub carries them. On these it only *renews*. Were it to set a
missing key again, it might do so behind the release of that lease, which travels on the other
connection. It asks the greenlets to do that instead, in order with their releases; and it asks them
to tell of a loss, for it is among them that listeners and bodies live.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial

from ..events import heard
from ..protocol.claim import Claim
from ..protocol.lease import NEVER
from ..runtime.greenlets import (
    Doorbell,
    GreenletExecutor,
    end_hub,
    native_ident,
    native_rlock,
    start_native,
)
from ..runtime.haste import haste
from ..stores.redis.driver import Driver
from .watchdog import BUSY, Schedule, Watched

__all__ = ["GreenletWatchdog"]

logger = logging.getLogger("celery_redlock.watchdog")

CONNECT = 0.1
"""Seconds to wait for a quorum of connections. Nothing later waits: leases may be ending."""
TALKATIVE = ("celery_redlock.node",)
"""The loggers of what runs in the native thread."""


class GreenletWatchdog:
    """Keeps leases alive as `Watchdog` does, from a native thread.

    Args:
        driver: Makes the driver of the native thread.
        renew: Renews claims over a driver, and returns those that a quorum confirmed.
        renewed: Told of these, and of all that were asked for, in a greenlet.
        repair: Asked in a greenlet to set claims again where they are missing.
        clock: Seconds on the clock of leases.
    """

    def __init__(
        self,
        driver: Callable[[], Driver],
        renew: Callable[[Sequence[Claim], Driver], Sequence[Claim]],
        renewed: Callable[[Sequence[Claim], Sequence[Claim]], object],
        repair: Callable[[Sequence[Claim]], object],
        clock: Callable[[], float],
    ) -> None:
        self._driver = driver
        self._renew = renew
        self._renewed = renewed
        self._repair = repair
        self._clock = clock
        # Held for some steps of Python and never while anything is waited for (`greenlets.py`). A
        # handler may come by again meanwhile: see `Schedule`.
        self._lock = native_rlock()
        self.schedule = Schedule()
        self._wakes = math.inf
        self._bell: Doorbell | None = None
        self._errands: GreenletExecutor | None = None
        self._closed = False

    def watch(
        self,
        claim: Claim,
        lost: Callable[[Claim], None],
        max_lifetime: float | None = None,
    ) -> None:
        """Extend `claim` from now on; call `lost(claim)` if that ends against its holder's will.

        Args:
            claim: A held claim.
            lost: Called in a greenlet of this thread; `claim.lost` says why.
            max_lifetime: Seconds after the grant at which extension ends; None for never.
        """
        assert claim.granted_at is not None
        until = claim.granted_at + max_lifetime if max_lifetime else math.inf
        if self._bell is None:
            self._bell = Doorbell()
            self._errands = GreenletExecutor()
            start_native(self._run)
        with self._lock:
            self.schedule.add(Watched(claim, until, lost), self._clock())
            sooner = self.schedule.wakes < self._wakes
        if sooner:
            self._bell.ring()

    def drop(self, claim: Claim) -> None:
        """Stop extending `claim`."""
        with self._lock:
            self.schedule.drop(claim)

    @property
    def next_due(self) -> float:
        """When other leases fall due than those being extended; seconds, infinity for never."""
        return self.schedule.wakes

    def close(self) -> None:
        """Stop extending anything."""
        with self._lock:
            closed, self._closed = self._closed, True
            self.schedule = Schedule()
        if self._bell is not None and not closed:
            self._bell.ring()

    # -- In the native thread --------------------------------------------------------------------

    def _run(self) -> None:
        assert self._bell is not None and self._errands is not None
        relay = _Relay(self._errands)
        for name in TALKATIVE:
            logging.getLogger(name).addFilter(relay)
        driver = self._driver()
        driver.connect(CONNECT)  # now, and not when the first lease falls due
        while not self._closed:
            now = self._clock()
            with self._lock:
                self._wakes = wakes = self.schedule.wakes
                due = self.schedule.take(now) if wakes <= now else []
                if due:
                    self._wakes = -math.inf  # nobody need ring: we are awake
            if due:
                with haste():
                    self._tend(driver, due)
            else:
                self._bell.wait(None if wakes == math.inf else max(BUSY, wakes - now))
        driver.close()
        self._errands.close()
        for name in TALKATIVE:
            logging.getLogger(name).removeFilter(relay)
        end_hub()

    def _tend(self, driver: Driver, due: Sequence[Watched]) -> None:
        assert self._errands is not None
        alive, over = self.schedule.part(due, self._clock())
        self._settle(over, ())
        renewed: Sequence[Claim] = ()
        if alive:
            try:
                renewed = self._renew([watched.claim for watched in alive], driver)
            except BaseException as error:
                say = partial(logger.error, "could not extend %d leases: %r", len(alive), error)
                self._errands.ask(say)
            if heard():
                asked = [watched.claim for watched in alive]
                self._errands.ask(partial(self._renewed, renewed, asked))
            missing = [w.claim for w in alive if NEVER in w.claim.expiries]
            if missing:
                self._errands.ask(partial(self._repair, missing))
        self._settle(alive, renewed)

    def _settle(self, due: Sequence[Watched], renewed: Sequence[Claim]) -> None:
        assert self._errands is not None
        with self._lock:
            lost = self.schedule.settle(due, renewed, self._clock())
        for watched in lost:
            self._errands.ask(partial(watched.lost, watched.claim))


class _Relay(logging.Filter):
    """Has what this native thread logs written by a greenlet: the locks of logging are theirs."""

    def __init__(self, errands: GreenletExecutor) -> None:
        super().__init__()
        self._errands = errands
        self._thread = native_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log it here and now."""
        if native_ident() != self._thread:
            return True
        self._errands.ask(partial(logging.getLogger(record.name).handle, record))
        return False
