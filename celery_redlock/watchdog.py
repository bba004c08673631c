"""Extends leases that fall due, and reports the lost.

One thread per process serves all leases, one round extends all that are due: 10 000 leases cost
one thread. A lease is renewed every ttl/3, so that two rounds may fail before it is in danger, and
every ttl/10 after a failure. The thread is started by the first lease and sleeps while there is
nothing due. A short task costs it nothing: it is not even woken.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .lease import Claim

__all__ = ["Watchdog"]

logger = logging.getLogger("celery_redlock.watchdog")

EVERY, AGAIN = 1 / 3, 1 / 10
"""When to extend, and when to try again after a failed round, as parts of the ttl."""
TOGETHER = 1 / 20
"""Leases due within this part of the ttl are extended in the same round."""
BUSY = 0.001
"""Seconds between two rounds at least."""


class _Watched(NamedTuple):
    claim: Claim
    until: float
    lost: Callable[[Claim], None]


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
        self._changed = threading.Condition()
        self._watched: dict[str, _Watched] = {}
        self._due: list[tuple[float, str]] = []
        self._wakes = float("inf")
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
        until = claim.granted_at + max_lifetime if max_lifetime else float("inf")
        with self._changed:
            self._watched[claim.token] = _Watched(claim, until, lost)
            self._schedule(claim, self._clock() + claim.ttl * EVERY)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="celery_redlock watchdog", daemon=True
                )
                self._thread.start()

    def drop(self, claim: Claim) -> None:
        """Stop extending `claim`."""
        with self._changed:
            self._watched.pop(claim.token, None)
            if len(self._due) > 2 * len(self._watched) + 64:
                self._due = [entry for entry in self._due if entry[1] in self._watched]
                heapq.heapify(self._due)

    def close(self) -> None:
        """Stop extending anything."""
        with self._changed:
            self._closed = True
            self._watched.clear()
            self._changed.notify()

    def _schedule(self, claim: Claim, due: float) -> None:
        watched = self._watched[claim.token]
        due = min(due, claim.deadline, watched.until)
        heapq.heappush(self._due, (due, claim.token))
        if due < self._wakes:
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                due = self._next()
                if self._closed:
                    return
            try:
                self._tend(due)
            except Exception:
                # Leases must not end because one round met a bug; the next round may do better.
                logger.exception("could not extend %d leases", len(due))

    def _next(self) -> list[_Watched]:
        """Sleep until leases are due; take them off the heap."""
        while not self._closed:
            now = self._clock()
            if self._due and self._due[0][0] <= now:
                break
            self._wakes = self._due[0][0] if self._due else float("inf")
            self._changed.wait(max(BUSY, self._wakes - now) if self._due else None)
        due: dict[str, _Watched] = {}
        while self._due:
            at, token = self._due[0]
            watched = self._watched.get(token)
            if watched is not None and at > now + watched.claim.ttl * TOGETHER:
                break
            heapq.heappop(self._due)
            if watched is not None:
                due[token] = watched
        self._wakes = float("-inf")
        return list(due.values())

    def _tend(self, due: Sequence[_Watched]) -> None:
        now = self._clock()
        for watched in due:
            if watched.claim.held(now) and now >= watched.until:
                watched.claim.lose("max_lifetime")
        alive = [watched.claim for watched in due if watched.claim.held(now)]
        renewed = {claim.token for claim in self._extend(alive)} if alive else set()
        now = self._clock()
        lost = []
        with self._changed:
            for watched in due:
                claim = watched.claim
                if claim.ended or claim.token not in self._watched:
                    self._watched.pop(claim.token, None)
                elif claim.held(now):
                    part = EVERY if claim.token in renewed else AGAIN
                    self._schedule(claim, now + claim.ttl * part)
                else:
                    del self._watched[claim.token]
                    lost.append(watched)
        for watched in lost:
            watched.lost(watched.claim)
