"""Extends leases that fall due, and reports the lost.

One thread per process serves all leases, one round extends all that are due: 10 000 leases cost
one thread. A lease is renewed every ttl/3, so that two rounds may fail before it is in danger, and
every ttl/10 after a failure. The thread is started by the first lease and sleeps while there is
nothing due. A short task costs it nothing: it is not even woken.

Where gevent has patched Python the thread is a greenlet, and runs only while the others wait.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..protocol.claim import Claim
from ..protocol.texts import event
from ..runtime.event import SafeEvent

__all__ = ["Schedule", "Watchdog", "Watched"]

logger = logging.getLogger("celery_redlock.watchdog")

EVERY, RETRY_EVERY = 1 / 3, 1 / 10
"""When to extend, and when to try again after a failed round, as parts of the ttl."""
READ_AFTER_S = 0.05
"""When to read answers that nobody waits for. Under load the next task has read them by then, and
this thread is woken twenty times a second at most."""
CHASE_EVERY_S = 0.25
"""When to look again for answers that were not there then: a node hangs, or has hung up."""
TOGETHER = 1 / 20
"""Leases due within this part of the ttl are extended in the same round: fewer requests."""


@dataclass(slots=True, eq=False)
class Watched:
    """A lease that is kept alive, until when, and whom to tell if that fails.

    Attributes:
        due: When to extend it next; infinity while a round is under way. Seconds.
        look: Looks at its work; returns in how many seconds it is to be called again.
        looks: When that is.
    """

    claim: Claim
    until: float
    lost: Callable[[Claim], None]
    due: float = math.inf
    look: Callable[[], float] = lambda: math.inf
    looks: float = math.inf


class Schedule:
    """Which leases fall due, and when. Pure, and without a lock: the simulated world runs it too.

    A handler that interrupts its caller may add and drop others: each step is one operation on the
    dict, and loops run over a copy.

    Attributes:
        watched: What is kept alive, by token.
    """

    def __init__(self) -> None:
        self.watched: dict[str, Watched] = {}

    @property
    def wakes(self) -> float:
        """When something falls due next; seconds, infinity for never. No round may last longer."""
        return min([watched.due for watched in self.watched.copy().values()], default=math.inf)

    def add(self, watched: Watched, now: float) -> None:
        """Keep a lease alive from now on."""
        self._put_off(watched, now + watched.claim.ttl * EVERY)
        self.watched[watched.claim.token] = watched

    def drop(self, claim: Claim) -> Watched | None:
        """Forget a lease; return what was known of it."""
        return self.watched.pop(claim.token, None)

    def take(self, now: float) -> list[Watched]:
        """Return what is due, and what nearly is. Every lease taken must be settled."""
        due = [
            watched
            for watched in self.watched.copy().values()
            if watched.due <= now + watched.claim.ttl * TOGETHER
        ]
        for watched in due:
            watched.due = math.inf
        return due

    def part(self, due: Sequence[Watched], now: float) -> tuple[list[Watched], list[Watched]]:
        """Tell the due leases that are to be extended from those that are over already."""
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
        """Say when to extend each lease next, after a round; return those that are lost."""
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
    """Keeps leases alive until they are dropped, lost, or older than their maximum lifetime.

    Args:
        extend: Renews claims, and returns those that a quorum confirmed.
        clock: Seconds on the clock of leases.
        read: Reads the answers that nobody waits for; returns whether that was all.
    """

    def __init__(
        self,
        extend: Callable[[Sequence[Claim]], Sequence[Claim]],
        clock: Callable[[], float],
        read: Callable[[], bool] = lambda: True,
    ) -> None:
        self._extend = extend
        self._clock = clock
        self._read = read
        self._reads = math.inf
        # `with` on a Condition can be interrupted half-way; and a handler that interrupts the owner
        # of the lock may take it again.
        self.lock = threading.RLock()
        self._changed = SafeEvent()
        self.schedule = Schedule()
        self._wakes = math.inf
        self._thread: threading.Thread | None = None
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
            lost: Called in the watchdog's thread; `claim.lost` says why.
            max_lifetime: Seconds after the grant at which extension ends; None for never.
        """
        assert claim.granted_at is not None
        until = claim.granted_at + max_lifetime if max_lifetime else math.inf
        watched = Watched(claim, until, lost)
        with self.lock:
            self.schedule.add(watched, self._clock())
            self._begin()
        if watched.due < self._wakes:
            self.wake()

    def look_at(self, claim: Claim, look: Callable[[], float]) -> None:
        """Call `look()` now, and while `claim` is watched again after the seconds it returns."""
        with self.lock:
            watched = self.schedule.watched.get(claim.token)
            if watched is None:
                return  # lost already
            watched.look, watched.looks = look, self._clock() + look()
            watched.due = min(watched.due, watched.looks)
        if watched.due < self._wakes:
            self.wake()

    def _begin(self) -> None:
        # Not alive: a time limit that struck before its start left one that never will be.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._run, name="celery_redlock watchdog", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError as error:
                if error.__context__ is None:
                    raise
                # A time limit has struck while `threading` waited, and its lock hides that.
                raise error.__context__ from None

    def drop(self, claim: Claim) -> None:
        """Stop extending `claim`. If it is over already, and nobody has noticed, say so first.

        The watchdog cannot have noticed if it did not run: a C call kept the GIL, or a greenlet
        never let another run.
        """
        with self.lock:
            watched = self.schedule.drop(claim)
        if watched is not None and not claim.ended and not claim.held(self._clock()):
            watched.lost(claim)

    def read_soon(self, after: float = READ_AFTER_S) -> None:
        """See to it that answers which nobody waits for are read, before long."""
        if self._reads == math.inf:
            self._reads = self._clock() + after
            if self._reads < self._wakes:
                self.wake()

    def chase_soon(self, after: float = CHASE_EVERY_S) -> None:
        """See to it that what is put off, or too few nodes have confirmed, comes to them yet."""
        with self.lock:
            self._begin()
        self.read_soon(after)

    @property
    def next_due(self) -> float:
        """When other leases fall due than those being extended; seconds, infinity for never."""
        return self.schedule.wakes

    def wake(self) -> None:
        """Have the thread look at the clock and the schedule again."""
        self._changed.set()

    def close(self) -> None:
        """Stop extending anything."""
        with self.lock:
            self._closed = True
            self.schedule = Schedule()
        self.wake()

    def _run(self) -> None:
        while not self._closed:
            due = self._next()
            if due:
                self.extend_due(due)
            if self._reads <= self._clock():
                self._reads = math.inf
                self._read_all()

    def _read_all(self) -> None:
        try:
            if not self._read():
                self.read_soon(CHASE_EVERY_S)
        except BaseException:
            logger.exception("could not read the nodes' answers", extra=event("answers_unread"))

    def _next(self) -> list[Watched]:
        """Sleep until leases are due or the schedule changes; return what is due."""
        with self.lock:
            now = self._clock()
            self._wakes = wakes = min(self.schedule.wakes, self._reads)
            if wakes <= now:  # and nobody need wake us, as nothing falls due before
                return self.schedule.take(now)
        self._changed.wait(wakes - now)
        return []

    def extend_due(self, due: Sequence[Watched]) -> None:
        """Extend leases that were taken off the schedule; tell of those that are over."""
        alive, over = self.schedule.part(due, self._clock())
        self._settle(over, ())
        renewed: Sequence[Claim] = ()
        try:
            if alive:
                renewed = self._extend([watched.claim for watched in alive])
        except BaseException:
            # Leases must not end because one round met a bug, or a listener that calls sys.exit();
            # the next round may do better.
            logger.exception(
                "could not extend %d leases", len(alive), extra=event("extension_failed")
            )
        now = self._clock()
        for watched in [one for one in alive if one.looks <= now]:
            self._look(watched)
        self._settle(alive, renewed)

    def _look(self, watched: Watched) -> None:
        watched.looks = math.inf
        try:
            watched.looks = self._clock() + watched.look()
        except BaseException:  # as in `_settle`
            logger.exception(
                "could not look at the work under %s",
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
                # An error of one holder must not keep the others from being told; nor may a
                # callback that means to end the program end the thread that all leases need.
                logger.exception(
                    "could not tell that %s is lost",
                    watched.claim.resource,
                    extra=event("loss_report_failed"),
                )
