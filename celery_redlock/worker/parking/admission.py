"""Decide which delivery of a locked task goes to the pool now, and which waits parked.

The state of a worker's main process, without Celery, network, thread or clock. What is to be done
is returned as `Effect`s: `dispatcher.py` carries them out, and says which keys the nodes have
called this worker for, which of them are free, and how many slots the pool has left.

A delivery whose key is at work in this worker, or waited for here, is parked. Those parked for a
key go one at a time: the most urgent first, then the one that has waited longest. This only keeps
deliveries from meeting held locks: one that goes still has to get its lock.

The wait queue on the nodes orders workers, this one the deliveries of one worker. They cannot be
one queue: the nodes would have to be told of each delivery, and of each that is revoked, expires
or goes back to its broker, and a call would name a delivery whose worker may have no slot left.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from ...locking.wait_queue import FEW, JITTER

__all__ = ["AdmissionQueue", "Do", "Effect", "Parked"]

PRESUMED_DEAD_S = 0.5
"""Seconds after which a body that has begun, and whose key is free all the same, holds up no other:
its process has died or its lease is over, and the pool is yet to say so (up to 10 s later)."""
LOOK_S = (0.4, 0.8)
"""Seconds, at random, between two questions about a key that nobody has called us for. Below one: a
free key that is waited for is taken within a second, whatever became of its call."""
AFTER_END_S = 0.1
"""Seconds after the end of a body of ours until we ask: its release has called someone."""
SLOT_S = 0.05
"""Seconds between two looks at the pool while it is full."""
QUEUE_UP_S = 1.0
"""Seconds without a slot after which a delivery whose key is free joins the pool's own queue: it
takes its turn there among the other tasks, or it would never have one."""
CALLED_S = 0.1
"""Seconds for which we keep a call while a body of ours, which has just released, ends."""
RENEW_S = 20.0
"""Seconds between two requests that keep our place; the nodes forget it after 60."""
NO_QUORUM_S = 1.0
"""Seconds without a quorum after which deliveries go, one at a time, to do as they are told."""
EXPIRY_SLACK_S = 0.002
"""Seconds after a lease's end at which we ask: nodes count in whole milliseconds."""


class Do(Enum):
    """What is to be done about a key."""

    ENQUEUE = "join its wait queue on the nodes"
    HAND_ON = "leave that queue, and pass on a call that we may have had"
    ASK = "ask the nodes whether it is free, and tell `answered`"
    GO = "give a delivery to the pool"
    FORGET = "listen for no more calls"


class Effect(NamedTuple):
    """One thing to be done; `parked` is what goes to the pool."""

    do: Do
    key: str
    parked: Parked | None = None


@dataclass(frozen=True, eq=False)
class Parked:
    """A delivery that waits here.

    Attributes:
        request: Celery's, unacknowledged.
        key: The resource that it waits for.
        since: Since when its task waits; seconds since 1970.
        until: When it goes even though its key is held; seconds.
        rank: Its place among those of its key: urgency, since, order of arrival.
    """

    request: Any
    key: str
    since: float
    until: float
    rank: tuple[float, float, int]


@dataclass(eq=False)
class _WatchedKey:
    """What is known of one key that is at work or waited for here."""

    name: str
    running: dict[int, tuple[Any, float]] = field(default_factory=dict)
    """By identity: the deliveries that are with the pool, and since when."""
    parked: list[Parked] = field(default_factory=list)
    listens: bool = False
    """Whether the dispatcher listens for calls."""
    due: float = -math.inf
    """When there is something to decide, unless something happens before."""
    queued: float | None = None
    """When we last said that we stand in its wait queue; None if we do not."""
    called: bool = False
    """Whether we were called, and nothing has come of it yet."""
    no_slot: float | None = None
    """Since when no slot has been seen for it."""
    no_quorum: float | None = None

    def may_go(self, now: float) -> bool:
        """Whether none of those with the pool may hold the lock, or is about to ask for it."""
        return not any(
            getattr(request, "time_start", None) is None or now - since < PRESUMED_DEAD_S
            for request, since in self.running.values()
        )

    def look_by(self, when: float) -> None:
        self.due = min(self.due, when)


class AdmissionQueue:
    """Safe in threads; nothing here waits. All times are seconds of one clock.

    Args:
        most: How many deliveries are parked at most.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._keys: dict[str, _WatchedKey] = {}
        self._count = 0
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    # -- What happens to deliveries ----------------------------------------------------------------

    def arrive(
        self,
        request: Any,
        name: str,
        now: float,
        *,
        since: float,
        until: float,
        urgency: float = 0.0,
        refused: bool = False,
    ) -> bool:
        """Decide whether a delivery goes to the pool at once; else it is parked, as `Parked` says.

        Of those of one key, a smaller `urgency` goes first. One that was `refused` has met a held
        lock before, so it is parked even though nothing is known of its key here.
        """
        with self._lock:
            key = self._keys.setdefault(name, _WatchedKey(name))
            unknown = not key.parked and not key.running
            if (unknown and not refused) or self._count >= self.most:
                key.running[id(request)] = (request, now)
                return True
            rank = (urgency, since, next(self._numbers))
            parked = Parked(request, name, since, until, rank)
            bisect.insort(key.parked, parked, key=lambda one: one.rank)
            self._count += 1
            return False

    def ended(self, request: Any, name: str, now: float) -> bool:
        """Note that a delivery is no longer with the pool; return whether others are parked."""
        with self._lock:
            key = self._keys.get(name)
            if key is None or key.running.pop(id(request), None) is None:
                return False
            key.look_by(now + AFTER_END_S)
            self._drop_idle(key)
            return bool(key.parked)

    def take_back(self, keep: int) -> list[Parked]:
        """Remove all but `keep` of the parked, those that would go last first; return them."""
        with self._lock:
            last_first = sorted(self._all_parked(), key=lambda one: one.rank, reverse=True)
            surplus = last_first[: max(0, len(last_first) - keep)]
            for parked in surplus:
                self._remove(parked)
            return surplus

    def withdraw(self, parked: Parked) -> None:
        """Remove a parked one, if it is still here."""
        with self._lock:
            key = self._keys.get(parked.key)
            if key is not None and parked in key.parked:
                self._remove(parked)

    def parked(self) -> list[Parked]:
        """Return all that are parked."""
        with self._lock:
            return self._all_parked()

    def running(self) -> list[tuple[Any, str]]:
        """Return all that are with the pool, each with its key."""
        with self._lock:
            return [
                (one, name) for name, key in self._keys.items() for one, _ in key.running.values()
            ]

    # -- What is to be done ------------------------------------------------------------------------

    def decide(self, now: float, slots: int, calls: Mapping[str, bool]) -> list[Effect]:
        """Return what is to be done now, of all keys.

        The pool could begin with `slots` more tasks; `calls` are the keys that nodes have called us
        for, and whether a quorum of them has.
        """
        effects: list[Effect] = []
        with self._lock:
            # What is due soon is asked along with what is due now.
            waits = all(key.due > now for key in self._keys.values() if key.parked)
            horizon = now if waits else now + LOOK_S[0]
            for key in list(self._keys.values()):
                call = calls.get(key.name) if key.queued is not None else None
                found = self._decide(key, call, now, horizon, slots)
                slots -= sum(effect.do is Do.GO for effect in found)
                effects += found
        return effects

    def answered(self, free_in: Mapping[str, float | None], now: float, slots: int) -> list[Effect]:
        """Return what is to be done after an `ASK`: in how many seconds a quorum of nodes is free.

        It is None for a key of which too few nodes have answered.
        """
        effects: list[Effect] = []
        with self._lock:
            for name, seconds in free_in.items():
                key = self._keys.get(name)
                if key is not None and key.parked and self._is_free(key, seconds, now):
                    queues_up = key.no_slot is not None and now - key.no_slot >= QUEUE_UP_S
                    key.no_slot = None
                    if (slots > 0 or queues_up) and key.may_go(now):
                        slots -= 1
                        effects += self._go(key, key.parked[0], now)
        return effects

    def next_due(self) -> float:
        """Return when `decide` is to be called again, if nothing happens before."""
        with self._lock:
            return min((key.due for key in self._keys.values() if key.parked), default=math.inf)

    # -- Under the lock ----------------------------------------------------------------------------

    def _decide(
        self, key: _WatchedKey, call: bool | None, now: float, horizon: float, slots: int
    ) -> list[Effect]:
        if not key.parked:
            return self._rest(key)
        overdue = next((one for one in key.parked if one.until <= now), None)
        if overdue is not None and slots > 0:
            return self._go(key, overdue, now)
        if call is False and key.due > now:
            key.look_by(now + JITTER.uniform(*FEW))  # the others' calls are on their way
            return []
        effects: list[Effect] = []
        if call:
            key.queued, key.called = None, True  # a call takes us out of the queue
            key.due = now + CALLED_S if slots > 0 or key.running else now
        elif call is False:
            key.queued, key.due = None, now  # another was called, or nobody: queue again, and ask
            if slots <= 0:
                effects.append(Effect(Do.HAND_ON, key.name))
        if key.called and slots > 0 and key.may_go(now):
            return self._go(key, key.parked[0], now)
        if key.due > (now if key.called or key.no_slot is not None else horizon):
            return effects
        if key.called:  # and nothing has come of it: another worker may have a slot for it
            key.called = False
            effects.append(Effect(Do.HAND_ON, key.name))
        if slots <= 0:
            key.no_slot = now if key.no_slot is None else key.no_slot
            key.due = now + SLOT_S
            if now - key.no_slot < QUEUE_UP_S:
                return effects
        elif key.queued is None or now - key.queued >= RENEW_S:
            effects.append(self._enqueue(key, now))
        return [*effects, Effect(Do.ASK, key.name)]

    def _is_free(self, key: _WatchedKey, free_in: float | None, now: float) -> bool:
        key.due = now + JITTER.uniform(*LOOK_S)
        if free_in is None:
            key.no_quorum = now if key.no_quorum is None else key.no_quorum
            return now - key.no_quorum >= NO_QUORUM_S
        key.no_quorum = None
        if free_in > 0:
            key.look_by(now + free_in + EXPIRY_SLACK_S)  # its holder may have died
        return free_in <= 0

    def _enqueue(self, key: _WatchedKey, now: float) -> Effect:
        key.queued, key.listens = now, True
        return Effect(Do.ENQUEUE, key.name)

    def _go(self, key: _WatchedKey, parked: Parked, now: float) -> list[Effect]:
        """Let one go, and compete for the next one behind the other workers."""
        key.running[id(parked.request)] = (parked.request, now)
        self._remove(parked)
        key.called, key.no_slot = False, None
        effects = [Effect(Do.GO, key.name, parked)]
        if not key.parked:
            return effects + self._rest(key)
        key.due = now + JITTER.uniform(*LOOK_S)
        return [*effects, self._enqueue(key, now)]

    def _rest(self, key: _WatchedKey) -> list[Effect]:
        """Nobody waits for it here any more."""
        if not key.listens:
            return []
        stands = key.queued is not None or key.called
        at_rest = self._keys[key.name] = _WatchedKey(key.name, key.running)
        self._drop_idle(at_rest)
        effects = [Effect(Do.HAND_ON, key.name)] if stands else []
        return [*effects, Effect(Do.FORGET, key.name)]

    def _remove(self, parked: Parked) -> None:
        self._keys[parked.key].parked.remove(parked)
        self._drop_idle(self._keys[parked.key])
        self._count -= 1

    def _drop_idle(self, key: _WatchedKey) -> None:
        if not (key.parked or key.running or key.listens):
            self._keys.pop(key.name, None)

    def _all_parked(self) -> list[Parked]:
        return [parked for key in self._keys.values() for parked in key.parked]
