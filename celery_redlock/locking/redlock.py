"""`Redlock`: the lock that users hold. Its inside is in `client.py`."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..config.checks import guarded
from ..config.options import GLOBAL, check_option
from ..config.settings import read_settings
from ..keepalive.registry import LeaseRegistry
from ..protocol.errors import ConfigurationError, ResourceHeld
from ..protocol.lease import Lease
from ..protocol.names import Resources
from ..protocol.restart_guard import RestartGuard
from ..protocol.texts import event
from ..protocol.values import Holder, Owner
from ..runtime.blocking import blocking
from ..stores.driver import Driver
from ..stores.kinds import NodeSpec, named, parse_nodes, refuse_ttl
from . import leases
from .client import LockClient
from .held import HeldLease
from .request import request_of

__all__ = ["Redlock"]

logger = logging.getLogger("celery_redlock.lock")
node_logger = logging.getLogger("celery_redlock.node")


class Redlock:
    """A lock over N independent Redis masters, or one PostgreSQL, etcd or ZooKeeper.

    It connects at the first use. Threads may share an instance, and it may be made before a fork::

        redlock = Redlock(["redis://a", "redis://b", "redis://c"])
        with redlock.lock("order:7", wait=5.0):
            ...

    Args:
        nodes: URLs (redis, rediss, unix, postgresql, etcd, zookeeper), `redis.Redis` clients or
            mappings of connection arguments; or URLs in one string, with commas between them. A
            lock on one Redis is lost with that server.
        ttl: The time for which the nodes keep a lock that nobody extends; seconds.
        prefix: The prefix of the keys on the nodes.
        node_timeout: The longest wait for an answer; seconds. Never more than ttl / 10.
        fencing: True if leases get a fencing token, unless a call says otherwise.
        keeper: The extender of this process's locks: a "thread" of this process; or, in addition, a
            small "process", which goes on while a C call keeps the GIL, and releases the locks at
            once if this process dies.
        restart_guard: "uptime": a node has no vote until it has been up for the longest ttl in use,
            because it may have forgotten locks. "off": every node votes. "auto": "uptime" with
            three or more nodes, or where a standby takes over, otherwise "off". In etcd and
            ZooKeeper a restart forgets no lock: there "uptime" does not wait after one.

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
                    "the certificate of node %s is not checked (%s): any server that answers in its"
                    " place receives the password, and votes",
                    address.name,
                    address.unverified,
                    extra=event("node_unverified"),
                )
        node_timeout = max(check_option("node_timeout", node_timeout), addresses[0].least_timeout)
        sidecar = None
        if check_option("keeper", keeper) == "process":
            sidecar = {"nodes": nodes, "prefix": prefix, "node_timeout": node_timeout}
            kind = named(addresses[0].store)
            if not kind.can.ttl_per_key:
                node_logger.warning(
                    "the keeper 'process' extends no lock in %s, because only the process that took"
                    " a lock can: a body that keeps the GIL for longer than the ttl loses it. It"
                    " only releases the locks of a killed process",
                    kind.name,
                    extra=event("keeper_extends_nothing"),
                )
        is_guarded = guarded(
            check_option("restart_guard", restart_guard),
            len(addresses),
            any(address.moves for address in addresses),
        )
        ttl = check_option("ttl", ttl)
        if ttl != GLOBAL["ttl"].default:  # that is shortened to what the store allows
            refuse_ttl(addresses[0], "ttl", ttl)
        self.client = LockClient(
            addresses,
            ttl=ttl,
            prefix=check_option("prefix", prefix),
            node_timeout=node_timeout,
            fencing=check_option("fencing", fencing),
            guard=RestartGuard(
                is_guarded, ttl, partial(node_logger.warning, extra=event("node_doubted"))
            ),
            registry=LeaseRegistry(len(addresses), sidecar),
        )

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' addresses, without credentials."""
        return self.client.nodes

    @property
    def ttl(self) -> float:
        """The time for which the nodes keep a lock that nobody extends; seconds."""
        return self.client.ttl

    @property
    def prefix(self) -> str:
        """The prefix of the keys on the nodes."""
        return self.client.prefix

    @property
    def node_timeout(self) -> float:
        """The longest wait for an answer; seconds."""
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
        """Check once, on separate connections, that each node can serve as an independent master.

        A node that is away is not an error: it is silent until it is back. After a check that
        succeeded, a node that turns out to be unsuitable is not an error either: it is silent, and
        the log has the reason.

        Args:
            ttl: The longest ttl in use, in seconds, if that is more than the instance's.
            timeout: The longest wait for the nodes; seconds.

        Returns:
            Warnings. They are not logged.

        Raises:
            ConfigurationError: No quorum is left, because nodes are replicas, members of a Redis
                Cluster, or one server under two names. If a quorum is left, each such node is a
                warning.
        """
        if ttl is not None:
            self.client.guard.expect(ttl)
        warnings: list[str] = []
        client = self.client
        for said in dict.fromkeys(address.exposed for address in client.addresses):
            names = [address.name for address in client.addresses if address.exposed == said]
            if said is not None:
                warnings.append(f"node {', '.join(names)}: {said[0]}; {said[1]}")
        driver = Driver(client.addresses, client.prefix, client.guard.warning_to(warnings.append))
        try:
            driver.connect(timeout, rest=timeout)
            client.answering = sum(node.channel.up for node in driver.nodes)
            warnings += [
                f"node {node.name} is not usable and has no vote: {node.misfit}"
                for node in driver.nodes
                if node.misfit
            ]
            warnings += [
                f"node {node.name}: {node.facts.remark}"
                for node in driver.nodes
                if node.facts is not None and node.facts.remark
            ]
        finally:
            driver.close(wait=timeout)  # the caller may be about to fork
        self.client.checked, self.client.driver.strict = True, False
        return warnings

    def close(self) -> None:
        """Close all connections. Locks that are still held expire by their ttl."""
        self.client.close()
        self.client.registry.close()

    def try_acquire(
        self,
        resource: Resources,
        *,
        ttl: float | None = None,
        owner: Owner | None = None,
        fencing: bool | None = None,
        limit: int | Sequence[int] = 1,
        shared: bool = False,
    ) -> Lease | None:
        """Try once to acquire a lease; return None if another holds the resource.

        Raises:
            QuorumUnavailable: Too few nodes answered.
        """
        try:
            return self.acquire(
                resource, ttl=ttl, owner=owner, fencing=fencing, limit=limit, shared=shared
            )
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
        limit: int | Sequence[int] = 1,
        shared: bool = False,
    ) -> Lease:
        """Acquire a lease, which nothing extends; `lock()` makes one that is extended.

        Args:
            resource: The name to lock; or several names, of which it gets all or none.
            ttl: Seconds; None for the instance's ttl.
            wait: How long to go on trying, in seconds; 0 tries once.
            owner: A description of the caller, for others to read; None for this host and process.
            fencing: True if the lease gets a fencing token; None for the instance's default.
            limit: How many may hold it at a time; for several names a list with one for each.
            shared: True if others that ask for it with `shared` may hold it at the same time.

        Raises:
            ResourceHeld: Another holds it.
            QuorumUnavailable: Too few nodes answered.
        """
        request = request_of(
            self.client,
            resource,
            ttl=ttl,
            wait=wait,
            owner=owner,
            fencing=fencing,
            limit=limit,
            shared=shared,
        )
        return blocking(leases.acquire(self.client, request))

    def extend(self, lease: Lease) -> Lease:
        """Renew a lease for its ttl from now.

        Raises:
            LeaseLost: The lease is over: its deadline has passed, or a quorum no longer holds the
                token; or it is not a lease of this instance and process.
            QuorumUnavailable: Too few nodes confirmed in time. The lease that you have is valid
                until its own deadline.
        """
        return blocking(leases.extend(self.client, lease))

    def release(self, lease: Lease) -> bool:
        """Release a lease; return True if it was held until now. Does not raise if nodes fail."""
        return blocking(leases.release(self.client, lease))

    def holder(self, resource: str, *, timeout: float | None = None) -> Holder | None:
        """Ask the nodes who holds a resource; return None if it is free.

        Args:
            resource: Its name.
            timeout: How long to wait for the nodes, in seconds; None for the node timeout.

        Raises:
            QuorumUnavailable: Too few nodes answered.
        """
        found = self.holders(resource, limit=1, timeout=timeout)
        return found[0] if found else None

    def holders(self, resource: str, *, limit: int, timeout: float | None = None) -> list[Holder]:
        """Ask the nodes who holds a resource that has a limit; one holder for each slot in use.

        Args:
            resource: Its name.
            limit: How many may hold it at a time.
            timeout: How long to wait for the nodes, in seconds; None for the node timeout.

        Raises:
            QuorumUnavailable: Too few nodes answered.
        """
        return blocking(leases.holders(self.client, resource, limit, timeout))

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
        limit: int | Sequence[int] = 1,
        shared: bool = False,
    ) -> HeldLease:
        """Make a lock for a `with` block: acquired at the start, extended, released at the end.

        A block inside another block with the same resource, in the same thread (greenlet, asyncio
        task), shares the lock, and only the outermost block releases it. If some of several
        resources are held already, the inner block acquires the others. It then waits while it
        holds locks, for up to `wait`.

        Args:
            resource, ttl, wait, owner, fencing, limit, shared: As of `acquire()`.
            max_lifetime: Seconds after which it is no longer extended; None for never.
            on_lost: Called, in another thread, if the lease is lost.

        Raises:
            NotAcquired: On entering the block.
            ConfigurationError: A name is not allowed, or fencing is asked for with several names.
                On entering a block inside another block: that has no fencing token to share, or a
                larger limit.
        """
        check_option("max_lifetime", max_lifetime)
        if on_lost is not None and not callable(on_lost):
            raise ConfigurationError(
                f"on_lost must be a callable that takes the lease, or None; it is {on_lost!r}"
            )
        request = request_of(
            self.client,
            resource,
            ttl=ttl,
            wait=wait,
            owner=owner,
            fencing=fencing,
            limit=limit,
            shared=shared,
        )
        held = HeldLease(self, request, max_lifetime=max_lifetime, on_lost=on_lost)
        held.unused = True
        return held

    @classmethod
    def from_app(cls, app: Any) -> Redlock:
        """Return the lock of a Celery app, made from its `redlock_...` settings; one per app.

        Raises:
            ConfigurationError: A setting cannot work; or `redlock_nodes` is not set and the broker
                is not a Redis.
        """
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
            # Another thread may have been faster; the unused instance has not connected.
            known = of_app.setdefault(app, made)
        return known


of_app: weakref.WeakKeyDictionary[Any, Redlock] = weakref.WeakKeyDictionary()
"""Instances that `Redlock.from_app` has made."""
