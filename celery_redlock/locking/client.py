"""The inside of a `Redlock`: its claims, from the first request to the last.

It runs the pure algorithm (`quorum.py`) on real nodes (`driver.py`), keeps leases alive
(`watchdog.py`), registers them for a supervisor (`registry.py`) and wakes waiters (`pubsub.py`).
Connections, threads and claims belong to one process. After a fork the child starts with none, and
never owns, extends or releases the leases of its parent.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from ..config.checks import MIN_TTL
from ..events import emit, has_listeners, has_release_listeners
from ..keepalive.registry import LeaseRegistry
from ..keepalive.watchdog import Watchdog
from ..protocol import outcome, quorum
from ..protocol.claim import Claim
from ..protocol.errors import NotAcquired, ResourceHeld
from ..protocol.lease import FENCE_LIMIT
from ..protocol.names import Limit, base_of, slots_of
from ..protocol.quorum import Released
from ..protocol.restart_guard import RestartGuard
from ..protocol.round import Round, Steps
from ..protocol.texts import event, printable, shown
from ..protocol.values import Owner, Query
from ..runtime.clock import monotonic
from ..runtime.greenlets import refuse_eventlet
from ..runtime.polling import SharedPoll
from ..runtime.timer import Timer
from ..stores.driver import Driver
from ..stores.kinds import Address, named, refuse
from .acquisition import Acquisition
from .prolonging import Prolonging
from .pubsub import ReleaseSubscriber
from .request import LockRequest

__all__ = ["LockClient"]

logger = logging.getLogger("celery_redlock.lock")

T = TypeVar("T")

MAX_EXPIRED = 1000
"""Number of claims in memory from which expired claims are looked for and forgotten."""


class LockClient:
    """The claims of one process on one set of nodes, and the parts that serve them.

    Args:
        addresses: The nodes.
        ttl: The default ttl of a claim; seconds.
        prefix: The prefix of the keys on the nodes.
        node_timeout: The longest wait for an answer; seconds.
        fencing: True if claims get a fencing token unless a call says otherwise.
        guard: The rule that withholds the vote from nodes which may have forgotten locks.
        registry: The registry of leases that a supervisor in another process reads.
        poll: The factory of the poll of its connections; see `SharedPoll`.
        timer: The factory of the timer of its watchdog; see `Timer`.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        ttl: float,
        prefix: str,
        node_timeout: float,
        fencing: bool,
        guard: RestartGuard,
        registry: LeaseRegistry,
        poll: Callable[..., SharedPoll] = SharedPoll,
        timer: Callable[..., Timer] = Timer,
    ) -> None:
        refuse_eventlet()
        self.addresses = addresses
        self.kind = named(addresses[0].store)
        self.longest_ttl: float = getattr(addresses[0], "longest_ttl", math.inf)
        self.ttl = min(ttl, self.longest_ttl)
        self.prefix = prefix
        self.node_timeout = node_timeout
        self.fencing = fencing
        self._last_fence = 0
        self.registry = registry
        self.guard = guard
        self.checked = False
        self.answering: int | None = None  # nodes, when they were checked last
        self._poll, self._timer = poll, timer
        self.start_afresh()
        instances.add(self)

    def start_afresh(self) -> None:
        """Begin afresh in this process: no connection, no thread, no lease."""
        self.owner = Owner(socket.gethostname(), os.getpid())
        self.driver = Driver(
            self.addresses,
            self.prefix,
            self.guard,
            strict=not self.checked,
            node_timeout=self.node_timeout,
            poll=self._poll,
        )
        self.wakeup = ReleaseSubscriber(self.addresses, self.prefix, self._poll)
        self.watchdog = Watchdog(
            self._extend, monotonic, self._read, self._timer, self.release_soon
        )
        self.prolonging = Prolonging(self)
        self.claims: dict[str, Claim] = {}
        self.unread: set[str] = set()  # tokens whose release has not been answered yet
        self._left_over: deque[Claim] = deque()
        self._notified: dict[str, float] = {}
        self._many = MAX_EXPIRED

    async def ask(
        self, operation: Callable[[float], Steps[T]], ahead: Callable[[float], Round] | None = None
    ) -> T:
        """Run one operation on the nodes; see `Driver.ask`."""
        return await self.driver.ask(operation, ahead)

    def close(self) -> None:
        """Close all connections; leases expire by their ttl."""
        self.prolonging.now()
        self.watchdog.close()
        self.driver.close()
        self.wakeup.close()  # behind the connections: a waiter that it wakes must find them closed

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' addresses, without credentials."""
        return tuple(address.name for address in self.addresses)

    def patience(self, ttl: float) -> float:
        return min(self.node_timeout, ttl / 10)

    async def acquire(self, request: LockRequest, adopt: Callable[[Claim], None]) -> Claim:
        """Acquire a lock; see `Acquisition`."""
        self._release_left_over()  # it may be in the way
        return await Acquisition(self, request, adopt).run()

    def granted(self, claim: Claim, ballot: Round) -> None:
        """Note that a claim was granted by the round `ballot`."""
        claim.silent = outcome.silent(ballot)
        if claim.fencing_token is not None:
            self._last_fence = max(self._last_fence, claim.fencing_token)
        if has_listeners():
            emit("acquired", claim.lease(monotonic))

    def proposal(self) -> int:
        """Return the least value of the next fencing token: the time, or our last token plus 1."""
        if self.kind.can.fencing == "counted":
            return 0
        return max(self._last_fence + 1, self.wall())

    def wall(self) -> int:
        """Return the wall clock, in microseconds since 1970; no limit if the store counts."""
        if self.kind.can.fencing == "counted":
            return FENCE_LIMIT
        return time.time_ns() // 1000

    def has_notified(self, name: str, within: float) -> bool:
        """Return True if our last release of `name` notified a waiter in the last `within` s."""
        return monotonic() < self._notified.pop(name, 0.0) + within

    def remember(self, claim: Claim) -> None:
        self.claims[claim.token] = claim
        if len(self.claims) > self._many:
            now = monotonic()
            # Leases that were left to expire.
            for token, old in list(self.claims.items()):
                if old.granted_at is not None and not old.held(now):
                    self.claims.pop(token, None)
            self._many = MAX_EXPIRED + 2 * len(self.claims)

    def forget(self, claim: Claim) -> None:
        self.claims.pop(claim.token, None)
        self.unread.discard(claim.token)
        self.registry.unregister(claim)

    async def release(self, claim: Claim, *, wait: bool = True) -> bool:
        """Release a claim; return True if it was held until then.

        Args:
            claim: The claim to release.
            wait: True to wait for the nodes' answers even if no listener needs them, and a
                supervisor would repeat the release if this process ended before.
        """
        self.watchdog.drop(claim)
        self.registry.releasing(claim)
        try:
            if not (
                wait or claim.kept is None or claim.mark is not None or has_release_listeners()
            ):
                held = claim.held(monotonic())
                self.unread.add(claim.token)
                self._start_release(claim)
                return held
            released = await self.ask(partial(self._release, claim))
        except BaseException:
            await self.ask(lambda now: quorum.release(claim, now, 0.0))
            self.forget(claim)
            raise
        self._released(claim, released)
        return released.held

    def _release(self, claim: Claim, now: float) -> Steps[Released]:
        return quorum.release(claim, now, self.node_timeout)

    def _released(self, claim: Claim, released: Released) -> None:
        self.forget(claim)
        if not released.confirmed:
            self.watchdog.retry_soon()
        if released.notified and len(claim.resources) == 1:
            if len(self._notified) > MAX_EXPIRED:
                self._notified.clear()
            self._notified[base_of(claim.resource)] = monotonic()
        if has_listeners() and claim.granted_at is not None:
            emit("released", claim.lease(monotonic), released.held)

    def unreleased(self, claim: Claim) -> bool:
        """Return True if the release of a claim has not begun, or was interrupted."""
        return not claim.ended or (claim.token in self.claims and claim.token not in self.unread)

    def release_soon(self, claim: Claim) -> None:
        """Have a claim released whose block is over, because its own release was interrupted."""
        if claim.token in self.claims:
            self._left_over.append(claim)
            self.watchdog.retry_soon(0.0)

    def _release_left_over(self) -> None:
        while self._left_over:
            claim = self._left_over.popleft()
            self.watchdog.drop(claim)
            logger.warning(
                "an exception interrupted the release of the lock %s at the end of its block; it is"
                " released now",
                printable(claim.resource),
                extra=event("release_interrupted", claim.resource),
            )
            self.registry.releasing(claim)
            self._start_release(claim)

    def _start_release(self, claim: Claim) -> None:
        self.driver.start(partial(self._release, claim), partial(self._released, claim))
        self.watchdog.read_soon()

    def require(self, feature: str, needs: str) -> None:
        """Refuse a feature if the store lacks a capability that it needs; see `contract.refuse`."""
        refuse(self.kind, feature, needs)

    async def hold_for(self, claim: Claim, seconds: float, patience: float | None) -> bool:
        """Renew a claim a last time, for `seconds`; return True if a quorum confirmed it."""
        self.require("a lock that is kept after its work", "ttl_per_key")
        self.watchdog.drop(claim)
        if not claim.held(monotonic()):
            await self.release(claim)  # a renewal would set it again, and keep the next holder out
            return False
        self.registry.unregister(claim)  # or a supervisor would shorten it again
        claim.ttl = max(MIN_TTL, seconds)  # also for an extension that the watchdog now writes
        try:
            patience = self.node_timeout if patience is None else patience
            ballot = await self.ask(lambda now: quorum.extend([claim], now, patience))
        finally:
            claim.ended = True
            self.claims.pop(claim.token, None)
        await self.leave_mark(claim)
        return bool(ballot.confirmed())

    async def leave_mark(self, claim: Claim) -> None:
        """Leave a claim's mark on the nodes, if it has one, without a release of the claim."""
        if claim.mark is not None:  # a release leaves it: here of a claim that nobody holds
            bearer = Claim(claim.mark[0], claim.token, claim.ttl, len(self.addresses))
            bearer.mark = claim.mark
            await self.ask(lambda now: quorum.release(bearer, now, 0.0))

    def _read(self) -> bool:
        self._release_left_over()
        self.prolonging.now()
        patience = max(0.001, min(self.node_timeout, self.watchdog.next_due - monotonic()))
        finished = self.prolonging.finish(patience)
        return self.driver.read() and finished

    def _extend(self, claims: Sequence[Claim], done: Callable[[Sequence[Claim]], None]) -> None:
        """Extend claims for the watchdog; call `done` with those that a quorum confirmed."""
        done(self.extended(claims, self.driver.extend(claims, self.patience_of(claims))))

    def patience_of(self, claims: Sequence[Claim]) -> float:
        """Return how long to wait for the answers to an extension of some claims; seconds."""
        # So that the loss of the claim that ends first is reported in time, and the next extension
        # is not late.
        ends = min([claim.deadline for claim in claims] + [self.watchdog.next_due]) - monotonic()
        return max(0.001, min(ends, self.patience(min([claim.ttl for claim in claims]))))

    def extended(self, claims: Sequence[Claim], ballots: Sequence[Round]) -> list[Claim]:
        """Report an extension of some claims; return the claims that a quorum confirmed."""
        for ballot in ballots:
            silent = outcome.silent(ballot)
            for claim in ballot.claims:
                claim.silent = silent
        renewed = [claim for ballot in ballots for claim in ballot.confirmed()]
        self.registry.renewed(renewed)
        if has_listeners():
            tokens = {claim.token for claim in renewed}
            for claim in claims:
                if claim.token in tokens:
                    emit("extended", claim.lease(monotonic))
                elif not claim.ended:
                    emit("not_extended", claim.lease(monotonic))
        return renewed

    async def peek(
        self,
        names: tuple[str, ...],
        limit: Limit = 1,
        timeout: float | None = None,
        *,
        shared: bool = False,
    ) -> Round:
        """Ask for the holder of each slot (`slots_of`); if shared, for those that keep readers out.

        Raises:
            QuorumUnavailable: Too few nodes answered.
        """
        nodes = len(self.addresses)
        asked = [
            Query((slot,), nodes, shared=shared)
            for slots in slots_of(names, limit)
            for slot in slots
        ]
        patience = self.node_timeout if timeout is None else timeout
        ballot = await self.ask(lambda now: quorum.peek(asked, now, patience))
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
    """Forget the parent's sockets, threads and leases, in the child; send nothing."""
    for client in list(instances):
        client.registry.forked()
        client.start_afresh()


def _at_exit() -> None:
    for client in list(instances):
        client.prolonging.now(client.node_timeout)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
