"""The `with` block of a lock: it may be nested in another, and its end may be interrupted.

A signal handler may raise an exception between any two steps of Python code, also before the first
line of `__exit__`, where no `try` of ours can catch it. But a `with` statement looks `__exit__` up
before it calls `__enter__`, and keeps the result until the block is over. Here the result is a
`partial`, which is written in C: it exists until its call has ended, and nobody else refers to it,
not even a traceback. So when the partial of a block is gone, the block is over. A weak reference to
it notices that.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..protocol.errors import RedlockError
from .unused import Unused

__all__ = ["Block", "Exit", "user"]


def user() -> tuple[int, object]:
    """Return the caller: its thread or greenlet, and the asyncio task in it or None."""
    asyncio = sys.modules.get("asyncio")
    running = asyncio is not None and asyncio._get_running_loop() is not None
    return threading.get_ident(), asyncio.current_task() if running else None  # type: ignore[union-attr]


class Exit:
    """A descriptor for `__exit__` or `__aexit__`, with which a lock notices the end of its block.

    Args:
        leave: The method that is called at the end of a block.
    """

    def __init__(self, leave: Callable[..., Any]) -> None:
        self._leave = leave

    def __get__(self, lock: Block | None, _of: type | None = None) -> Callable[..., Any]:
        """Return what a `with` statement calls at its end."""
        if lock is None:
            return self._leave  # an ExitStack binds it by itself, and its end is not noticed
        leave = partial(self._leave, lock)
        lock._next_exit = threading.get_ident(), weakref.ref(leave)
        return leave


class Block(Unused):
    """A lock that is acquired at the begin of a `with` block, and released at its end."""

    _next_exit: tuple[int, weakref.ref[object]] | None = None  # and the thread that looked it up
    _exit: weakref.ref[object] | None = None  # of the block that it is held for
    _nested = 0  # blocks inside that one that share its lock
    _taken_by: tuple[int, object] | None = None  # from its acquisition on until its release
    _pid: int
    resource: str

    def _take(self) -> None:
        """Note that this thread, greenlet or asyncio task uses it, until it is released.

        Raises:
            RedlockError: Another uses it, or it is held already: it has the state of one lease.
        """
        me, state = user(), vars(self)
        if self._pid != os.getpid() or self._left_over:
            state.pop("_taken_by", None)
        first = state.setdefault("_taken_by", me)  # in one step: two threads may come at once
        if first is not me and (first != me or self.remaining() > 0.0):
            raise RedlockError(
                f"{self.resource}: this lock object is in use already; make one for each use, with"
                " redlock.lock(...)",
                resource=self.resource,
            )
        self._pid, self._taken_by = os.getpid(), me

    def _leave_block(self, *_error: object) -> None:
        if not self._leave_nested():
            self.release()

    if TYPE_CHECKING:

        def release(self) -> bool: ...

        def remaining(self) -> float: ...

        def __exit__(self, *_error: object) -> None: ...

    else:
        __exit__ = Exit(_leave_block)

    def _begin_block(self) -> None:
        """Notice the end of the block that is being entered, if a `with` statement enters it."""
        # Not in the caller: a traceback would refer to its variables, and so to the block's exit.
        thread, leave = self._next_exit or (0, lambda: None)
        # Another thread may have looked it up since: its exit ends early, as it is refused.
        found = leave() if thread == threading.get_ident() else None
        self._nested = 0
        self._exit = weakref.ref(found, self._block_over) if found else None

    def _leave_nested(self) -> bool:
        """Leave a nested block that shares this lock; return False if this block itself is left."""
        if not self._nested:
            return False
        self._nested -= 1
        return True

    def _block_over(self, leave: object) -> None:
        """Release this lock soon, if it was not released when its block was left."""
        raise NotImplementedError

    @property
    def _left_over(self) -> bool:
        """True if its block is over, but an exception has interrupted its release."""
        return self._exit is not None and self._exit() is None
