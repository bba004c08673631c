"""The clock by which leases are counted."""

from __future__ import annotations

import time

__all__ = ["monotonic"]


def _clock() -> int:
    # It counts on while the machine is suspended. Otherwise a holder would believe in a lease that
    # has expired on the nodes.
    return getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


_CLOCK = _clock()


def monotonic() -> float:
    """Return the time by the clock of leases, in seconds. It never steps.

    It counts the time in which the machine is suspended, if the system has such a clock.
    """
    return time.clock_gettime(_CLOCK)
