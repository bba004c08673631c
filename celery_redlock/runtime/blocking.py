"""Runs, without an event loop, what is written once for threads and for asyncio.

What asks nodes and waits is a coroutine. Over asyncio it is suspended there; in a thread whatever
it awaits has blocked and is done, so one step runs it to its end. Its frames lie on the thread's
own stack meanwhile: an exception that strikes anywhere unwinds them as it does any call.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["blocking"]

T = TypeVar("T")


def blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns that is never suspended."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    finally:
        coroutine.close()  # never begun, if struck before: no warning then
    raise RuntimeError("it was suspended, and there is no event loop")
