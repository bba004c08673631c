"""One process that keeps many leases alive, and says what that costs it.

Run by `leases.py` as `python -m benchmarks.keep bare|ours COUNT SECONDS URL...`. Prints one JSON
object once the time is over, and holds on until standard input is closed, so that the nodes can be
asked who still holds what.
"""

from __future__ import annotations

import contextlib
import gc
import json
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

TTL = 10.0
Wait = Callable[[float], int]


def memory(field: str) -> int | None:
    """Return VmRSS (now) or VmHWM (the most so far) in bytes; None where there is no /proc."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return None


@contextlib.contextmanager
def keep_bare(urls: list[str], names: list[str]) -> Iterator[Wait]:
    """The limit: every third of the ttl one write of all extensions per node, then all answers."""
    from benchmarks.bare import BareLock

    lock = BareLock(urls, TTL)
    requests = []
    for name in names:
        token = lock.acquire(name.encode())
        assert token
        requests.append(lock.extend_request(name.encode(), token))
    lock.settle()

    def wait(seconds: float) -> int:
        held = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            tick = time.monotonic()
            held = lock.extend_all(requests)
            time.sleep(max(0.0, tick + TTL / 3 - time.monotonic()))
        return held

    yield wait
    lock.close()


@contextlib.contextmanager
def keep_ours(urls: list[str], names: list[str]) -> Iterator[Wait]:
    from celery_redlock import Redlock

    redlock = Redlock(urls, ttl=TTL, restart_guard="off")
    with contextlib.ExitStack() as stack:
        leases = [stack.enter_context(redlock.lock(name)) for name in names]

        def wait(seconds: float) -> int:
            time.sleep(seconds)
            return sum(not lease.lost and lease.remaining() > 0 for lease in leases)

        yield wait


def main() -> None:
    kind, count, seconds, *urls = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    keep = {"bare": keep_bare, "ours": keep_ours}[kind]
    with keep(urls, ["warm-up"]):
        pass
    names = [f"keep:{number}" for number in range(int(count))]
    gc.collect()
    before, threads = memory("VmRSS"), threading.active_count()
    begun = time.monotonic()
    with keep(urls, names) as wait:
        acquiring = time.monotonic() - begun
        cpu, start = time.process_time(), time.monotonic()
        held = wait(float(seconds))
        cpu, elapsed = time.process_time() - cpu, time.monotonic() - start
        most = memory("VmHWM")
        figures = {
            "acquiring": acquiring,
            "cpu_share": cpu / elapsed,
            "memory": most - before if most and before else None,
            "threads": threading.active_count() - threads,
            "held": held,
        }
        print(json.dumps(figures), flush=True)
        select.select([sys.stdin], [], [])


if __name__ == "__main__":
    main()
