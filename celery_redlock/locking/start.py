"""The start of a body under a rate limit: only its start counts, and it runs without a lock."""

from __future__ import annotations

from dataclasses import replace

from ..protocol import quorum
from ..protocol.claim import Claim
from ..protocol.names import START_SUFFIX
from ..protocol.rate import Rate
from ..protocol.values import Owner
from . import stack
from .held import HeldLease
from .redlock import Redlock
from .request import LockRequest
from .unlocked import Unlocked

__all__ = ["Start"]


class Start(Unlocked):
    """A start of a body, of which a window allows a number: see `rate.py`.

    Acquiring it is the start. The nodes remember that for the rate's window: nobody extends it or
    releases it, and no supervisor frees it if the body's process dies. The body finds it as its
    lease, which never ends: there is nothing that could be lost.

    Args:
        redlock: The lock whose nodes remember it.
        name: The key that has the rate.
        rate: The rate.
        wait: How long to go on trying; seconds.
        owner: A description of the delivery that starts.
    """

    def __init__(
        self, redlock: Redlock, name: str, rate: Rate, *, wait: float, owner: Owner | None
    ) -> None:
        # Not the name itself: the body may take a lock of that name.
        super().__init__(name + START_SUFFIX, redlock)
        self.request = LockRequest(
            names=self.resources, ttl=rate.ttl, wait=wait, owner=owner, limit=rate.starts, rate=rate
        )
        self.resource = name
        self._taken: Claim | None = None

    __enter__ = HeldLease.__enter__

    async def _acquire(self, wait: float | None = None) -> None:
        client, request = self.redlock.client, self.request
        if wait is not None:
            request = replace(request, wait=wait)
        try:
            await client.acquire(request, self._adopt)
            stack.push(self)
        except BaseException:
            # A time limit has struck, and no body starts.
            taken = self._taken
            self._leave()
            if taken is not None and not taken.ended:
                await client.ask(lambda now: quorum.release(taken, now, 0.0))
            raise
        finally:
            if self._taken is not None:
                self._taken.ended = True
                client.forget(self._taken)

    def _adopt(self, claim: Claim) -> None:
        self._taken = claim

    async def _release(self, wait: bool = True) -> bool:
        if self.claim is not None:
            await self.redlock.client.leave_mark(self.claim)
            self.claim.mark = None
        return await super()._release(wait)
