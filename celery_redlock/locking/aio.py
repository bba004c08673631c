"""`AsyncRedlock`: the same lock for asyncio.

The code that asks nodes and waits is written once for both (`acquisition.py`, `client.py`,
`held.py`, `leases.py`). The client of an event loop has another poll and another timer
(`loop_polling.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, cast

from ..protocol import quorum
from ..protocol.claim import Claim
from ..protocol.errors import ConfigurationError, RedlockError, ResourceHeld
from ..protocol.lease import Lease
from ..protocol.names import Resources
from ..protocol.quorum import Released
from ..protocol.round import Round, Steps
from ..protocol.values import Holder, Owner
from ..runtime.loop_polling import LoopPoll, LoopTimer
from ..stores.driver import BATCH
from ..stores.kinds import NodeSpec
from . import leases
from .block import Exit
from .client import LockClient, instances
from .held import HeldLease
from .redlock import Redlock
from .request import LockRequest, request_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AsyncHeldLease", "AsyncRedlock"]

logger = logging.getLogger("celery_redlock.lock")


class Asked(TypedDict, total=False):
    """The options of `try_acquire()`, as of `Redlock.acquire`; times in seconds."""

    ttl: float | None
    owner: Owner | None
    fencing: bool | None
    limit: int | Sequence[int]
    shared: bool


class Patient(Asked, total=False):
    """The options of `acquire()`: it can also wait."""

    wait: float


class Options(TypedDict, total=False):
    """The options of a lock besides its nodes, as of `Redlock`."""

    ttl: float
    prefix: str
    node_timeout: float
    fencing: bool
    keeper: str
    restart_guard: str


class AsyncHeldLease(HeldLease):
    """A lock that is held, and extended until it is released: for an `async with` block.

    `on_lost` is called in the event loop.
    """

    __module__ = "celery_redlock"

    def __init__(
        self,
        of: AsyncRedlock,
        request: LockRequest,
        *,
        max_lifetime: float | None = None,
        on_lost: Callable[[HeldLease], object] | None = None,
    ) -> None:
        super().__init__(cast("Redlock", of), request, max_lifetime=max_lifetime, on_lost=on_lost)
        self._of = of

    def __enter__(self) -> HeldLease:
        self.unused = False
        raise RedlockError(f"{self.resource}: a lock of AsyncRedlock needs `async with`")

    async def __aenter__(self) -> AsyncHeldLease:
        self._bind()
        return cast("AsyncHeldLease", await self._enter())

    def _leave_async_block(self, *_error: object) -> Coroutine[Any, Any, None]:
        leaving = self._leaving()
        if self._exit is not None and not self._nested:
            # The `async with` has called its exit, and waits for this coroutine from now on.
            self._exit = weakref.ref(leaving, self._block_over)
        return leaving

    async def _leaving(self) -> None:
        if not self._leave_nested():
            await self._release()

    if TYPE_CHECKING:

        async def __aexit__(self, *_error: object) -> None: ...

    else:
        __aexit__ = Exit(_leave_async_block)

    async def acquire(self, wait: float | None = None) -> bool:  # type: ignore[override]
        """Acquire the lock, and extend it from now on; see `HeldLease.acquire`."""
        self._bind()
        self._take()
        await self._acquire(wait)
        return True

    async def release(self, *, wait: bool = True) -> bool:  # type: ignore[override]
        """Release the lock; return True if it was held until now. Safe to call again."""
        self._bind()
        return await self._release(wait)

    async def keep(  # type: ignore[override]
        self, seconds: float, *, timeout: float | None = None
    ) -> bool:
        """Stop holding the lock, but leave it locked for a time; see `HeldLease.keep`."""
        return await self._keep(seconds, timeout)

    def _bind(self) -> None:
        """Use the client of the running event loop from now on, unless the lock is held."""
        if self.claim is None or self.claim.ended:
            self._client = self._of.client
            self.redlock = cast("Redlock", self._client)

    def _start_on_lost(self) -> None:
        self._client.loop.call_soon_threadsafe(self._call_on_lost)


class LoopClient(LockClient):
    """The claims of one event loop.

    Args:
        of: The client whose nodes and settings it uses.
        loop: The loop.
    """

    def __init__(self, of: LockClient, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        super().__init__(
            of.addresses,
            ttl=of.ttl,
            prefix=of.prefix,
            node_timeout=of.node_timeout,
            fencing=of.fencing,
            guard=of.guard,  # shared, so that the next loop knows the servers that this one met
            registry=of.registry,
            poll=partial(LoopPoll, loop),
            timer=partial(LoopTimer, loop),
        )
        instances.discard(self)  # a fork's child has no use for it: its loops are others
        # `asyncio.run` ends the asynchronous generators of a loop when all its tasks have ended.
        self._end = self._until_the_end()
        with contextlib.suppress(StopIteration):
            self._end.__anext__().send(None)

    async def _until_the_end(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self.close()

    @property
    def client(self) -> LoopClient:
        """This client itself: leases use it in place of a `Redlock`."""
        return self

    def _release(self, claim: Claim, now: float) -> Steps[Released]:
        # A cancelled asyncio task abandons a claim that was never granted, and must not wait.
        given_up = claim.granted_at is None
        return quorum.release(claim, now, 0.0 if given_up else self.node_timeout)

    def _extend(self, claims: Sequence[Claim], done: Callable[[Sequence[Claim]], None]) -> None:
        patience, ballots = self.patience_of(claims), list[Round]()
        batches = [claims[i : i + BATCH] for i in range(0, len(claims), BATCH)]

        def answered(ballot: Round) -> None:
            ballots.append(ballot)
            if len(ballots) == len(batches):
                done(self.extended(claims, ballots))

        for batch in batches:
            self.driver.start(partial(quorum.extend, batch, patience=patience), answered)
        self.watchdog.read_soon(patience)


class AsyncRedlock:
    """A lock over N independent masters, held by a quorum of them, for coroutines.

    The counterpart of `Redlock`, which is for threads: both use the same keys, so they exclude each
    other. It connects at the first use. Several event loops may share an instance; each has its own
    connections::

        redlock = AsyncRedlock(["redis://a", "redis://b", "redis://c"])

        async def load():
            async with redlock.lock("order:7", wait=5.0):
                ...

    Args:
        nodes, options: As of `Redlock`.

    Raises:
        ConfigurationError: A node or an option cannot work.
    """

    __module__ = "celery_redlock"

    def __init__(self, nodes: Sequence[NodeSpec], **options: Unpack[Options]) -> None:
        self._begin(Redlock(nodes, **options))

    @classmethod
    def from_app(cls, app: Any) -> AsyncRedlock:
        """Return a lock over the nodes of a Celery app, with its `redlock_...` settings.

        Raises:
            ConfigurationError: As of `Redlock.from_app`.
        """
        made = cls.__new__(cls)
        made._begin(Redlock.from_app(app))
        return made

    def _begin(self, threads: Redlock) -> None:
        self._threads = threads  # checks the settings; connects only to check the nodes
        self._clients: dict[asyncio.AbstractEventLoop, LoopClient] = {}
        self.nodes, self.ttl = threads.nodes, threads.ttl
        self.prefix, self.node_timeout = threads.prefix, threads.node_timeout

    def __repr__(self) -> str:
        return repr(self._threads).replace("<Redlock", "<AsyncRedlock")

    @property
    def client(self) -> LoopClient:
        """The claims of the running event loop.

        Raises:
            RedlockError: No event loop is running.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RedlockError(
                "AsyncRedlock needs a running event loop: call it from a coroutine, or use Redlock"
            ) from None
        known, of = self._clients.get(loop), self._threads.client
        if known is None or known.addresses is not of.addresses:
            self._forget(loop)
            known = self._clients[loop] = LoopClient(of, loop)
        return known

    def _forget(self, loop: asyncio.AbstractEventLoop) -> None:
        for other in list(self._clients):
            if other is loop or other.is_closed():
                client = self._clients.pop(other, None)  # None: another thread has forgotten it
                if client is not None and client.owner.pid == os.getpid():
                    client.close()

    async def connect(self, timeout: float = 1.5) -> None:
        """Connect now rather than at the first use; see `Redlock.connect`."""
        await asyncio.to_thread(self.client.driver.connect, timeout)

    async def check(self, ttl: float | None = None, timeout: float = 1.5) -> list[str]:
        """Check once that each node can serve as an independent master; see `Redlock.check`."""
        return await asyncio.to_thread(self._threads.check, ttl, timeout)

    async def close(self) -> None:
        """Close all connections of this loop. Locks that are still held expire by their ttl.

        The end of `asyncio.run` does the same.
        """
        self._forget(asyncio.get_running_loop())

    async def __aenter__(self) -> AsyncRedlock:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def try_acquire(self, resource: Resources, **asked: Unpack[Asked]) -> Lease | None:
        """Try once to acquire a lease; return None if another holds the resource."""
        try:
            return await self.acquire(resource, **asked)
        except ResourceHeld:
            return None

    async def acquire(self, resource: Resources, **asked: Unpack[Patient]) -> Lease:
        """Acquire a lease. Nothing extends it; see `Redlock.acquire`."""
        client = self.client
        return await leases.acquire(client, request_of(client, resource, **asked))

    async def extend(self, lease: Lease) -> Lease:
        """Renew a lease for its ttl from now; see `Redlock.extend`."""
        return await leases.extend(self.client, lease)

    async def release(self, lease: Lease) -> bool:
        """Release a lease; return True if it was held until now. It never raises for a node."""
        return await leases.release(self.client, lease)

    async def holder(self, resource: str, *, timeout: float | None = None) -> Holder | None:
        """Ask the nodes who holds a resource; return None if it is free."""
        found = await self.holders(resource, limit=1, timeout=timeout)
        return found[0] if found else None

    async def holders(
        self, resource: str, *, limit: int, timeout: float | None = None
    ) -> list[Holder]:
        """Ask the nodes who holds a resource that has a limit; see `Redlock.holders`."""
        return await leases.holders(self.client, resource, limit, timeout)

    def lock(
        self,
        resource: Resources,
        *,
        max_lifetime: float | None = None,
        on_lost: Callable[[HeldLease], object] | None = None,
        **asked: Unpack[Patient],
    ) -> AsyncHeldLease:
        """Make a lock for an `async with` block: acquired at the start, extended, released.

        Nested blocks of one asyncio task share the lock; see `Redlock.lock`.

        Args:
            resource, max_lifetime, asked: As of `Redlock.lock`.
            on_lost: Called in the event loop if the lease is lost; a plain function.
        """
        held = self._threads.lock(resource, max_lifetime=max_lifetime, on_lost=on_lost, **asked)
        held.unused = False
        if inspect.iscoroutinefunction(on_lost):
            raise ConfigurationError(
                "on_lost is called and not awaited: it must be a plain function, not the coroutine"
                f" function {on_lost!r}; to cancel a task give `lambda lease: task.cancel()`"
            )
        made = AsyncHeldLease(self, held.request, max_lifetime=max_lifetime, on_lost=on_lost)
        made.unused = True
        return made
