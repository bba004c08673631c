"""The clock that leases are counted on."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

__all__ = ["monotonic"]


def _clock() -> int:
    # Counts on while the machine is suspended, or a lease would outlive its nodes' patience.
    return getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


monotonic: Callable[[], float] = partial(time.clock_gettime, _clock())
"""Seconds on the clock of leases. Never steps; counts time spent suspended where it can."""
