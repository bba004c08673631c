"""What goes on inside a `Redlock`: its claims, from the first request to the last.

It runs the pure algorithm (`quorum.py`) on real nodes (`driver.py`), keeps leases alive
(`watchdog.py`), registers them for a supervisor (`registry.py`) and wakes waiters (`pubsub.py`).
Connections, threads and claims belong to one process. After a fork the child starts with none, and
never owns, extends or releases what its parent took.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from ..config.checks import MIN_TTL
from ..config.options import check_option
from ..events import Ask, emit, heard
from ..keepalive.registry import LeaseRegistry
from ..keepalive.watchdog import Watchdog
from ..protocol import outcome, quorum
from ..protocol.claim import Claim
from ..protocol.commands import DONE, base_of
from ..protocol.errors import NotAcquired, QuorumUnavailable, ResourceHeld
from ..protocol.lease import NEVER, Lease
from ..protocol.names import Resources, check_alone, checked_names, slots
from ..protocol.restart_guard import RestartGuard
from ..protocol.round import Round, Steps, Verb
from ..protocol.values import Owner, Vote, quorum_of, shown
from ..runtime.clock import monotonic
from ..runtime.greenlets import refuse_eventlet
from ..stores.redis.address import Address
from ..stores.redis.driver import Driver
from .pubsub import ReleaseSubscriber
from .wait_queue import JITTER, STAND_BACK

__all__ = ["LockClient"]

node_logger = logging.getLogger("celery_redlock.node")

MANY = 1000
"""Leases after which those left to expire are forgotten."""


class LockClient:
    """The claims of one process on one set of nodes, and the parts that serve them.

    Args:
        addresses: The nodes.
        ttl: What a claim has if none is asked for; seconds.
        prefix: What the keys on the nodes begin with.
        node_timeout: How long to wait for an answer at most; seconds.
        fencing: Whether claims get a fencing token where nothing else is said.
        guarded: Whether nodes that may have forgotten locks have no vote.
        registry: Tells a supervisor in another process what is held here.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        ttl: float,
        prefix: str,
        node_timeout: float,
        fencing: bool,
        guarded: bool,
        registry: LeaseRegistry,
    ) -> None:
        refuse_eventlet()
        self.addresses = addresses
        self.ttl = ttl
        self.prefix = prefix
        self.node_timeout = node_timeout
        self.fencing = fencing
        self._last_fence = 0
        self.registry = registry
        self.guard = RestartGuard(guarded, ttl, node_logger.warning)
        self.checked = False
        self.start_afresh()
        instances.add(self)

    def start_afresh(self) -> None:
        """Begin afresh in this process: no connection, no thread, no lease."""
        self.owner = Owner(socket.gethostname(), os.getpid())
        self.driver = Driver(
            *(self.addresses, self.prefix, self.guard),
            strict=not self.checked,
            node_timeout=self.node_timeout,
        )
        self.wakeup = ReleaseSubscriber(self.addresses, self.prefix)
        self.watchdog = Watchdog(self._extend, monotonic)
        self.claims: dict[str, Claim] = {}
        self._called: dict[str, float] = {}
        self._many = MANY

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' addresses, without credentials."""
        return tuple(address.name for address in self.addresses)

    def patience(self, ttl: float) -> float:
        return min(self.node_timeout, ttl / 10)

    def lease_of(self, claim: Claim) -> Lease:
        return Lease(
            claim.resource,
            claim.token,
            claim.ttl,
            claim.deadline,
            monotonic,
            claim.fencing_token,
            claim.resources,
            claim.granted_at or 0.0,
        )

    def fenced(self, fencing: bool | None, names: Sequence[str], limit: int = 1) -> bool:
        fenced = self.fencing if fencing is None else bool(check_option("fencing", fencing))
        check_option("limit", limit)
        check_alone(names, fencing=fenced, limit=limit)
        return fenced

    def _proposal(self) -> int:
        """What the next fencing token is to be at least: microseconds since 1970, or what follows
        the largest this instance was granted, whatever the wall clock says."""
        return max(self._last_fence + 1, self._wall())

    def _wall(self) -> int:
        """The wall clock, in microseconds since 1970."""
        return time.time_ns() // 1000

    def new_claim(
        self, names: Sequence[str], ttl: float | None = None, owner: Owner | None = None
    ) -> Claim:
        ttl = self.ttl if ttl is None else check_option("ttl", ttl)
        if ttl > self.guard.longest:
            self.guard.expect(ttl)
        token = (owner or self.owner).token(os.urandom(16).hex(), time.time())
        return Claim(names, token, ttl, len(self.addresses))

    def acquire(
        self,
        resource: Resources,
        ttl: float | None,
        wait: float,
        owner: Owner | None,
        adopt: Callable[[Claim], None],
        patience: float | None = None,
        fencing: bool = False,
        limit: int = 1,
    ) -> Claim:
        """Acquire; each attempt's claim is first given to `adopt`, who gives it back if struck."""
        names = checked_names(resource)
        if not heard():
            return self._ask(names, ttl, wait, owner, adopt, patience, fencing, limit)
        began, attempts = monotonic(), 0

        def counted(claim: Claim) -> None:
            nonlocal attempts
            attempts += 1
            adopt(claim)

        def tell(lease: Lease | None, refusal: NotAcquired | None) -> None:
            count = len(self.addresses)
            asked = (shown(names), owner or self.owner, lease, refusal, monotonic() - began)
            emit("acquire_finished", Ask(*asked, attempts, count, quorum_of(count)))

        try:
            claim = self._ask(names, ttl, wait, owner, counted, patience, fencing, limit)
        except NotAcquired as refusal:
            tell(None, refusal)
            raise
        tell(self.lease_of(claim), None)
        return claim

    def _ask(
        self,
        names: tuple[str, ...],
        ttl: float | None,
        wait: float,
        owner: Owner | None,
        adopt: Callable[[Claim], None],
        patience: float | None,
        fencing: bool,
        limit: int,
    ) -> Claim:
        if fencing or limit > 1:
            check_alone(names, fencing=fencing, limit=limit)

        def attempt(names: Sequence[str], shown_as: str = "", place: Claim | None = None) -> Claim:
            claim = self.new_claim(names, ttl, owner)
            claim.resource = shown_as or claim.resource
            return self._attempt(claim, adopt, patience, fencing, place)

        def once(known_full: bool = True, place: Claim | None = None) -> Claim:
            try:
                if limit > 1:
                    if place is not None:
                        self.driver.run(lambda now: quorum.leave(place, now, Verb.ENQUEUE))
                    return self._attempt_slots(names[0], limit, attempt, known_full)
                return attempt(names, place=place)
            except NotAcquired as error:
                raise self.refused(error) from None

        standing_back = wait > 0 and len(names) == 1 and self._stand_back(names[0])
        if not standing_back:
            try:
                return once(known_full=False)
            except NotAcquired as error:
                # When the nodes will have a vote is known: before that, waiting is in vain.
                known = error.retry_after if isinstance(error, QuorumUnavailable) else None
                if wait <= (known or 0.0):
                    raise
        if len(names) == 1:
            return self._acquire_in_line(names[0], wait, limit, once, standing_back)
        with self.wakeup.waiting(*names) as waiter:
            conflicting = names

            def again() -> Claim:
                nonlocal conflicting
                waiter.forget()
                try:
                    return once()
                except ResourceHeld as error:
                    # That the others of several are freed is no reason to try.
                    conflicting = error.conflicting or names
                    waiter.only(conflicting)
                    raise

            def free_in() -> float:
                return outcome.free_in(self.peek(conflicting, limit))

            return waiter.retry(again, wait, free_in)

    def _acquire_in_line(
        self,
        name: str,
        wait: float,
        limit: int,
        once: Callable[..., Claim],
        standing_back: bool,
    ) -> Claim:
        """Stand in line for a resource until one of its releases is for us."""
        place = Claim(name, "", self.ttl, len(self.addresses))
        verb = Verb.HAND_ON

        with self.wakeup.in_line() as waiter:
            place.token, place.since = waiter.member, waiter.since
            try:
                if standing_back:
                    waiter.forget()
                    self.driver.run(lambda now: quorum.leave(place, now, Verb.ENQUEUE))
                    waiter.wait(min(wait, JITTER.uniform(*STAND_BACK)))
                claim = waiter.retry(
                    lambda queue: once(place=place if queue else None),
                    wait,
                    lambda: outcome.free_in(self.peek(name, limit)),
                )
                verb = Verb.DEQUEUE
                return claim
            finally:
                there = set(range(len(self.addresses)))
                if verb is Verb.DEQUEUE:
                    there.difference_update(waiter.left_by)
                if there:
                    self.driver.run(lambda now: quorum.leave(place, now, verb, there))

    def _attempt_slots(
        self,
        name: str,
        limit: int,
        attempt: Callable[[Sequence[str], str], Claim],
        known_full: bool,
    ) -> Claim:
        """Acquire one of the slots of a name: any; and if that is taken, one that is seen free."""
        names = slots(name, limit)
        if not known_full:
            with contextlib.suppress(ResourceHeld):
                return attempt([JITTER.choice(names)], name)
        ballot = self.peek(name, limit)
        free = outcome.free(ballot)
        JITTER.shuffle(free)
        lost = None
        for slot in free:
            try:
                return attempt([names[slot]], name)
            except ResourceHeld as error:
                lost = error.holder
        raise outcome.all_held(name, ballot, self.nodes, lost)

    def _attempt(
        self,
        claim: Claim,
        adopt: Callable[[Claim], None],
        patience: float | None,
        fencing: bool,
        place: Claim | None,
    ) -> Claim:
        """One attempt, whose claim is `claim`; ahead of it, that of a place in line."""
        adopt(claim)
        self._remember(claim)
        patience = self.patience(claim.ttl) if patience is None else patience

        def operation(now: float) -> Steps[Round]:
            # The proposal is made after `now`: who is stopped in between asks too late.
            proposal = self._proposal() if fencing else None
            return quorum.acquire(claim, now, patience, proposal, self._wall())

        ahead = [] if place is None else [partial(quorum.line_up, place)]

        try:
            ballot = self.driver.run(operation, *ahead)
        except BaseException:
            if claim.ended:  # struck while it was being undone: some nodes may not know of it
                self.driver.run(lambda now: quorum.undo(claim, now))
            raise
        if claim.granted_at is not None:
            claim.silent = outcome.silent(ballot)
            if fencing:
                self._last_fence = max(self._last_fence, claim.fencing_token or 0)
            if heard():
                emit("acquired", self.lease_of(claim))
            return claim
        self._forget(claim)
        error = outcome.refusal(claim.resource, ballot, self.nodes, claim.ttl)
        if isinstance(error, ResourceHeld) and (error.holder is None or error.holder.owner is None):
            look = self.driver.run(lambda now: quorum.peek(claim, now, patience))
            keys = [self.prefix + name for name in claim.resources]
            error = outcome.if_for_ever(error, look, self.nodes, keys)
        raise error

    def _stand_back(self, name: str) -> bool:
        """Whether one who waits was called by our own release, a moment ago."""
        return monotonic() < self._called.pop(name, 0.0) + STAND_BACK[0]

    def _remember(self, claim: Claim) -> None:
        self.claims[claim.token] = claim
        if len(self.claims) > self._many:
            now = monotonic()
            # Leases that were left to expire.
            for token, old in list(self.claims.items()):
                if old.granted_at is not None and not old.held(now):
                    self.claims.pop(token, None)
            self._many = MANY + 2 * len(self.claims)

    def _forget(self, claim: Claim) -> None:
        self.claims.pop(claim.token, None)
        self.registry.unregister(claim)

    def release(self, claim: Claim) -> bool:
        self.watchdog.drop(claim)
        self.registry.releasing(claim)
        try:
            held = self.driver.run(lambda now: quorum.release(claim, now, self.node_timeout))
        except BaseException:
            self.driver.run(lambda now: quorum.release(claim, now, 0.0))
            raise
        finally:
            self._forget(claim)
        if claim.called and len(claim.resources) == 1:
            if len(self._called) > MANY:
                self._called.clear()
            self._called[base_of(claim.resource)] = monotonic()
        if heard() and claim.granted_at is not None:
            emit("released", self.lease_of(claim), held)
        return held

    def hold_for(self, claim: Claim, seconds: float, patience: float | None) -> bool:
        """Renew once more, for another ttl, and then no more; whether a quorum confirmed it."""
        self.watchdog.drop(claim)
        if not claim.held(monotonic()):
            self.release(claim)  # set again now, it would keep the next holder out
            return False
        self.registry.unregister(claim)  # nor may a keeper shorten it again
        self.guard.expect(max(MIN_TTL, seconds))
        claim.ttl = max(MIN_TTL, seconds)  # also for an extension that the watchdog now writes
        try:
            patience = self.node_timeout if patience is None else patience
            ballot = self.driver.run(lambda now: quorum.extend([claim], now, patience))
        finally:
            claim.ended = True
            self.claims.pop(claim.token, None)
        if claim.mark is not None:
            # Nothing is released that could bring it along: a release of what is not held does.
            bearer = Claim(claim.mark[0], claim.token, claim.ttl, len(self.addresses))
            bearer.mark = claim.mark
            self.driver.run(lambda now: quorum.release(bearer, now, 0.0))
        return bool(ballot.confirmed())

    def look_up(
        self, mark: str, claim: Claim | None, names: Sequence[str]
    ) -> tuple[bool, set[str]]:
        """Whether a node knows a mark that was set at a release; and what lies under `names`.

        One node that knows it is enough; and one does, if there is one. Whoever was there before
        held a quorum of nodes, and so does `claim`: they share a node, and that one was free for
        `claim` only after it had been marked, in one step with the release. So if all nodes that
        granted `claim` say no, nobody was there, or he was not done; or did not release it himself.

        Raises:
            QuorumUnavailable: None knows it, and one that granted `claim` does not answer.
        """
        asked = [Claim(name, "", self.ttl, len(self.addresses)) for name in (mark, *names)]
        ballot = self.driver.run(lambda now: quorum.survey(asked, now, self.node_timeout))
        found = [outcome.seen(ballot, number) for number in range(len(asked))]
        marked = any(held is not None and held[0] == DONE for held in found[0])
        granted = claim.expiries if claim is not None else [NEVER] * len(self.addresses)
        for vote, expiry in zip(ballot.votes, granted, strict=True):
            if not marked and expiry != NEVER and vote is not Vote.YES:
                told = "a node that granted the lock does not tell whether the task is done"
                raise self.refused(outcome.unavailable(mark, ballot, self.nodes, told))
        return marked, {held[0] for seen in found[1:] for held in seen if held is not None}

    def _extend(self, claims: Sequence[Claim]) -> list[Claim]:
        """Extend many, for the watchdog; return those that a quorum confirmed."""
        now = monotonic()
        # The first of them to end is to be told in time, and the next that is due has its turn.
        patience = min(min(c.deadline - now, self.patience(c.ttl)) for c in claims)
        patience = max(0.001, min(patience, self.watchdog.next_due - now))
        ballots = self.driver.extend(claims, patience)
        for ballot in ballots:
            silent = outcome.silent(ballot)
            for claim in ballot.claims:
                claim.silent = silent
        renewed = [claim for ballot in ballots for claim in ballot.confirmed()]
        for claim in renewed:
            self.registry.renewed(claim)
        if heard():
            tokens = {claim.token for claim in renewed}
            for claim in claims:
                if claim.token in tokens:
                    emit("extended", self.lease_of(claim))
                elif not claim.ended:
                    emit("not_extended", self.lease_of(claim))
        return renewed

    def peek(self, resource: Resources, limit: int = 1, timeout: float | None = None) -> Round:
        """Ask who holds a resource, or each of its slots."""
        names = checked_names(resource)
        claims = [self.new_claim(names)]
        if limit > 1:
            claims = [self.new_claim([slot]) for slot in slots(names[0], limit)]
        patience = self.node_timeout if timeout is None else timeout
        ballot = self.driver.run(lambda now: quorum.survey(claims, now, patience))
        if ballot.yes < ballot.quorum:
            raise outcome.unavailable(shown(names), ballot, self.nodes)
        return ballot

    def refused(self, error: NotAcquired) -> NotAcquired:
        if isinstance(error, ResourceHeld):
            emit("held", error.resource, error.holder)
        else:
            emit("unavailable", error.resource, error.votes)
        return error


instances: weakref.WeakSet[LockClient] = weakref.WeakSet()


def _after_fork() -> None:
    """In a child: forget sockets, threads and leases, and send nothing. They are the parent's."""
    for engine in list(instances):
        engine.registry.forked()
        engine.start_afresh()


os.register_at_fork(after_in_child=_after_fork)
