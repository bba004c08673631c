"""Stands at the door for the deliveries that are parked in a worker's main process.

One thread, started by the first parking; all that the parking needs from the network is its to do,
so that the main process never waits. For every resource that somebody waits for it takes the
*turn*, an advisory lock named `<resource>#turn`: of all workers with parked deliveries one at a
time lets them go. It looks whether the resource is free, and if not it listens for its release;
then it has the gate let one go. Where announcements are missed, holders die or nodes are away, it
looks again every second.

Exclusion does not rest on it: who loses the turn at a bad moment makes one delivery meet a held
lock, which is sent again.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

from . import quorum, refusal
from .bell import Bell
from .driver import monotonic
from .errors import QuorumUnavailable, ResourceHeld
from .gate import Gate, Parked
from .lease import Claim
from .lock import Redlock
from .quorum import Verb
from .wakeup import Waiter

__all__ = ["TURN", "Doorman"]

logger = logging.getLogger("celery_redlock.doorman")

TURN = "#turn"
"""What is put behind a resource's name to name its turn."""
TTL = 2.0
"""Seconds after which the turn of a worker that died is free; kept up meanwhile."""
STAND_BACK = 0.01
"""Seconds in which another worker may take the turn that we have given up."""
LOOK = 1.0
"""Seconds, about, between looks of our own, where no announcement comes."""
BUSY = 25
"""Doors from which on each is looked after more seldom, and its turn lasts longer in return."""
SLOWEST = 5.0
"""How many times more seldom, at most."""
SPLIT = 0.02
"""Seconds at most until the next try for a turn that nobody got."""
PATIENCE = 1.0
"""Seconds without a quorum after which all go that wait, to do what their options say."""

JITTER = random.SystemRandom()


class _News(Bell):
    """Rings the doorman's bell, and says which door it was."""

    def __init__(self, bell: Bell) -> None:
        super().__init__()
        self.heard = False
        self._bell = bell

    def ring(self) -> None:
        self.heard = True
        self._bell.ring()

    def forget(self) -> None:
        self.heard = False


class _Door:
    """One resource that somebody here waits for."""

    def __init__(self, resource: str) -> None:
        self.resource = resource
        self.claim: Claim | None = None
        self.renewal = 0.0
        self.due = 0.0
        self.not_before = 0.0
        self.failing: float | None = None
        self.flying: frozenset[int] = frozenset()
        self.flying_since = 0.0
        self.turns = ExitStack()
        self.turn_news: Waiter | None = None
        self.releases = ExitStack()
        self.release_news: Waiter | None = None


class Doorman:
    """One per worker.

    Args:
        redlock: The locks, and the turns.
        gate: Knows who waits.
        let_go: Has the gate let go, by a call, where that is to happen: in the main thread.
        sweep: Called so as well, about every second while anybody waits.
    """

    def __init__(
        self,
        redlock: Redlock,
        gate: Gate,
        let_go: Callable[..., None],
        sweep: Callable[[], list[Parked]],
    ) -> None:
        self._redlock = redlock
        self._gate = gate
        self._let_go = let_go
        self._sweep = sweep
        self._swept = 0.0
        self._bell = Bell()
        self._called: deque[str] = deque()
        self._doors: dict[str, _Door] = {}
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def _pace(self) -> float:
        """How much more seldom we look, for all the doors we have."""
        return min(max(1.0, len(self._doors) / BUSY), SLOWEST)

    def attend(self, resource: str) -> None:
        """Look after a resource, soon. Does not wait."""
        self._called.append(resource)
        if self._thread is None and not self._closing:
            self._thread = threading.Thread(
                target=self._run, name="celery_redlock doorman", daemon=True
            )
            self._thread.start()
        self._bell.ring()

    def close(self, wait: float = 0.0) -> None:
        """The worker ends: others may have our turns."""
        self._closing = True
        self._bell.ring()
        if self._thread is not None and wait > 0:
            self._thread.join(wait)

    def _run(self) -> None:
        while not self._closing:
            try:
                self._bell.wait(self._attend_all())
            except Exception:
                logger.exception("the doorman stumbled; it looks again in a second")
                self._bell.wait(LOOK)
        for door in list(self._doors.values()):
            self._close(door)

    def _attend_all(self) -> float:
        """Do what is due. Seconds until something is."""
        now = monotonic()
        while self._called:
            resource = self._called.popleft()
            door = self._doors.setdefault(resource, _Door(resource))
            door.due = now
        self._renew(now)
        if now - self._swept >= LOOK:
            self._swept = now
            self._let_go(self._sweep)
        for door in list(self._doors.values()):
            news = [one for one in (door.turn_news, door.release_news) if one is not None]
            if door.due <= now or any(one.news.heard for one in news):  # type: ignore[attr-defined]
                try:
                    self._look_after(door)
                except Exception:
                    door.due = monotonic() + LOOK
                    raise
        if not self._doors:
            return LOOK if self._gate.parked else 3600.0
        due = min(
            min(door.due, door.renewal) if door.claim is not None else door.due
            for door in self._doors.values()
        )
        return max(0.0, min(due, self._swept + LOOK) - monotonic())

    def _look_after(self, door: _Door) -> None:
        now = monotonic()
        door.due = now + self._pace * LOOK * JITTER.uniform(0.75, 1.25)
        view = self._gate.view(door.resource, now)
        if view.stand_back or not (view.parked or view.flying):
            self._give_up_turn(door)
            door.not_before = door.due = monotonic() + STAND_BACK
        if not view.parked:
            if not view.flying:
                self._close(door)
            return
        if door.flying != view.flying:
            door.flying, door.flying_since = view.flying, now
        try:
            if not self._has_turn(door, now) and not self._take_turn(door, now):
                return
            # Who was let go comes back by itself; unless it died, and nobody has noticed yet.
            if not view.flying or now - door.flying_since >= LOOK / 2:
                self._let_in(door, view.ripe)
            door.failing = None
        except QuorumUnavailable:
            door.failing = now if door.failing is None else door.failing
            if now - door.failing >= PATIENCE:
                self._let_go(self._gate.flush, door.resource)
            door.due = now + LOOK / 2

    def _renew(self, now: float) -> None:
        """Keep up the turns that we have."""
        due = {
            door.claim.token: door
            for door in self._doors.values()
            if door.claim is not None and door.renewal <= now
        }
        if not due:
            return
        claims = [door.claim for door in due.values() if door.claim is not None]
        for door in due.values():
            door.renewal = now + TTL / 10
        patience = min(self._redlock.node_timeout, TTL / 10)
        for ballot in self._redlock._driver.extend(claims, patience, Verb.EXTEND):
            for claim in ballot.confirmed():
                due[claim.token].renewal = now + claim.ttl / 3

    def _has_turn(self, door: _Door, now: float) -> bool:
        if door.claim is not None and not door.claim.held(now):
            door.claim = None
            self._gate.lose_turn(door.resource, now)
        return door.claim is not None

    def _take_turn(self, door: _Door, now: float) -> bool:
        """Try to; if another has it, listen for its end."""
        if now < door.not_before:
            door.due = door.not_before
            return False
        name = door.resource + TURN
        if door.turn_news is not None:
            door.turn_news.forget()
        longest = max(TTL, self._redlock.ttl)  # the restart guard reckons with that anyway
        # Not by the lock's own ways: those tell listeners of locks, and turns are none.
        claim = self._redlock._claim(name, min(self._pace * TTL, longest), None)
        patience = min(self._redlock.node_timeout, TTL / 10)
        ballot = self._redlock._driver.run(lambda now: quorum.acquire(claim, now, patience))
        if claim.granted_at is None:
            error = refusal.refusal(name, ballot, self._redlock.nodes, TTL)
            if not isinstance(error, ResourceHeld):
                raise error
            holder = error.holder
            if holder is not None and holder.nodes < holder.quorum:
                door.due = now + JITTER.uniform(0, SPLIT)
            elif door.turn_news is None:
                # The confirmation is news: what was announced meanwhile is not missed.
                door.turn_news = self._listen(door.turns, name)
            return False
        door.claim = claim
        door.renewal = now + claim.ttl / 3
        self._gate.take_turn(door.resource, monotonic())
        return True

    def _let_in(self, door: _Door, ripe: float) -> None:
        """If the resource is free, let the first one go; else listen for its release."""
        now = monotonic()
        if ripe > now:
            door.due = ripe
            return
        if door.release_news is not None:
            door.release_news.forget()
        held_for = refusal.free_in(self._redlock._peek(door.resource))
        if held_for <= 0:
            self._deafen(door)
            self._let_go(self._gate.free, door.resource, monotonic(), door.flying)
            return
        door.due = min(door.due, monotonic() + held_for + 0.002)
        if door.release_news is None:
            door.release_news = self._listen(door.releases, door.resource)

    def _listen(self, stack: ExitStack, name: str) -> Waiter:
        waiter: Waiter = stack.enter_context(self._redlock._wakeup.waiting(name))
        waiter.news = _News(self._bell)
        waiter.news.ring()
        return waiter

    def _deafen(self, door: _Door) -> None:
        door.release_news = None
        door.releases.close()

    def _give_up_turn(self, door: _Door) -> None:
        self._gate.lose_turn(door.resource, monotonic())
        if door.claim is not None:
            claim, door.claim = door.claim, None
            patience = self._redlock.node_timeout
            self._redlock._driver.run(lambda now: quorum.release(claim, now, patience))

    def _close(self, door: _Door) -> None:
        self._doors.pop(door.resource, None)
        self._give_up_turn(door)
        self._deafen(door)
        door.turns.close()
