"""Cancels a coroutine at its n-th wait, whichever that is."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

__all__ = ["cancelled_at"]

T = TypeVar("T")


class _Count:
    waits = 0


async def cancelled_at(number: int, coroutine: Coroutine[Any, Any, T], *, late: bool) -> bool:
    """Run a coroutine, and cancel it where it waits for the `number`-th time.

    Args:
        number: From 1.
        coroutine: What to run.
        late: Let that wait end first: what it has waited for has come, and it is cancelled before
            it goes on. Else what it waits for is cancelled, as a task does it.

    Returns:
        Whether it came to wait so often.
    """
    count = _Count()
    try:
        await _stepped(number, coroutine, late, count)
    except asyncio.CancelledError:
        assert count.waits >= number, "it was cancelled by somebody else"
    else:
        assert count.waits < number, "it has swallowed the cancellation"
    return count.waits >= number


@types.coroutine
def _stepped(
    number: int, coroutine: Coroutine[Any, Any, T], late: bool, count: _Count
) -> Generator[Any, Any, T]:
    cancel = False
    while True:
        try:
            waits_for = (
                coroutine.throw(asyncio.CancelledError()) if cancel else coroutine.send(None)
            )
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        count.waits += 1
        cancel = count.waits == number
        if cancel and not late:
            if waits_for is not None:
                waits_for._asyncio_future_blocking = False
                waits_for.cancel()
            continue
        yield waits_for
