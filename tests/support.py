"""What tests of every kind share, besides fixtures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(predicate: Callable[[], T], timeout: float, what: str, *, every: float = 0.005) -> T:
    """Wait for a condition, never for a time.

    Args:
        predicate: Asked again and again until what it returns is true.
        timeout: Seconds after which the test fails.
        what: The condition in words, for the failure: "the worker is ready".
        every: Seconds between two questions.

    Returns:
        What `predicate` returned at last.

    Raises:
        AssertionError: It did not become true in time.
    """
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() > deadline  # asked once more after the deadline: we may have slept
        result = predicate()
        if result:
            return result
        if late:
            raise AssertionError(f"not within {timeout} s: {what} (last answer: {result!r})")
        time.sleep(every)
