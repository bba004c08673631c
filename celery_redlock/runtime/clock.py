"""The clock that leases are counted on."""

from __future__ import annotations

import time

__all__ = ["monotonic"]


def _clock() -> int:
    # Counts on while the machine is suspended, or a lease would outlive its nodes' patience.
    return getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


_CLOCK = _clock()


def monotonic() -> float:
    """Seconds on the clock of leases. Never steps; counts time spent suspended where it can."""
    return time.clock_gettime(_CLOCK)
