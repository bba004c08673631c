"""Waiting for a condition, never for a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")

PATIENCE = 3.0
"""Multiple of its deadline for which a condition is waited for, because others use the machine.

A deadline only shows that something hangs; `machine.in_time` shows that it is fast.
"""


def wait_until(
    predicate: Callable[[], T],
    timeout: float,
    what: str,
    *,
    every: float = 0.005,
    seen: Callable[[], object] | None = None,
) -> T:
    """Wait for a condition, never for a time.

    Args:
        predicate: Asked again and again until what it returns is true.
        timeout: Seconds that it takes at most on a quiet machine; `PATIENCE` times that, and the
            test fails.
        what: The condition in words, for the failure: "the worker is ready".
        every: Seconds between two checks at first; a long wait checks less often, at
            most a tenth of a second late: two hundred questions a second are work, too.
        seen: What there is instead, for the failure; asked then only.

    Returns:
        What `predicate` returned at last.

    Raises:
        AssertionError: It did not become true in time.
    """
    begin = time.monotonic()
    timeout *= PATIENCE
    while True:
        waited = time.monotonic() - begin
        late = waited > timeout  # asked once more after the deadline: we may have slept
        result = predicate()
        if result:
            return result
        if late:
            instead = "" if seen is None else f"; {seen()}"
            raise AssertionError(
                f"not within {timeout} s: {what} (last answer: {result!r}){instead}"
            )
        time.sleep(max(every, min(waited / 20, 0.1)))


def died(pid: int, timeout: float = 10.0) -> float:
    """Wait until a process is dead; the moment at which it was seen to be."""

    def dead() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return True

    wait_until(dead, timeout, f"process {pid} is dead", every=0.002)
    return time.monotonic()
