"""`Redlock`: the lock that users hold. What goes on inside stands in `client.py`."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..config.options import check_option, guarded
from ..config.settings import read_settings
from ..events import emit
from ..keepalive.registry import LeaseRegistry
from ..protocol import outcome, quorum
from ..protocol.claim import Claim
from ..protocol.errors import ConfigurationError, LeaseLost, QuorumUnavailable, ResourceHeld
from ..protocol.lease import Lease
from ..protocol.names import Resources, checked_names
from ..protocol.values import Holder, Owner
from ..runtime.clock import monotonic
from ..stores.redis.address import NodeSpec, parse_nodes
from ..stores.redis.driver import Driver
from .client import LockClient
from .held import HeldLease

__all__ = ["Redlock"]

logger = logging.getLogger("celery_redlock.lock")


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
            it votes. "auto": "uptime" with three nodes or more, else "off".

    Raises:
        ConfigurationError: A node or an option cannot work.
    """

    __module__ = "celery_redlock"

    def __init__(
        self,
        nodes: Sequence[NodeSpec],
        *,
        ttl: float = 30.0,
        prefix: str = "redlock:",
        node_timeout: float = 0.25,
        fencing: bool = False,
        keeper: str = "thread",
        restart_guard: str = "auto",
    ) -> None:
        addresses = parse_nodes(nodes)
        for address in addresses:
            if address.unverified:
                logger.warning(
                    "node %s: its certificate is not checked (ssl_cert_reqs, ssl_check_hostname);"
                    " whoever answers in its place learns the password, and votes",
                    address.name,
                )
        helper = None
        if check_option("keeper", keeper) == "process":
            helper = {"nodes": nodes, "prefix": prefix, "node_timeout": node_timeout}
        self.client = LockClient(
            addresses,
            check_option("ttl", ttl),
            check_option("prefix", prefix),
            check_option("node_timeout", node_timeout),
            check_option("fencing", fencing),
            guarded(check_option("restart_guard", restart_guard), len(addresses)),
            LeaseRegistry(len(addresses), helper),
        )

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' addresses, without credentials."""
        return self.client.nodes

    @property
    def ttl(self) -> float:
        """How long the nodes keep a lock that nobody extends; seconds."""
        return self.client.ttl

    @property
    def prefix(self) -> str:
        """What the keys on the nodes begin with."""
        return self.client.prefix

    @property
    def node_timeout(self) -> float:
        """How long to wait for an answer at most; seconds."""
        return self.client.node_timeout

    def __repr__(self) -> str:
        names = ", ".join(address.name for address in self.client.addresses)
        return f"<Redlock over {names}; ttl {self.ttl:g} s>"

    def connect(self, timeout: float = 1.5) -> None:
        """Connect now rather than at the first use; returns when a quorum is connected.

        Args:
            timeout: Seconds to wait at most; 0 to connect in the background.
        """
        self.client.driver.connect(timeout)

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
            ConfigurationError: So many of them are replicas, members of a Redis Cluster or one
                server under two names that no quorum is left. Of fewer there is a warning each.
        """
        if ttl is not None:
            self.client.guard.expect(ttl)
        warnings: list[str] = []
        client = self.client
        driver = Driver(client.addresses, client.prefix, client.guard.saying(warnings.append))
        try:
            driver.connect(timeout, rest=timeout)
            warnings += [
                f"node {node.name} cannot be one and has no vote: {node.misfit}"
                for node in driver.nodes
                if node.misfit
            ]
        finally:
            driver.close(wait=timeout)  # whoever checks may be about to fork
        self.client.checked, self.client.driver.strict = True, False
        return warnings

    def close(self) -> None:
        """Close all connections. What is still held expires by its ttl."""
        self.client.watchdog.close()
        self.client.wakeup.close()
        self.client.driver.close()
        self.client.registry.close()

    # -- The four operations ---------------------------------------------------------------------

    def try_acquire(
        self,
        resource: Resources,
        *,
        ttl: float | None = None,
        owner: Owner | None = None,
        fencing: bool | None = None,
        limit: int = 1,
    ) -> Lease | None:
        """Try once, without waiting. None if another holds the resource.

        Raises:
            QuorumUnavailable: Too few nodes answered to tell.
        """
        try:
            return self.acquire(resource, ttl=ttl, owner=owner, fencing=fencing, limit=limit)
        except ResourceHeld:
            return None

    def acquire(
        self,
        resource: Resources,
        *,
        ttl: float | None = None,
        wait: float = 0.0,
        owner: Owner | None = None,
        fencing: bool | None = None,
        limit: int = 1,
    ) -> Lease:
        """Acquire a lease. It is not extended by itself: for that, see `lock()`.

        Args:
            resource: What must be exclusive; or several such, of which it gets all or none.
            ttl: Seconds; the instance's if None.
            wait: How long to go on trying, in seconds; 0 tries once.
            owner: Who asks, for others to read; host and process if None.
            fencing: Whether the lease gets a fencing token; the instance's if None.
            limit: How many may hold it at a time.

        Raises:
            ResourceHeld: Another holds it.
            QuorumUnavailable: Too few nodes answered.
        """
        last: list[Claim] = []

        def adopt(claim: Claim) -> None:
            last[:] = [claim]

        check_option("wait", wait)
        try:
            fenced = self.client.fenced(fencing, checked_names(resource), limit)
            return self.client.lease_of(
                self.client.acquire(resource, ttl, wait, owner, adopt, fencing=fenced, limit=limit)
            )
        except BaseException:
            # A time limit may strike in here. What was written must not outlive it; and it may have
            # been a quorum's: who has seen us hold it waits for an announcement.
            for claim in last:
                if not claim.ended:
                    self.client.release(claim)
            raise

    def extend(self, lease: Lease) -> Lease:
        """Renew a lease for its ttl from now.

        Raises:
            LeaseLost: It is over: the deadline passed, a quorum no longer holds our token, or it
                is not a lease of this instance and process.
            QuorumUnavailable: Too few nodes confirmed in time. The lease you have still stands,
                until its own deadline.
        """
        claim = self.client.claims.get(lease.token)
        now = monotonic()
        if claim is None or not claim.held(now):
            reason = "released" if claim is None or claim.lost is None else claim.lost
            raise LeaseLost(
                f"{lease.resource}: the lease to be extended is over ({reason}); acquire it anew",
                resource=lease.resource,
                lease=lease,
                reason="expired" if reason == "released" else reason,
            )
        patience = self.client.patience(claim.ttl)
        ballot = self.client.driver.run(lambda now: quorum.extend([claim], now, patience))
        if ballot.confirmed() and claim.held(monotonic()):
            renewed = self.client.lease_of(claim)
            emit("extended", renewed)
            return renewed
        if claim.held(monotonic()):
            said = f"{ballot.yes} of {len(self.nodes)} nodes confirmed the extension in time"
            raise self.client.refused(outcome.unavailable(lease.resource, ballot, self.nodes, said))
        raise LeaseLost(
            f"{lease.resource}: a quorum of nodes no longer holds the lease ({claim.lost})",
            resource=lease.resource,
            lease=lease,
            reason=claim.lost or "expired",
        )

    def release(self, lease: Lease) -> bool:
        """Give a lease back. Whether it was still held to this end. Never raises for a node."""
        claim = self.client.claims.get(lease.token)
        return claim is not None and self.client.release(claim)

    def holder(self, resource: str, *, timeout: float | None = None) -> Holder | None:
        """Who holds `resource`, as the nodes tell; None if it is free.

        Args:
            resource: What may be held.
            timeout: How long to wait for the nodes, in seconds; the node timeout if None.

        Raises:
            QuorumUnavailable: Too few nodes answered to tell.
        """
        found = self._holders(resource, 1, timeout)
        return found[0] if found else None

    def holders(self, resource: str, *, limit: int, timeout: float | None = None) -> list[Holder]:
        """Who holds the slots of a `resource` that several may hold at a time.

        Args:
            resource: What may be held.
            limit: How many may hold it.
            timeout: How long to wait for the nodes, in seconds; the node timeout if None.

        Raises:
            QuorumUnavailable: Too few nodes answered to tell.
        """
        return self._holders(resource, check_option("limit", limit), timeout)

    def _holders(self, resource: str, limit: int, timeout: float | None) -> list[Holder]:
        try:
            ballot = self.client.peek(resource, limit, timeout)
        except QuorumUnavailable as error:
            raise self.client.refused(error) from None
        found = []
        for slot in range(limit):
            tokens = [held[0] for held in outcome.seen(ballot, slot) if held is not None]
            if tokens:
                free_in = outcome.free_in(ballot, slot)
                found.append(outcome.holder(resource, tokens, ballot.quorum, free_in))
        return found

    def lock(
        self,
        resource: Resources,
        *,
        ttl: float | None = None,
        wait: float = 0.0,
        max_lifetime: float | None = None,
        on_lost: Callable[[HeldLease], object] | None = None,
        owner: Owner | None = None,
        fencing: bool | None = None,
        limit: int = 1,
    ) -> HeldLease:
        """A lock for a `with` block: acquired at its begin, extended meanwhile, then released.

        A block inside a block of the same resource and thread (or greenlet, or asyncio task)
        shares the lock; only the outermost frees it. Of several resources it shares those that are
        held, and acquires the rest: then it waits while it holds, for as long as `wait` says.

        Args:
            resource: What must be exclusive; or several such, of which it gets all or none.
            ttl: Seconds; the instance's if None.
            wait: How long to go on trying, in seconds.
            max_lifetime: Seconds after which it is no longer extended; None for never.
            on_lost: Called, in another thread, if the lease is lost.
            owner: Who asks, for others to read.
            fencing: Whether the lease gets a fencing token; the instance's if None.
            limit: How many may hold it at a time.

        Raises:
            NotAcquired: On entering the block.
            ConfigurationError: A name cannot be one, or fencing or a limit is asked for several. On
                entering a block inside one that has no fencing token to share, or a larger limit.
        """
        check_option("wait", wait)
        check_option("max_lifetime", max_lifetime)
        if on_lost is not None and not callable(on_lost):
            raise ConfigurationError(
                f"on_lost must be a callable that takes the lease, or None; it is {on_lost!r}"
            )
        names = checked_names(resource)
        fenced = self.client.fenced(fencing, names, limit)
        return HeldLease(
            *(self, names, ttl, wait, max_lifetime, on_lost, owner), fencing=fenced, limit=limit
        )

    @classmethod
    def from_app(cls, app: Any) -> Redlock:
        """The lock of a Celery app, as its `redlock_...` settings describe; one per app.

        Raises:
            ConfigurationError: A setting cannot work, or no node is named and the broker is no
                Redis.
        """
        with _of_app_lock:
            known = of_app.get(app)
            if known is None:
                settings = read_settings(app)
                made = cls(
                    settings.nodes,
                    ttl=settings.ttl,
                    prefix=settings.prefix,
                    node_timeout=settings.node_timeout,
                    fencing=settings.fencing,
                    keeper=settings.keeper,
                    restart_guard=settings.restart_guard,
                )
                # A handler that has interrupted this thread may have been faster.
                known = of_app.setdefault(app, made)
            return known


_of_app_lock = threading.RLock()
of_app: weakref.WeakKeyDictionary[Any, Redlock] = weakref.WeakKeyDictionary()


def _after_fork() -> None:
    global _of_app_lock
    _of_app_lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
