"""The substitute for a lease where there is no lock."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ..protocol.claim import Claim
from ..protocol.texts import names_of
from . import stack
from .held import HeldLease
from .request import LockRequest

__all__ = ["Unlocked"]


class Unlocked(HeldLease):
    """A substitute for a lease that was not asked for (`redlock_enabled = False`) or not granted.

    Work that runs under it has been allowed to run without a lock: `ensure()` does not stop it. The
    substitute never ends. Its token is empty, because it proves nothing. It has no fencing token,
    so a fenced resource refuses its writes.

    Args:
        resource: The resource that would be locked.
        redlock: The lock that would be used. A nested lock of the same resource, from this lock, is
            not asked for either.
    """

    def __init__(self, resource: str | Iterable[str], redlock: Any = None) -> None:
        super().__init__(redlock, LockRequest(names=names_of(resource), ttl=math.inf))
        self.claim = Claim(self.resources, "", math.inf, 1)
        self.claim.deadline = math.inf

    def __enter__(self) -> HeldLease:
        self._take()
        self._begin_block()
        stack.push(self)
        return self

    async def _release(self, wait: bool = True) -> bool:
        self._leave()  # there is no lock to release
        return False

    def keep(self, seconds: float, *, timeout: float | None = None) -> bool:
        """Release it: there is no lock to keep."""
        return self.release()

    def remaining(self) -> float:
        """Return infinity: it never ends."""
        return math.inf
