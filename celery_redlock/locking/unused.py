"""Report locks that `lock()` made and nobody acquired, so that nothing was locked."""

from __future__ import annotations

import warnings
import weakref

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
    _made: _Made | None = None

    @property
    def unused(self) -> bool:
        return self._made is not None

    @unused.setter
    def unused(self, unused: bool) -> None:
        # Not a `__del__`: that would be called for every lock, also for those that were acquired,
        # and an exception that a signal handler raises in a `__del__` is only printed.
        if self._made is not None:
            _all_made.discard(self._made)
            self._made = None
        if unused:
            self._made = _Made(self, _warn)
            self._made.resource = self.resource
            _all_made.add(self._made)

    def __bool__(self) -> bool:
        if self.unused:
            self.unused = False
            raise RedlockError(
                f"{self.resource}: a lock that was made is not held yet, and is neither true nor"
                " false: write `with redlock.lock(...):`, which raises NotAcquired if another has"
                " it, or `if lease := redlock.try_acquire(...):`"
            )
        return True


class _Made(weakref.ref[Unused]):
    """A reference to a lock that was made and not acquired yet."""

    __slots__ = ("resource",)
    resource: str


_all_made: set[_Made] = set()


def _warn(made: _Made) -> None:
    _all_made.discard(made)
    warnings.warn(
        f"the lock of {printable(made.resource)} was made and never acquired, so nothing was"
        " locked: write `with redlock.lock(...):`, or call acquire() and release()",
        RuntimeWarning,
        stacklevel=2,
    )
