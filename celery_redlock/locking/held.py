"""The lock object of a holder while its work runs: a lease that is kept alive, and its end.

A `Lease` is a value and grows old; a `HeldLease` always shows the newest one. A block inside a
block of the same resource shares its lock, and so does a task that is called there. It finds the
outer lock through a context variable: per thread, greenlet or asyncio task. A context can be copied
into another of these: asyncio copies it into each task it starts, and Python without a GIL into
each thread. Code that runs with such a copy can ask the lease that it finds there, but does not
share the lock, because the lock must keep it out.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ..events import emit
from ..protocol.claim import Claim
from ..protocol.errors import ConfigurationError, LeaseLost, RedlockError
from ..protocol.lease import Lease
from ..protocol.outcome import last_votes
from ..protocol.texts import event, printable, shown
from ..protocol.values import Owner
from ..runtime.blocking import blocking
from ..runtime.clock import monotonic
from . import stack
from .block import Block, user
from .request import LockRequest

if TYPE_CHECKING:
    from .redlock import Redlock

__all__ = ["HeldLease", "current_lease"]

logger = logging.getLogger("celery_redlock")

MAX_KEEP_S = 1e15
"""Maximum of `keep()`, in seconds: nodes count milliseconds in 64 bits."""


def current_lease() -> HeldLease:
    """Return the lease of the innermost lock that this thread's (or greenlet's) work runs under.

    Raises:
        RedlockError: There is none, because the caller is in no locked task or block.
    """
    for held in stack.leases():
        if held._pid == os.getpid() and not held._left_over:
            return held
    raise RedlockError(
        "there is no current lease: current_lease() works inside a task with a lock, or inside a"
        " `with redlock.lock(...)` block"
    )


class HeldLease(Block):
    """A lock that is held, and extended until it is released. Also a context manager.

    Attributes:
        resource: The locked resource; several names are joined into one text.
        resources: The names of the locked resources, each by itself.
        on_lost: Called, in another thread, if the lease is lost.
        request: The request that it is acquired with.
        max_lifetime: Seconds after which it is no longer extended; None for never.
        task: The name of the task it is held for; empty outside tasks.
        mark: The key that its release leaves on the nodes if its work succeeds, and the ttl of that
            key in seconds.
        stalled: True if its work has reported no progress for the `progress_timeout`.
    """

    __module__ = "celery_redlock"
    stalled = False
    _on_progress: Callable[[], None] | None = None

    def __init__(
        self,
        redlock: Redlock,
        request: LockRequest,
        *,
        max_lifetime: float | None = None,
        on_lost: Callable[[HeldLease], object] | None = None,
    ) -> None:
        self.redlock = redlock
        self.request = request
        self.resources = request.names
        self.resource = shown(self.resources)
        self.max_lifetime = max_lifetime
        self.on_lost = on_lost
        self._pid = os.getpid()
        self.claim: Claim | None = None
        self._held_for: float | None = None
        self._loss_reported = False
        self.task = ""
        self.mark: tuple[str, float] | None = None
        # Inside blocks that hold some of the resources: the names to acquire, and those blocks.
        self._own = self.resources
        self._outers: tuple[HeldLease, ...] = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {printable(self.resource)}, {self.remaining():.3f} s left>"

    def __enter__(self) -> HeldLease:
        return blocking(self._enter())

    async def _enter(self) -> HeldLease:
        self.unused = False
        outers, rest = self._enclosing()
        for outer in outers:
            outer.ensure()  # without it the inner work would run under a lease that is over
            self.request.check_inside(outer.request, outer.fencing_token)
        if len(outers) == 1 and not rest:
            self._nested += 1
            return outers[0]
        self._take()
        self._outers, self._own = outers, rest
        self._begin_block()
        if rest:
            await self._acquire()
        else:
            self.claim = None
            stack.push(self)
        return self

    async def __aenter__(self) -> object:
        self.unused = False
        why = "a lock of Redlock blocks: use `with`, or AsyncRedlock"
        raise RedlockError(f"{self.resource}: {why}")

    async def __aexit__(self, *_error: object) -> None: ...

    def acquire(self, wait: float | None = None) -> bool:
        """Acquire the lock, and extend it from now on; return True, or raise.

        Args:
            wait: How long to go on trying, in seconds; None for the time given to `lock()`.

        Raises:
            NotAcquired: It is held by another, or there is no quorum.
            RedlockError: This object is in use already.
        """
        self._take()
        blocking(self._acquire(wait))
        return True

    async def _acquire(self, wait: float | None = None) -> None:
        self.unused = False
        # From here on release() undoes all that was written, wherever an exception strikes.
        request, client = self.request, self.redlock.client
        if self._own is not self.resources:
            request = request.part(self._own)
        if wait is not None and wait != request.wait:
            request = replace(request, wait=wait)
        try:
            claim = await client.acquire(request, self._adopt)
            stack.push(self)
            client.watchdog.watch(claim, self._lost, self.max_lifetime, self._exit)
            client.registry.granted(claim, self.max_lifetime)
        except BaseException:
            await self._release()
            raise

    def release(self, *, wait: bool = True) -> bool:
        """Release the lock; return True if it was held until now. Safe to call again.

        Args:
            wait: True to wait for the nodes' answers; see `LockClient.release`.
        """
        return blocking(self._release(wait))

    async def _release(self, wait: bool = True) -> bool:
        self.unused = False
        try:
            return await self._give_back(wait)
        except BaseException:
            await self._give_back(wait)  # a time limit interrupted it; that happens only once
            raise

    async def _give_back(self, wait: bool) -> bool:
        claim, client, held = self.claim, self.redlock.client, False
        if claim is not None and self._pid == os.getpid() and client.unreleased(claim):
            held = await client.release(claim, wait=wait)
        elif claim is not None and claim.token not in client.unread:
            client.registry.unregister(claim)
        self._leave()
        return held

    def keep(self, seconds: float, *, timeout: float | None = None) -> bool:
        """Stop holding the lock, but leave it locked for a time: nobody repeats its work at once.

        Args:
            seconds: How long it stays locked, from now.
            timeout: How long to wait for the nodes, in seconds; the node timeout if None.

        Returns:
            True if it was held until now and a quorum of nodes has confirmed.

        Raises:
            ConfigurationError: No node can keep a key for this time; nothing has changed.
        """
        return blocking(self._keep(seconds, timeout))

    async def _keep(self, seconds: float, timeout: float | None = None) -> bool:
        if type(seconds) not in (int, float) or not abs(seconds) <= MAX_KEEP_S:
            raise ConfigurationError(
                f"{self.resource}: a lock is kept for a number of seconds up to {MAX_KEEP_S:g},"
                f" not {seconds!r:.50}"
            )
        claim = self._known_claim()
        kept = False
        if not claim.ended and self._pid == os.getpid():
            kept = await self.redlock.client.hold_for(claim, seconds, timeout)
        self._leave()
        return kept

    def _leave(self) -> None:
        """Take it off the stack of the locks that this thread's work runs under."""
        self._outers, self._own = (), self.resources
        stack.drop(self)
        self._exit = None
        vars(self).pop("_taken_by", None)

    @property
    def token(self) -> str:
        """The random proof of its holder; not a fencing token."""
        return self._known_claim().token

    @property
    def fencing_token(self) -> int | None:
        """Fencing token, larger than any earlier holder's; None without `fencing=True`."""
        return self._known_claim().fencing_token

    @property
    def lease(self) -> Lease:
        """The lease as it is now: a value, which no extension changes."""
        lease = self._known_claim().lease(monotonic)
        if not self._outers:
            return lease
        deadline = min(lease.deadline, *(outer.lease.deadline for outer in self._outers))
        return replace(lease, resource=self.resource, resources=self.resources, deadline=deadline)

    @property
    def lost(self) -> bool:
        """True if the lock is no longer ours. Once True it stays True."""
        return self.remaining() <= 0.0

    def remaining(self) -> float:
        """Return the seconds that are certainly left, even if no further extension succeeds."""
        shared = min([outer.remaining() for outer in self._outers], default=math.inf)
        claim, now = self.claim, monotonic()
        if claim is None and self._outers:
            return shared
        if claim is None or not claim.held(now) or self._pid != os.getpid():
            return 0.0  # a fork's child holds nothing of its parent's
        return min(shared, claim.deadline - now)

    def ensure(self, seconds: float = 0.0) -> None:
        """Raise if the lock is not ours for more than `seconds` from now. Call it before a write.

        Raises:
            LeaseLost: The lease is over, or ends too soon.
        """
        left = self.remaining()
        if left <= seconds:
            self._loss_reported = left <= 0.0
            raise self.loss()

    def progress(self) -> None:
        """Report that the work makes progress, to this lock and all locks that it runs under."""
        for held in {self, *stack.leases()}:
            report = held._on_progress
            if report is not None:
                report()

    def lost_unnoticed(self) -> bool:
        """Return True if it ended before its release, and `ensure()` has not reported that."""
        claim = self.claim
        over = any(outer.lost_unnoticed() for outer in self._outers)
        if claim is not None and claim.granted_at is not None:
            # `held` looks at the clock, which may be the first look since the deadline.
            over = over or not (claim.held(monotonic()) or (claim.ended and claim.lost is None))
        return over and not self._loss_reported and self._pid == os.getpid()

    def loss(self) -> LeaseLost:
        """Return the error that reports how the lease ended."""
        for outer in self._outers:
            if outer.lost:
                return outer.loss()
        reason = self._known_claim().lost or "expired"
        said = f"the lease is over ({reason}); another may hold it now, stop writing"
        error = self._error(said, reason)
        if self._held_for is None:
            self._held_for = error.held_for
        error.held_for = self._held_for
        return error

    def _error(self, said: str, reason: str) -> LeaseLost:
        """Return the error that makes the work under it stop, with the reason."""
        claim = self._known_claim()
        return LeaseLost(
            f"{self.resource}: {said}",
            resource=self.resource,
            lease=self.lease,
            reason=reason,
            owner=Owner.of(claim.token),
            task=self.task,
            held_for=monotonic() - (claim.granted_at or 0.0),
            votes=last_votes(claim, self.redlock.nodes),
        )

    def _block_over(self, leave: object) -> None:
        if leave is self._exit:
            if self.claim is not None and self.claim.token:
                self.redlock.client.release_soon(self.claim)
            stack.drop(self)

    def _enclosing(self) -> tuple[tuple[HeldLease, ...], tuple[str, ...]]:
        """Return the outer blocks that hold some of its resources, and the names left over."""
        outers: list[HeldLease] = []
        rest = self.resources
        for held in [one for one in stack.leases(rest) if one._ours()]:
            left = tuple(name for name in rest if name not in held.resources)
            if held.redlock is self.redlock and len(left) < len(rest):
                outers.append(held)
                rest = left
        return tuple(outers), rest

    def _ours(self) -> bool:
        """Return True if this very thread, greenlet or asyncio task has it."""
        return self._pid == os.getpid() and self._taken_by == user() and not self._left_over

    def _adopt(self, claim: Claim) -> None:
        self.claim = claim
        self.redlock.client.registry.register(claim)

    def _known_claim(self) -> Claim:
        if self.claim is None and self._outers:
            return self._outers[0]._known_claim()
        if self.claim is None:
            raise RedlockError(f"{self.resource} was never acquired", resource=self.resource)
        return self.claim

    def _lost(self, claim: Claim) -> None:
        """Report that the lease is lost: from now on the work may overlap with another's."""
        self.redlock.client.registry.unregister(claim)
        loss = self.loss()
        self._log_lost(loss)
        emit("lost", loss)
        if self.on_lost is not None:
            self._start_on_lost()

    def _start_on_lost(self) -> None:
        # In a separate thread: a slow callback must not starve the leases of others.
        name = f"celery_redlock lost {self.resource}"
        threading.Thread(target=self._call_on_lost, name=name, daemon=True).start()

    def _log_lost(self, loss: LeaseLost) -> None:
        logger.error(
            "lost the lock %s held by %s, after %.1f s: %s (%s); its work may overlap with"
            " another's",
            printable(self.resource),
            loss.owner,
            loss.held_for,
            loss.reason,
            ", ".join(map(str, loss.votes)),
            extra=event("lease_lost", self.resource),
        )

    def _call_on_lost(self) -> None:
        try:
            if self.on_lost is not None:
                self.on_lost(self)
        except BaseException:
            # User code has raised, and this thread has nothing else to do: log even a SystemExit.
            logger.exception(
                "%s: its on_lost raised an error",
                printable(self.resource),
                extra=event("on_lost_failed", self.resource),
            )
