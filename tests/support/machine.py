"""Stalls of the machine: a test that measures time measures the machine as well.

One small process beside all lanes sleeps for a few milliseconds, again and again. It writes down
when it slept too long, and how many programs want a core. A bound of time is asserted with
`in_time`, which allows for both. So bounds are strict on a quiet machine, and on one that others
use they are no lottery.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

VARIABLE = "REDLOCK_TESTS_STALLS"
"""Names the file it writes into, for the lanes."""
BEAT = 0.005
"""Seconds it sleeps at a time."""
LATER = float("inf")
HOPS = 3.0
"""Processes that a measured action passes through, each of which may have to wait for a core."""
OURS = 2
"""Programs a core that the tests themselves have at work: so many are no excuse."""
CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1

WATCHER = f"""
import os, sys, time
parent, before, counted = os.getppid(), time.monotonic(), 0.0
with open(sys.argv[1], "a", buffering=1) as file:
    while os.getppid() == parent:
        if before > counted + {20 * BEAT} and os.path.exists("/proc/stat"):
            with open("/proc/stat") as stat:
                (want,) = (line for line in stat if line.startswith("procs_running"))
            file.write(f"want {{before}} {{want.split()[1]}}\\n")
            counted = before
        time.sleep({BEAT})
        at = time.monotonic()
        if at - before > 2 * {BEAT}:
            file.write(f"{{before}} {{at}}\\n")
        before = at
"""


def watch(path: str) -> subprocess.Popen[bytes]:
    """Start the watcher, which ends with this process."""
    os.environ[VARIABLE] = path
    return subprocess.Popen([sys.executable, "-S", "-E", "-c", WATCHER, path])


def stalled(since: float, until: float = LATER) -> float:
    """Return how long the machine stood still between two moments of `time.monotonic`."""
    between = (min(end, until) - max(begin, since) - BEAT for begin, end in stalls())
    return sum(one for one in between if one > 0)


def stalls() -> list[tuple[float, float]]:
    """Return the begin and end of all times at which it stood still; by `time.monotonic`."""
    return [(float(begin), float(end)) for begin, end in _written(2)]


def crowded(since: float, until: float = LATER) -> float:
    """Return how much longer than with the tests' own load a computation may have taken."""
    counts = [int(count) for _, at, count in _written(3) if since - 1.0 <= float(at) <= until]
    return max(1.0, sum(counts) / len(counts) / CORES / OURS) if counts else 1.0


def _written(words: int) -> list[list[str]]:
    """The watcher's lines of so many words."""
    path = os.environ.get(VARIABLE, "")
    if not os.path.exists(path):
        return []
    time.sleep(10 * BEAT)  # the watcher wakes up when we do: let it write
    with open(path, encoding="ascii") as file:
        lines = [line.split() for line in file if line.endswith("\n")]
    return [line for line in lines if len(line) == words]


def in_time(begin: float, end: float, bound: float, what: str) -> None:
    """Check that fewer than `bound` seconds passed between two moments, apart from stalls.

    Raises:
        AssertionError: It took longer: `what` says what.
    """
    brief(end - begin, bound, what, since=begin, until=end)


def by_wall_clock(begin: float, end: float, bound: float, what: str) -> None:
    """Check as `in_time` does, between two moments of `time.time`, such as those in messages."""
    past = time.time() - time.monotonic()
    in_time(begin - past, end - past, bound, what)


def brief(took: float, bound: float, what: str, *, since: float, until: float = LATER) -> None:
    """The same, of something that took `took` seconds at some time between two moments."""
    if took < bound:
        return
    still, times = stalled(since, until), crowded(since, until)
    assert took < bound * times + HOPS * still, (
        f"{what} took {took:.3f} s, and not less than {bound} s; between {since:.3f} and"
        f" {until:.3f} the machine stood still for {still:.3f} s, was {times:.1f} x too busy"
    )


def end_with_parent() -> None:
    """Called by a program that tests start: it is not to outlive a run that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
