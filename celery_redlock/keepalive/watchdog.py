"""Extends leases that fall due, and reports the lost.

One thread per process serves all leases, one round extends all that are due: 10 000 leases cost
one thread. A lease is renewed every ttl/3, so that two rounds may fail before it is in danger, and
every ttl/10 after a failure. The thread is started by the first lease and sleeps while there is
nothing due. A short task costs it nothing: it is not even woken.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..protocol.claim import Claim
from ..runtime.event import SafeEvent
from ..runtime.haste import haste

__all__ = ["Schedule", "Watchdog", "Watched"]

logger = logging.getLogger("celery_redlock.watchdog")

EVERY, AGAIN = 1 / 3, 1 / 10
"""When to extend, and when to try again after a failed round, as parts of the ttl."""
TOGETHER = 1 / 20
"""Leases due within this part of the ttl are extended in the same round."""
LONGEST = 3600.0
"""Seconds to sleep at a time at most."""
BUSY = 0.001
"""Seconds between two rounds at least."""


class Watched(NamedTuple):
    """A lease that is kept alive, until when, and whom to tell if that fails."""

    claim: Claim
    until: float
    lost: Callable[[Claim], None]


class Schedule:
    """Which leases fall due, and when. Pure, and without a lock: the simulated world runs it too.

    A handler that interrupts its caller may add and drop others: nothing is taken for granted from
    one step to the next.

    Attributes:
        watched: What is kept alive, by token.
    """

    def __init__(self) -> None:
        self.watched: dict[str, Watched] = {}
        self._due: list[tuple[float, str]] = []
        self._clearing = False

    @property
    def wakes(self) -> float:
        """When something falls due next; seconds, infinity for never. No round may last longer."""
        due = self._due[:1]
        return due[0][0] if due else math.inf

    def add(self, watched: Watched, now: float) -> None:
        """Keep a lease alive from now on."""
        self.watched[watched.claim.token] = watched
        self._push(watched, now + watched.claim.ttl * EVERY)

    def drop(self, claim: Claim) -> None:
        """Forget a lease."""
        self.watched.pop(claim.token, None)
        if len(self._due) > 2 * len(self.watched) + 64 and not self._clearing:
            self._clearing = True
            try:
                before, count = self._due, len(self._due)
                kept = [entry for entry in before if entry[1] in self.watched]
                heapq.heapify(kept)
                self._due = kept
                for entry in before if len(before) != count else ():  # a handler has added some
                    if entry[1] in self.watched and entry not in kept:
                        heapq.heappush(kept, entry)
            finally:
                self._clearing = False

    def take(self, now: float) -> list[Watched]:
        """Take off what is due, and what nearly is. Every lease taken must be settled."""
        due: dict[str, Watched] = {}
        with contextlib.suppress(IndexError):
            while True:
                at, token = entry = heapq.heappop(self._due)
                watched = self.watched.get(token)
                if watched is not None and at > now + watched.claim.ttl * TOGETHER:
                    heapq.heappush(self._due, entry)
                    break
                if watched is not None:
                    due[token] = watched
        return list(due.values())

    def part(self, due: Sequence[Watched], now: float) -> tuple[list[Watched], list[Watched]]:
        """Which of the due leases to extend, and which are over: no round may delay those."""
        for watched in due:
            if watched.claim.held(now) and now >= watched.until:
                watched.claim.lose("max_lifetime")
        alive: list[Watched] = []
        over: list[Watched] = []
        for watched in due:
            (alive if watched.claim.held(now) else over).append(watched)
        return alive, over

    def settle(self, due: Sequence[Watched], renewed: Iterable[Claim], now: float) -> list[Watched]:
        """A round is over: when to extend each next. The lost ones, to be told so."""
        tokens = {claim.token for claim in renewed}
        lost = []
        for watched in due:
            claim = watched.claim
            if claim.ended or claim.token not in self.watched:
                self.watched.pop(claim.token, None)
            elif claim.held(now):
                part = EVERY if claim.token in tokens else AGAIN
                self._push(watched, now + claim.ttl * part)
            else:
                del self.watched[claim.token]
                lost.append(watched)
        return lost

    def _push(self, watched: Watched, due: float) -> None:
        due = min(due, watched.claim.deadline, watched.until)
        heapq.heappush(self._due, (due, watched.claim.token))


class Watchdog:
    """Keeps leases alive until they are dropped, lost, or older than their maximum lifetime.

    Args:
        extend: Renews claims, and returns those that a quorum confirmed.
        clock: Seconds on the clock of leases.
    """

    def __init__(
        self,
        extend: Callable[[Sequence[Claim]], Sequence[Claim]],
        clock: Callable[[], float],
    ) -> None:
        self._extend = extend
        self._clock = clock
        # `with` on a Condition can be interrupted half-way; and a handler that interrupts who has
        # the lock may come by again.
        self.lock = threading.RLock()
        self.bell = SafeEvent()
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
        with self.lock:
            self.schedule.add(Watched(claim, until, lost), self._clock())
            # Not alive: a time limit that struck before its start left one that never will be.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="celery_redlock watchdog", daemon=True
                )
                self._thread.start()
        if self.schedule.wakes < self._wakes:
            self.bell.set()

    def drop(self, claim: Claim) -> None:
        """Stop extending `claim`."""
        with self.lock:
            self.schedule.drop(claim)

    @property
    def next_due(self) -> float:
        """When other leases fall due than those being extended; seconds, infinity for never."""
        return self.schedule.wakes

    def close(self) -> None:
        """Stop extending anything."""
        with self.lock:
            self._closed = True
            self.schedule = Schedule()
        self.bell.set()

    def _run(self) -> None:
        while not self._closed:
            due = self._next()
            if due:
                self._tend(due)

    def _next(self) -> list[Watched]:
        """Sleep until leases are due or somebody rings; take off the schedule what is due."""
        with self.lock:
            now = self._clock()
            self._wakes = wakes = self.schedule.wakes
            if wakes <= now:
                self._wakes = -math.inf  # nobody need ring: we are awake
                return self.schedule.take(now)
        self.bell.wait(min(LONGEST, max(BUSY, wakes - now)))
        return []

    def _tend(self, due: Sequence[Watched]) -> None:
        with haste():
            self.extend_due(due)

    def extend_due(self, due: Sequence[Watched]) -> None:
        alive, over = self.schedule.part(due, self._clock())
        self._settle(over, ())
        renewed: Sequence[Claim] = ()
        try:
            if alive:
                renewed = self._extend([watched.claim for watched in alive])
        except BaseException:
            # Leases must not end because one round met a bug, or a listener that calls sys.exit();
            # the next round may do better.
            logger.exception("could not extend %d leases", len(alive))
        self._settle(alive, renewed)

    def _settle(self, due: Sequence[Watched], renewed: Sequence[Claim]) -> None:
        with self.lock:
            lost = self.schedule.settle(due, renewed, self._clock())
        for watched in lost:
            try:
                watched.lost(watched.claim)
            except BaseException:
                # One holder's trouble must not keep the others from hearing of theirs; nor may a
                # callback that means to end the program end the thread that all leases need.
                logger.exception("could not tell that %s is lost", watched.claim.resource)
