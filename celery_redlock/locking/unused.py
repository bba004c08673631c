"""Report locks that `lock()` made and nobody acquired, so that nothing was locked."""

from __future__ import annotations

import warnings

from ..protocol.errors import RedlockError
from ..protocol.texts import printable

__all__ = ["Unused"]


class Unused:
    """A lock that may not have been acquired yet.

    Attributes:
        resource: The resource that it locks.
        unused: True if `lock()` made it, and it has not been acquired since.
    """

    resource: str
    unused = False

    def __bool__(self) -> bool:
        if self.unused:
            self.unused = False
            raise RedlockError(
                f"{self.resource}: a lock that was made is not held yet, and is neither true nor"
                " false: write `with redlock.lock(...):`, which raises NotAcquired if another has"
                " it, or `if lease := redlock.try_acquire(...):`"
            )
        return True

    def __del__(self) -> None:
        if self.unused:
            warnings.warn(
                f"the lock of {printable(self.resource)} was made and never acquired, so nothing"
                " was locked: write `with redlock.lock(...):`, or call acquire() and release()",
                RuntimeWarning,
                stacklevel=2,
            )
