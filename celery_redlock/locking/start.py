"""A body that starts by its rate: what counts is its start, and it runs under no lock."""

from __future__ import annotations

import os
from dataclasses import replace

from ..protocol import quorum
from ..protocol.claim import Claim
from ..protocol.names import START_SUFFIX
from ..protocol.rate import Rate
from ..protocol.values import Owner
from ..runtime.blocking import blocking
from . import stack
from .held import HeldLease, _user
from .redlock import Redlock
from .request import LockRequest
from .unlocked import Unlocked

__all__ = ["Start"]


class Start(Unlocked):
    """A start of a body, of which so many may be in a window: see `rate.py`.

    To acquire it is to start. The nodes remember that for the rate's window: nobody extends it, it
    is not given back, and no supervisor frees it if the body's process dies. As the lease that the
    body finds, it never ends: there is nothing that could be lost.

    Args:
        redlock: Which nodes remember it.
        name: What has the rate.
        rate: How many may start.
        wait: How long to go on trying; seconds.
        owner: Who starts.
    """

    def __init__(
        self, redlock: Redlock, name: str, rate: Rate, *, wait: float, owner: Owner | None
    ) -> None:
        # Not the name itself: a lock of that, inside the body, is a lock.
        super().__init__(name + START_SUFFIX, redlock)
        self.request = LockRequest(
            names=self.resources, ttl=rate.ttl, wait=wait, owner=owner, limit=rate.starts, rate=rate
        )
        self.resource = name
        self._taken: Claim | None = None

    __enter__ = HeldLease.__enter__

    async def _acquire(self, wait: float | None = None) -> None:
        self._pid, self._taken_by = os.getpid(), _user()
        client, request = self.redlock.client, self.request
        if wait is not None:
            request = replace(request, wait=wait)
        try:
            await client.acquire(request, self._adopt)
            stack.push(self)
        except BaseException:
            # A time limit has struck, and no body starts.
            taken = self._taken
            if taken is not None and not taken.ended:
                await client.ask(lambda now: quorum.release(taken, now, 0.0))
            raise
        finally:
            if self._taken is not None:
                self._taken.ended = True
                client.forget(self._taken)

    def _adopt(self, claim: Claim) -> None:
        self._taken = claim

    def release(self, *, wait: bool = True) -> bool:
        """Nothing to give back: end the body. What it leaves is its mark, if it is done."""
        if self.claim is not None:
            blocking(self.redlock.client.leave_mark(self.claim))
            self.claim.mark = None
        return super().release()
