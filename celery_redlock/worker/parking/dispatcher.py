"""Carry out what the `AdmissionQueue` decides: one thread, started by the first parking.

All that parking needs from the network happens here, so that the main process never waits. For each
key that somebody is parked for, the worker stands in the wait queue on the nodes (`wait_queue.py`),
like any other waiter: a release calls the first of the queue only. When it is called it lets one
delivery go, and queues again behind the other waiters. A worker without a free pool slot hands the
call on at once, and does not stand in the queue until it has one: it never keeps a free key from
others.

Calls get lost, holders die, nodes are away: so the nodes are also asked which of the keys are free,
all of them in one request, more often than once a second.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from ...locking.redlock import Redlock
from ...locking.wait_queue import QueueEntry
from ...protocol import outcome, quorum
from ...protocol.claim import Claim
from ...protocol.round import Verb
from ...protocol.values import printable
from ...runtime.clock import monotonic
from ...runtime.event import SafeEvent
from ...stores.redis.driver import BATCH
from .admission import AdmissionQueue, Do, Effect, Parked

__all__ = ["ParkingDispatcher"]

logger = logging.getLogger("celery_redlock.parking")

SWEEP_S = 0.25
"""Seconds between two sweeps through what is parked, for those revoked, expired or overdue."""
RETRY_DELAY_S = 1.0
"""Seconds after an error, which is a bug: the log gets one traceback a second, not thousands."""


class _Listener(NamedTuple):
    """What listens for the calls of one key."""

    entry: QueueEntry
    claim: Claim
    close: Callable[[], None]


class ParkingDispatcher:
    """One per worker.

    Args:
        redlock: The locks that are waited for.
        admission: Knows who is parked.
        free_slots: Returns how many more tasks the pool could begin with now.
        go: Called with each delivery that is to go to the pool. Must not wait.
        sweep: Called every `SWEEP_S` while anybody is parked. Must not wait.
    """

    def __init__(
        self,
        redlock: Redlock,
        admission: AdmissionQueue,
        free_slots: Callable[[], int],
        go: Callable[[Parked], None],
        sweep: Callable[[], None],
    ) -> None:
        self._redlock = redlock
        self._admission = admission
        self._free_slots = free_slots
        self._go = go
        self._sweep = sweep
        self._news = SafeEvent()
        self._listeners: dict[str, _Listener] = {}
        self._thread: threading.Thread | None = None
        self._swept = 0.0
        self._closing = False

    def wake(self) -> None:
        """Look soon at what has changed. Does not wait."""
        if self._thread is None and not self._closing:
            self._thread = threading.Thread(
                target=self._run, name="celery_redlock parking", daemon=True
            )
            self._thread.start()
        self._news.set()

    def close(self) -> None:
        """Leave all queues, soon: this worker asks for nothing any more."""
        self._closing = True
        self._news.set()

    def _run(self) -> None:
        while not self._closing:
            try:
                self._news.wait(self._work())
            except Exception:
                logger.exception("parking dispatcher failed; retrying in %g s", RETRY_DELAY_S)
                self._news.wait(RETRY_DELAY_S)
        for key in list(self._listeners):
            self._carry_out(Effect(Do.HAND_ON, key))

    def _work(self) -> float:
        """Do what is due; return the seconds until something is."""
        now = monotonic()
        if now - self._swept >= SWEEP_S:
            self._swept = now
            self._sweep()
        calls = {
            key: entry.calls >= entry.quorum and entry.sure
            for key, (entry, _claim, _close) in self._listeners.items()
            if entry.calls
        }
        asks = self._carry_out(*self._admission.decide(now, self._free_slots(), calls))
        for at in range(0, len(asks), BATCH):
            self._ask(asks[at : at + BATCH])
        wait = min(self._admission.next_due(), self._swept + SWEEP_S) - monotonic()
        return max(0.0, wait) if len(self._admission) else 3600.0

    def _ask(self, keys: Sequence[str]) -> None:
        """Ask the nodes which of some keys are free, and let those go."""
        claims = [self._redlock.client.new_claim([key]) for key in keys]
        patience = self._redlock.node_timeout
        ballot = self._redlock.client.driver.run(lambda now: quorum.survey(claims, now, patience))
        has_quorum = ballot.yes >= ballot.quorum
        free_in = {
            key: outcome.free_in(ballot, number) if has_quorum else None
            for number, key in enumerate(keys)
        }
        self._carry_out(*self._admission.answered(free_in, monotonic(), self._free_slots()))

    def _carry_out(self, *effects: Effect) -> list[str]:
        """Do all but ask; return what is to be asked."""
        asks = []
        for do, key, parked in effects:
            try:
                if do is Do.ASK:
                    asks.append(key)
                elif parked is not None:
                    self._go(parked)
                    if key in self._listeners:  # those that still wait queue behind the others
                        self._listeners[key].claim.since = time.time_ns() // 1000
                elif do is Do.FORGET:
                    self._listeners.pop(key).close()
                else:
                    self._tell_nodes(do, key)
            except Exception:  # of one key, and it holds up no other
                logger.exception("%s: parking cannot %s", printable(key), do.value)
        return asks

    def _tell_nodes(self, do: Do, key: str) -> None:
        entry, claim, _close = self._listeners.get(key) or self._listen(key)
        if do is Do.ENQUEUE:
            entry.forget()  # earlier calls
            self._news.set()  # which that has cleared, and another may have set
        verb = Verb.ENQUEUE if do is Do.ENQUEUE else Verb.HAND_ON
        self._redlock.client.driver.run(lambda now: quorum.leave(claim, now, verb))

    def _listen(self, key: str) -> _Listener:
        exits = ExitStack()
        entry = exits.enter_context(self._redlock.client.wakeup.in_line())
        entry.news = self._news
        claim = Claim(key, entry.member, self._redlock.ttl, len(self._redlock.nodes))
        claim.since = entry.since  # the queue is ordered by it
        self._listeners[key] = listener = _Listener(entry, claim, exits.close)
        return listener
