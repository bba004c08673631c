"""Run, without an event loop, the code that is written once for threads and asyncio.

The code that asks nodes and waits is a coroutine. In an event loop it is suspended at each wait. In
a thread everything that it awaits blocks, and is done when it returns, so one step runs the
coroutine to its end. Meanwhile its frames are on the thread's own stack, so an exception that
strikes anywhere unwinds them as in any call.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["blocking"]

T = TypeVar("T")


def blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that is never suspended; return its result."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    except BaseException:
        coroutine.close()  # no warning if an exception struck before it has begun
        raise
    coroutine.close()
    raise RuntimeError("the coroutine was suspended, but there is no event loop")
