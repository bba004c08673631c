"""What stands for a lease where there is no lock."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ..protocol.claim import Claim
from ..protocol.texts import names_of
from . import stack
from .held import HeldLease, _user
from .request import LockRequest

__all__ = ["Unlocked"]


class Unlocked(HeldLease):
    """Stands for a lease where none was asked for (`redlock_enabled = False`) or granted.

    Work that runs under it has been allowed to run without a lock: `ensure()` does not stop it. It
    is a lease that never ends, of nothing; its token is empty, because it proves nothing, and it
    has no fencing token, so what is fenced refuses its writes.

    Args:
        resource: What would be exclusive.
        redlock: Whose lock it stands for: a lock of the same inside is not asked for either.
    """

    def __init__(self, resource: str | Iterable[str], redlock: Any = None) -> None:
        super().__init__(redlock, LockRequest(names=names_of(resource), ttl=math.inf))
        self.claim = Claim(self.resources, "", math.inf, 1)
        self.claim.deadline = math.inf

    def __enter__(self) -> HeldLease:
        self._taken_by = _user()
        stack.push(self)
        return self

    def release(self, *, wait: bool = True) -> bool:
        """Nothing to give back."""
        self._leave()
        return False

    def keep(self, seconds: float, *, timeout: float | None = None) -> bool:
        """Nothing to keep."""
        return self.release()

    def remaining(self) -> float:
        """Return how long it lasts: until its work ends."""
        return math.inf
