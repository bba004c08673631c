"""Extend leases that are due, and report those that are lost.

One thread per process serves all leases, and one round extends all that are due: 10 000 leases cost
one thread. A lease is extended every ttl/3, so that two rounds may fail before it is in danger, and
every ttl/10 after a failure. The first lease starts the thread, which sleeps while nothing is due.
Short tasks cost next to nothing: they wake the thread once a second at most. In an event loop, a
timer of the loop replaces the thread.

Where gevent has patched Python the thread is a greenlet, and runs only while the others wait.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ..protocol.claim import Claim
from ..protocol.texts import event
from ..runtime.timer import Timer

__all__ = ["Schedule", "Watchdog", "Watched"]

logger = logging.getLogger("celery_redlock.watchdog")

EVERY, RETRY_EVERY = 1 / 3, 1 / 10
"""Pauses before the next extension, and before another try after a failure; parts of the ttl."""
READ_AFTER_S = 0.05
"""Seconds until answers are read that nobody waits for. Under load the next task has read them by
then, and this thread is woken at most twenty times a second."""
READ_AGAIN_S = 0.25
"""Seconds between later looks for missing answers: a node hangs, or has closed its connection."""
LOOK_AGAIN_S = 1.0
"""Seconds after which the thread looks again once it was woken: no lease that is due later wakes it
until then."""
TOGETHER = 1 / 6
"""Leases that are due within this part of the ttl are extended in one round. Half of `EVERY`: so
there are two rounds at most in that time, each of which looks through all leases."""


@dataclass(slots=True, eq=False)
class Watched:
    """A lease under extension, its end time, and the callback for its loss.

    Attributes:
        due: The time of the next extension or look; infinity while a round is under way. Seconds.
        block: A weak reference to the exit of the block that it is held for, or None.
        look: Function that checks its work, and returns the seconds until it must be called again.
        looks: The time of the next call of `look`; seconds.
    """

    claim: Claim
    until: float
    lost: Callable[[Claim], None]
    due: float = math.inf
    block: weakref.ref[object] | None = None
    look: Callable[[], float] = lambda: math.inf
    looks: float = math.inf


class Schedule:
    """Schedule of due extensions. Pure and lock-free, so that the simulator can run it.

    A handler that interrupts a method may add and drop leases: each step is one operation on the
    dict, and loops run over a copy.

    Attributes:
        watched: The leases under extension, by token.
    """

    def __init__(self) -> None:
        self.watched: dict[str, Watched] = {}

    @property
    def wakes(self) -> float:
        """The next due time; seconds, infinity for never. A round must end before it."""
        return min([watched.due for watched in self.watched.copy().values()], default=math.inf)

    def add(self, watched: Watched, now: float) -> None:
        """Schedule the extensions of a lease, from now on."""
        self._put_off(watched, now + watched.claim.ttl * EVERY)
        self.watched[watched.claim.token] = watched

    def drop(self, claim: Claim) -> Watched | None:
        """Remove a lease, and return it; None if it was not scheduled."""
        return self.watched.pop(claim.token, None)

    def take(self, now: float) -> list[Watched]:
        """Return the leases that are due, or nearly due. Call `settle` for each of them later."""
        due = [
            watched
            for watched in self.watched.copy().values()
            if watched.due <= now + watched.claim.ttl * TOGETHER
        ]
        for watched in due:
            watched.due = math.inf
        return due

    def part(self, due: Sequence[Watched], now: float) -> tuple[list[Watched], list[Watched]]:
        """Part the due leases into those to extend and those that are over."""
        alive: list[Watched] = []
        over: list[Watched] = []
        for watched in due:
            if not watched.claim.held(now):
                over.append(watched)
            elif now < watched.until:
                alive.append(watched)
            else:
                watched.claim.lose("max_lifetime")
                over.append(watched)
        return alive, over

    def settle(self, due: Sequence[Watched], renewed: Iterable[Claim], now: float) -> list[Watched]:
        """Schedule the next extension of each lease after a round; return those that are lost."""
        confirmed = set(renewed)
        all_are = len(confirmed) == len(due)  # nearly always
        lost = []
        ttl = later = math.nan  # leases of one ttl share one float: it would be 24 bytes for each
        for watched in due:
            claim = watched.claim
            if claim.ended or claim.token not in self.watched:
                self.watched.pop(claim.token, None)
            elif claim.held(now):
                if claim.ttl != ttl:
                    ttl, later = claim.ttl, now + claim.ttl * EVERY
                is_renewed = all_are or claim in confirmed
                self._put_off(watched, later if is_renewed else now + ttl * RETRY_EVERY)
            elif self.watched.pop(claim.token, None) is not None:
                lost.append(watched)
        return lost

    def _put_off(self, watched: Watched, due: float) -> None:
        watched.due = min(due, watched.claim.deadline, watched.until, watched.looks)


class Watchdog:
    """The extender of this process: extends leases until they are dropped, lost, or too old.

    Args:
        extend: Function that extends claims, and calls another one, once, with the claims that a
            quorum confirmed.
        clock: The clock of leases; seconds.
        read: Function that reads answers nobody waits for, and returns True if none is missing.
        timer: The factory of the timer that calls the watchdog when something is due.
        block_over: Function that takes a claim whose block is over, to have it released.
    """

    def __init__(
        self,
        extend: Callable[[Sequence[Claim], Callable[[Sequence[Claim]], None]], None],
        clock: Callable[[], float],
        read: Callable[[], bool] = lambda: True,
        timer: Callable[[Callable[[], float | None]], Timer] = Timer,
        block_over: Callable[[Claim], object] = lambda claim: None,
    ) -> None:
        self._block_over = block_over
        self._extend = extend
        self._clock = clock
        self._read = read
        self._reads = math.inf
        # Not a Condition: a `with` on that can be interrupted half-way. Reentrant: a handler that
        # interrupts the owner of the lock may take it again.
        self.lock = threading.RLock()
        self.schedule = Schedule()
        self._wakes = math.inf  # the next turn; -inf during a turn, which sees new due leases
        self._closed = False
        self._timer = timer(self._turn)

    def watch(
        self,
        claim: Claim,
        lost: Callable[[Claim], None],
        max_lifetime: float | None = None,
        block: weakref.ref[object] | None = None,
    ) -> None:
        """Extend `claim` from now on, and call `lost(claim)` if it is lost.

        Args:
            claim: A held claim.
            lost: Called in the watchdog's thread, or in its loop; `claim.lost` is the reason.
            max_lifetime: Seconds after the grant at which extension ends; None for never.
            block: A weak reference to the exit of the block that it is held for, or None.
        """
        assert claim.granted_at is not None
        until = claim.granted_at + max_lifetime if max_lifetime else math.inf
        watched = Watched(claim, until, lost, block=block)
        with self.lock:
            self.schedule.add(watched, self._clock())
            self._timer.begin()
        if watched.due < self._wakes:
            self.wake()

    def look_at(self, claim: Claim, look: Callable[[], float]) -> None:
        """Call `look()` now, and again after the seconds it returns, as long as `claim` lives."""
        with self.lock:
            watched = self.schedule.watched.get(claim.token)
            if watched is None:
                return  # lost already
            watched.look, watched.looks = look, self._clock() + look()
            watched.due = min(watched.due, watched.looks)
        if watched.due < self._wakes:
            self.wake()

    def drop(self, claim: Claim) -> None:
        """Stop extending `claim`. If it is over and that was not reported, report it now.

        The watchdog cannot have noticed if it did not run: a C call kept the GIL, or a greenlet
        never let another run.
        """
        with self.lock:
            watched = self.schedule.drop(claim)
        if watched is not None and not claim.ended and not claim.held(self._clock()):
            watched.lost(claim)

    def read_soon(self, after: float = READ_AFTER_S) -> None:
        """Read, before long, the answers that nobody waits for."""
        reads = self._clock() + after
        if reads < self._reads:
            with self.lock:
                self._reads = reads
            if reads < self._wakes:
                self.wake()

    def retry_soon(self, after: float = READ_AGAIN_S) -> None:
        """Send postponed requests, and repeat unconfirmed releases, before long."""
        with self.lock:
            self._timer.begin()
        self.read_soon(after)

    @property
    def next_due(self) -> float:
        """The next due time of the leases not being extended; seconds, infinity for never."""
        return self.schedule.wakes

    def wake(self) -> None:
        """Have the timer look at the clock and the schedule again."""
        self._timer.wake()

    def close(self) -> None:
        """Stop extending anything."""
        with self.lock:
            self._closed = True
            self.schedule = Schedule()
        self.wake()

    def _turn(self) -> float | None:
        """Do what is due; return the seconds until something is again, None once it is closed."""
        with self.lock:
            now, wakes, self._wakes = self._clock(), self._wakes, -math.inf
            due = self.schedule.take(now) if wakes <= now else []
        for watched in due:
            if watched.block is not None and watched.block() is None:
                self._block_over(watched.claim)
        if due:
            self.extend_due(due)
        if self._reads <= self._clock():
            self._reads = math.inf
            self._read_all()
        with self.lock:
            # The lease that woke it may be released by now; the next one need not wake it again.
            look_again = now + LOOK_AGAIN_S if wakes > now else math.inf
            self._wakes = min(self.schedule.wakes, self._reads, look_again)
            return None if self._closed else max(0.0, self._wakes - self._clock())

    def _read_all(self) -> None:
        try:
            if not self._read():
                self.read_soon(READ_AGAIN_S)
        except self._timer.caught:
            logger.exception(
                "the extender could not read the nodes' answers", extra=event("answers_unread")
            )

    def extend_due(self, due: Sequence[Watched]) -> None:
        """Extend leases that are due; report those that are over."""
        alive, over = self.schedule.part(due, self._clock())
        self._settle(over, ())
        if not alive:
            return
        try:
            self._extend([watched.claim for watched in alive], partial(self._extended, alive))
        except self._timer.caught:
            # Leases must not end because one round met a bug, or a listener that calls sys.exit();
            # the next round may do better.
            logger.exception(
                "the extender could not extend %d leases",
                len(alive),
                extra=event("extension_failed"),
            )
            self._extended(alive, ())

    def _extended(self, due: Sequence[Watched], renewed: Sequence[Claim]) -> None:
        now = self._clock()
        for watched in [one for one in due if one.looks <= now]:
            self._look(watched)
        self._settle(due, renewed)
        if self._wakes > -math.inf:  # it was waited for, and no turn is under way
            self.wake()

    def _look(self, watched: Watched) -> None:
        watched.looks = math.inf
        try:
            watched.looks = self._clock() + watched.look()
        except BaseException:  # as in `_settle`
            logger.exception(
                "the extender could not check the progress of the work under %s",
                watched.claim.resource,
                extra=event("progress_check_failed"),
            )

    def _settle(self, due: Sequence[Watched], renewed: Sequence[Claim]) -> None:
        with self.lock:
            lost = self.schedule.settle(due, renewed, self._clock())
        for watched in lost:
            try:
                watched.lost(watched.claim)
            except BaseException:
                # An error of one holder must not keep the losses of others from being reported. Nor
                # may a callback that tries to end the program end the thread that all leases need.
                logger.exception(
                    "the loss of %s could not be reported",
                    watched.claim.resource,
                    extra=event("loss_report_failed"),
                )
