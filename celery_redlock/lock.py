"""`Redlock`: the lock that users hold.

It binds the pure algorithm (`quorum.py`) to real nodes (`driver.py`), keeps what is held alive
(`watchdog.py`) and wakes who waits (`wakeup.py`). Connections, threads and leases belong to one
process: after a fork the child starts with none, and never owns, extends or releases what its
parent took.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from . import quorum, refusal
from .address import NodeSpec, parse_nodes
from .commands import FENCE_SUFFIX
from .custody import Custody
from .driver import Driver, monotonic
from .errors import (
    ConfigurationError,
    LeaseLost,
    NotAcquired,
    ResourceHeld,
)
from .events import emit, heard
from .green import patched
from .guard import Guard
from .hold import HeldLease
from .lease import Claim, Holder, Lease, Owner
from .native import NativeWatchdog
from .quorum import Round, Verb
from .settings import MIN_TTL, check_option, read_settings
from .wakeup import Wakeup
from .watchdog import Watchdog

__all__ = ["Redlock"]

logger = logging.getLogger("celery_redlock.lock")
node_logger = logging.getLogger("celery_redlock.node")

MANY = 1000
"""Leases after which those left to expire are forgotten."""
LONGEST = 512
"""Characters of a resource's name. What a node's connection takes at once is finite."""
BATCH = 200
"""Leases in one request: keeps a node's other clients from waiting a whole tick."""


class Redlock:
    """A lock over N independent Redis masters, held by a quorum of them.

    Nothing connects before the first use. Instances are safe to share between threads, and may be
    made before a fork.

    Args:
        nodes: URLs (redis, rediss, unix), `redis.Redis` clients or mappings of connection
            arguments; one is a lock on a single node.
        ttl: How long the nodes keep a lock that nobody extends; seconds.
        prefix: What the keys on the nodes begin with.
        node_timeout: How long to wait for an answer at most; seconds. Never more than ttl / 10.
        fencing: Whether leases get a fencing token where nothing else is said.
        keeper: What extends a lock for the process that holds it: a "thread" of it, or as well a
            small "process", which goes on while the GIL is taken and frees at once when the
            process dies.
        restart_guard: "uptime": a node that was started more recently than the longest ttl in use
            has no vote, as it may have forgotten locks; unless it has `appendfsync always`. "off":
            it votes.

    Raises:
        ConfigurationError: A node or an option cannot work.
    """

    def __init__(
        self,
        nodes: Sequence[NodeSpec],
        *,
        ttl: float = 30.0,
        prefix: str = "redlock:",
        node_timeout: float = 0.25,
        fencing: bool = False,
        keeper: str = "thread",
        restart_guard: str = "uptime",
    ) -> None:
        self._addresses = parse_nodes(nodes)
        for address in self._addresses:
            if address.unverified:
                logger.warning(
                    "node %s: its certificate is not checked (ssl_cert_reqs, ssl_check_hostname);"
                    " whoever answers in its place learns the password, and votes",
                    address.name,
                )
        self.ttl: float = check_option("ttl", ttl)
        self.prefix: str = check_option("prefix", prefix)
        self.node_timeout: float = check_option("node_timeout", node_timeout)
        self.fencing: bool = check_option("fencing", fencing)
        self._last_fence = 0
        helper = None
        if check_option("keeper", keeper) == "process":
            helper = {"nodes": nodes, "prefix": prefix, "node_timeout": node_timeout}
        self._custody = Custody(len(self._addresses), helper)
        on = check_option("restart_guard", restart_guard) == "uptime"
        self._guard = Guard(on, self.ttl, node_logger.warning)
        self._checked = False
        self._start()
        _instances.add(self)

    def __repr__(self) -> str:
        names = ", ".join(address.name for address in self._addresses)
        return f"<Redlock over {names}; ttl {self.ttl:g} s>"

    def _start(self) -> None:
        """Begin afresh in this process: no connection, no thread, no lease."""
        self._owner = Owner(socket.gethostname(), os.getpid())
        self._driver = Driver(self._addresses, self.prefix, self._guard, strict=not self._checked)
        self._wakeup = Wakeup(self._addresses, self.prefix)
        self._watchdog: Watchdog | NativeWatchdog = Watchdog(self._extend, monotonic)
        if patched():
            driver = partial(Driver, self._addresses, self.prefix, strict=False)  # it only extends
            self._watchdog = NativeWatchdog(
                driver, self._renew, self._renewed, self._extend, monotonic
            )
        self._claims: dict[str, Claim] = {}
        self._many = MANY

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' addresses, without credentials."""
        return tuple(address.name for address in self._addresses)

    def connect(self, timeout: float = 1.5) -> None:
        """Connect now rather than at the first use; returns when a quorum is connected.

        Args:
            timeout: Seconds to wait at most; 0 to connect in the background.
        """
        self._driver.connect(timeout)

    def check(self, ttl: float | None = None, timeout: float = 1.5) -> list[str]:
        """Look at all nodes once, on connections of its own: can they be what they are to be?

        A node that is away is no error: it is silent until it is back. After a check that went
        well, nor is one that turns out wrong later: it is silent as well, with an error in the log.

        Args:
            ttl: The longest in use, in seconds, if that is more than the instance's.
            timeout: Seconds to wait for the nodes at most.

        Returns:
            Warnings, which are then given nowhere else.

        Raises:
            ConfigurationError: A node is a replica or a member of a Redis Cluster, or two of them
                are one server.
        """
        if ttl is not None:
            self._guard.expect(ttl)
        warnings: list[str] = []
        driver = Driver(self._addresses, self.prefix, self._guard.saying(warnings.append))
        try:
            driver.connect(timeout, rest=timeout)
        finally:
            driver.close(wait=timeout)  # whoever checks may be about to fork
        self._checked, self._driver.strict = True, False
        return warnings

    def close(self) -> None:
        """Close all connections. What is still held expires by its ttl."""
        self._watchdog.close()
        self._wakeup.close()
        self._driver.close()
        self._custody.close()

    # -- The four operations ---------------------------------------------------------------------

    def try_acquire(
        self,
        resource: str,
        *,
        ttl: float | None = None,
        owner: Owner | None = None,
        fencing: bool | None = None,
    ) -> Lease | None:
        """Try once, without waiting. None if another holds the resource.

        Raises:
            QuorumUnavailable: Too few nodes answered to tell.
        """
        try:
            return self.acquire(resource, ttl=ttl, owner=owner, fencing=fencing)
        except ResourceHeld:
            return None

    def acquire(
        self,
        resource: str,
        *,
        ttl: float | None = None,
        wait: float = 0.0,
        owner: Owner | None = None,
        fencing: bool | None = None,
    ) -> Lease:
        """Acquire a lease. It is not extended by itself: for that, see `lock()`.

        Args:
            resource: What must be exclusive.
            ttl: Seconds; the instance's if None.
            wait: How long to go on trying, in seconds; 0 tries once.
            owner: Who asks, for others to read; host and process if None.
            fencing: Whether the lease gets a fencing token; the instance's if None.

        Raises:
            ResourceHeld: Another holds it.
            QuorumUnavailable: Too few nodes answered.
        """
        last: list[Claim] = []

        def adopt(claim: Claim) -> None:
            last[:] = [claim]

        check_option("wait", wait)
        try:
            fenced = self._fenced(fencing)
            return self._lease(self._acquire(resource, ttl, wait, owner, adopt, fencing=fenced))
        except BaseException:
            # A time limit may strike in here. What was written must not outlive it; and it may have
            # been a quorum's: who has seen us hold it waits for an announcement.
            for claim in last:
                if not claim.ended:
                    self._release(claim)
            raise

    def extend(self, lease: Lease) -> Lease:
        """Renew a lease for its ttl from now.

        Raises:
            LeaseLost: It is over: the deadline passed, a quorum no longer holds our token, or it
                is not a lease of this instance and process.
            QuorumUnavailable: Too few nodes confirmed in time. The lease you have still stands,
                until its own deadline.
        """
        claim = self._claims.get(lease.token)
        now = monotonic()
        if claim is None or not claim.held(now):
            reason = "released" if claim is None or claim.lost is None else claim.lost
            raise LeaseLost(
                f"{lease.resource}: the lease to be extended is over ({reason}); acquire it anew",
                resource=lease.resource,
                lease=lease,
                reason="expired" if reason == "released" else reason,
            )
        ballot = self._driver.run(
            lambda now: quorum.extend([claim], now, self._patience(claim.ttl))
        )
        if ballot.confirmed() and claim.held(monotonic()):
            renewed = self._lease(claim)
            emit("extended", renewed)
            return renewed
        if claim.held(monotonic()):
            said = f"{ballot.yes} of {len(self.nodes)} nodes confirmed the extension in time"
            raise self._refused(refusal.unavailable(lease.resource, ballot, self.nodes, said))
        raise LeaseLost(
            f"{lease.resource}: a quorum of nodes no longer holds the lease ({claim.lost})",
            resource=lease.resource,
            lease=lease,
            reason=claim.lost or "expired",
        )

    def release(self, lease: Lease) -> bool:
        """Give a lease back. Whether it was still held to this end. Never raises for a node."""
        claim = self._claims.get(lease.token)
        return claim is not None and self._release(claim)

    def holder(self, resource: str, *, timeout: float | None = None) -> Holder | None:
        """Who holds `resource`, as the nodes tell; None if it is free.

        Args:
            resource: What may be held.
            timeout: How long to wait for the nodes, in seconds; the node timeout if None.

        Raises:
            QuorumUnavailable: Too few nodes answered to tell.
        """
        ballot = self._peek(resource, timeout)
        tokens = [detail[0] for detail in ballot.details if isinstance(detail, tuple)]
        if not tokens:
            return None
        return refusal.holder(resource, tokens, ballot.quorum, refusal.free_in(ballot))

    def lock(
        self,
        resource: str,
        *,
        ttl: float | None = None,
        wait: float = 0.0,
        max_lifetime: float | None = None,
        on_lost: Callable[[HeldLease], object] | None = None,
        owner: Owner | None = None,
        fencing: bool | None = None,
    ) -> HeldLease:
        """A lock for a `with` block: acquired at its begin, extended meanwhile, then released.

        A block inside a block of the same resource and thread (or greenlet, or asyncio task)
        shares the lock; only the outermost frees it.

        Args:
            resource: What must be exclusive.
            ttl: Seconds; the instance's if None.
            wait: How long to go on trying, in seconds.
            max_lifetime: Seconds after which it is no longer extended; None for never.
            on_lost: Called, in another thread, if the lease is lost.
            owner: Who asks, for others to read.
            fencing: Whether the lease gets a fencing token; the instance's if None.

        Raises:
            NotAcquired: On entering the block.
            ConfigurationError: On entering a block inside one that has no fencing token to share.
        """
        check_option("wait", wait)
        check_option("max_lifetime", max_lifetime)
        if on_lost is not None and not callable(on_lost):
            raise ConfigurationError(
                f"on_lost must be a callable that takes the lease, or None; it is {on_lost!r}"
            )
        fenced = self._fenced(fencing)
        return HeldLease(self, resource, ttl, wait, max_lifetime, on_lost, owner, fencing=fenced)

    @classmethod
    def from_app(cls, app: Any) -> Redlock:
        """The lock of a Celery app, as its `redlock_...` settings describe; one per app.

        Raises:
            ConfigurationError: A setting cannot work, or no node is named and the broker is no
                Redis.
        """
        with _of_app_lock:
            known = _of_app.get(app)
            if known is None:
                settings = read_settings(app)
                known = _of_app[app] = cls(
                    settings.nodes,
                    ttl=settings.ttl,
                    prefix=settings.prefix,
                    node_timeout=settings.node_timeout,
                    fencing=settings.fencing,
                    keeper=settings.keeper,
                    restart_guard=settings.restart_guard,
                )
            return known

    # -- Inside ----------------------------------------------------------------------------------

    def _patience(self, ttl: float) -> float:
        return min(self.node_timeout, ttl / 10)

    def _lease(self, claim: Claim) -> Lease:
        return Lease(
            claim.resource, claim.token, claim.ttl, claim.deadline, monotonic, claim.fencing_token
        )

    def _fenced(self, fencing: bool | None) -> bool:
        return self.fencing if fencing is None else bool(check_option("fencing", fencing))

    def _proposal(self) -> int:
        """What the next fencing token is to be at least: microseconds since 1970, or what follows
        the largest this instance was granted, whatever the wall clock says."""
        return max(self._last_fence + 1, time.time_ns() // 1000)

    def _claim(self, resource: str, ttl: float | None, owner: Owner | None) -> Claim:
        if not isinstance(resource, str) or not resource:
            raise ConfigurationError(
                f"a resource is a name, not {resource!r}: give a string that is not empty"
            )
        if resource.endswith(FENCE_SUFFIX):
            raise ConfigurationError(
                f"a resource may not be named {resource!r}: what ends in {FENCE_SUFFIX!r} is the"
                " key of a fencing token; give it another end"
            )
        if len(resource) > LONGEST:
            raise ConfigurationError(
                f"a resource's name has at most {LONGEST} characters, for every node keeps it and"
                f" every request bears it; {resource[:20]!r}... has {len(resource)}: put a digest"
                " of it into the name"
            )
        ttl = self.ttl if ttl is None else check_option("ttl", ttl)
        if ttl > self._guard.longest:
            self._guard.expect(ttl)
        token = (owner or self._owner).token(os.urandom(16).hex())
        return Claim(resource, token, ttl, len(self._addresses))

    def _acquire(
        self,
        resource: str,
        ttl: float | None,
        wait: float,
        owner: Owner | None,
        adopt: Callable[[Claim], None],
        patience: float | None = None,
        fencing: bool = False,
    ) -> Claim:
        """Acquire; each attempt's claim is first given to `adopt`, who gives it back if struck."""
        try:
            return self._try(resource, ttl, owner, adopt, patience, fencing)
        except NotAcquired:
            if wait <= 0:
                raise
        with self._wakeup.waiting(resource) as waiter:

            def again() -> Claim:
                waiter.forget()
                return self._try(resource, ttl, owner, adopt, patience, fencing)

            return waiter.retry(again, wait, lambda: refusal.free_in(self._peek(resource)))

    def _try(
        self,
        resource: str,
        ttl: float | None,
        owner: Owner | None,
        adopt: Callable[[Claim], None],
        patience: float | None,
        fencing: bool,
    ) -> Claim:
        claim = self._claim(resource, ttl, owner)
        adopt(claim)
        self._remember(claim)
        patience = self._patience(claim.ttl) if patience is None else patience
        try:
            ballot = self._driver.run(
                # The proposal is made after `now`: who is stopped in between asks too late.
                lambda now: quorum.acquire(
                    claim, now, patience, self._proposal() if fencing else None
                )
            )
        except BaseException:
            if claim.ended:  # struck while it was being undone: some nodes may not know of it
                self._driver.run(lambda now: quorum.undo(claim, now))
            raise
        if claim.granted_at is not None:
            claim.silent = refusal.silent(ballot)
            if fencing:
                self._last_fence = max(self._last_fence, claim.fencing_token or 0)
            if heard():
                emit("acquired", self._lease(claim))
            return claim
        self._forget(claim)
        error = refusal.refusal(resource, ballot, self.nodes, claim.ttl)
        if isinstance(error, ResourceHeld) and (error.holder is None or error.holder.owner is None):
            look = self._driver.run(lambda now: quorum.peek(claim, now, patience))
            error = refusal.if_for_ever(error, look, self.nodes, self.prefix + resource)
        raise self._refused(error)

    def _remember(self, claim: Claim) -> None:
        self._claims[claim.token] = claim
        if len(self._claims) > self._many:
            now = monotonic()
            # Leases that were left to expire.
            for token, old in list(self._claims.items()):
                if old.granted_at is not None and not old.held(now):
                    self._claims.pop(token, None)
            self._many = MANY + 2 * len(self._claims)

    def _forget(self, claim: Claim) -> None:
        self._claims.pop(claim.token, None)
        self._custody.strike_off(claim)

    def _release(self, claim: Claim) -> bool:
        self._watchdog.drop(claim)
        try:
            held = self._driver.run(lambda now: quorum.release(claim, now, self.node_timeout))
        except BaseException:
            self._driver.run(lambda now: quorum.release(claim, now, 0.0))
            raise
        finally:
            self._forget(claim)
        if heard() and claim.granted_at is not None:
            emit("released", self._lease(claim), held)
        return held

    def _keep(self, claim: Claim, seconds: float, patience: float | None) -> bool:
        """Renew once more, for another ttl, and then no more; whether a quorum confirmed it."""
        self._watchdog.drop(claim)
        if not claim.held(monotonic()):
            self._release(claim)  # set again now, it would keep the next holder out
            return False
        self._custody.strike_off(claim)  # nor may a keeper shorten it again
        claim.ttl = max(MIN_TTL, seconds)  # also for an extension that the watchdog now writes
        try:
            patience = self.node_timeout if patience is None else patience
            ballot = self._driver.run(lambda now: quorum.extend([claim], now, patience))
        finally:
            claim.ended = True
            self._claims.pop(claim.token, None)
        return bool(ballot.confirmed())

    def _extend(self, claims: Sequence[Claim]) -> list[Claim]:
        """Renew many, for the watchdog; which were renewed."""
        renewed = self._renew(claims, self._driver, Verb.EXTEND)
        self._renewed(renewed)
        return renewed

    def _renew(
        self, claims: Sequence[Claim], driver: Driver, verb: Verb = Verb.RENEW
    ) -> list[Claim]:
        now = monotonic()
        # The first of them to end is to be told in time, and the next that is due has its turn.
        patience = min(min(c.deadline - now, self._patience(c.ttl)) for c in claims)
        patience = max(0.001, min(patience, self._watchdog.next_due - now))
        batches = [claims[i : i + BATCH] for i in range(0, len(claims), BATCH)]
        ballots = driver.run_all(
            [partial(quorum.extend, batch, patience=patience, verb=verb) for batch in batches]
        )
        for ballot in ballots:
            silent = refusal.silent(ballot)
            for claim in ballot.claims:
                claim.silent = silent
        renewed = [claim for ballot in ballots for claim in ballot.confirmed()]
        for claim in renewed:
            self._custody.renewed(claim)
        return renewed

    def _renewed(self, claims: Sequence[Claim]) -> None:
        if heard():
            for claim in claims:
                emit("extended", self._lease(claim))

    def _peek(self, resource: str, timeout: float | None = None) -> Round:
        claim = self._claim(resource, None, None)
        patience = self.node_timeout if timeout is None else timeout
        ballot = self._driver.run(lambda now: quorum.peek(claim, now, patience))
        if ballot.yes < ballot.quorum:
            raise self._refused(refusal.unavailable(resource, ballot, self.nodes))
        return ballot

    def _refused(self, error: NotAcquired) -> NotAcquired:
        if isinstance(error, ResourceHeld):
            emit("held", error.resource, error.holder)
        else:
            emit("unavailable", error.resource, error.votes)
        return error


_instances: weakref.WeakSet[Redlock] = weakref.WeakSet()
_of_app_lock = threading.Lock()
_of_app: weakref.WeakKeyDictionary[Any, Redlock] = weakref.WeakKeyDictionary()


def _after_fork() -> None:
    """In a child: forget sockets, threads and leases, and send nothing. They are the parent's."""
    global _of_app_lock
    _of_app_lock = threading.Lock()
    for redlock in list(_instances):
        redlock._custody.forked()
        redlock._start()


os.register_at_fork(after_in_child=_after_fork)
