"""Conflicts without end on one key: what a process needs for them, at first and at last.

    python -m tests.nodes.limits --seconds 60

Starts five nodes, holds a key on them, and lets 64 threads of one process fail to get it, waiting
and not waiting. Measures memory, objects, threads, descriptors and connections: before the first
use, when all is warm, at the end, and after `close()`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import threading
import time
import tracemalloc
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import redis

from celery_redlock import QuorumUnavailable, Redlock, ResourceHeld
from celery_redlock.server import LocalServer, start_servers

THREADS = 64
PLAIN = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0", "MALLOC_ARENA_MAX": "1"}
"""glibc keeps what each thread has freed: with 64 threads that grows for minutes, to some
20 MiB, and would hide what we are looking for. So this program runs without, and starts itself
again if need be."""
MANY = 1000
"""Conflicts that there must be."""
LONGEST = 60.0
"""Seconds they may take."""
WARM = 0.3
"""Part of the seconds after which everything that is made once has been made."""


@dataclass
class Figures:
    """Figures measured at one moment.

    Attributes:
        conflicts: So far.
        memory: What Python's objects take; bytes.
        resident: What the process takes; bytes.
        threads: Running.
        descriptors: Open.
        connections: Per node, those of locks: ours, and one of the key's holder.
    """

    conflicts: int
    memory: int
    resident: int
    threads: int
    descriptors: int
    connections: list[int]


@dataclass
class Campaign:
    """Result of a campaign."""

    seconds: float
    before: Figures
    warm: Figures
    end: Figures
    closed: Figures
    errors: list[str]


def run(seconds: float, threads: int = THREADS) -> Campaign:
    tracemalloc.start(1)
    with start_servers(5) as nodes:
        urls = [node.url for node in nodes]
        # 64 busy threads take turns at one interpreter: that is no silence of the nodes.
        options: dict[str, Any] = {"ttl": 60.0, "node_timeout": 5.0, "restart_guard": "off"}
        holder, redlock = (Redlock(urls, **options) for _ in range(2))
        try:
            with holder.lock("k"):
                return _measured(redlock, nodes, seconds, threads)
        finally:
            holder.close()
            redlock.close()


def _measured(redlock: Redlock, nodes: list[LocalServer], seconds: float, threads: int) -> Campaign:
    clients = [redis.Redis(port=node.port) for node in nodes]
    conflicts = [0] * threads
    errors: list[str] = []
    stop, go = threading.Event(), threading.Event()
    idle = threading.Semaphore(0)

    def figures() -> Figures:
        gc.collect()
        process = psutil.Process()
        return Figures(
            sum(conflicts),
            tracemalloc.get_traced_memory()[0],
            process.memory_info().rss,
            threading.active_count(),
            process.num_fds(),
            [sum(c["name"] == "celery_redlock" for c in one.client_list()) for one in clients],
        )

    def conflict(number: int) -> None:
        waits = number % 2 == 0
        while not stop.is_set():
            if not go.is_set():
                idle.release()
                go.wait()
            try:
                redlock.acquire("k", wait=0.2 if waits else 0.0)
                errors.append("granted")
            except ResourceHeld:
                conflicts[number] += 1
            except QuorumUnavailable:
                pass  # 64 threads on a busy machine: it has not read what the nodes have answered
            except BaseException as error:
                errors.append(repr(error))
                return
            if not waits:
                stop.wait(0.05)

    def at_rest() -> Figures:
        """Wait until no thread is in the middle of anything."""
        go.clear()
        for _ in range(threads):
            if not idle.acquire(timeout=90.0):
                raise AssertionError(f"a thread does not come to rest: {errors}")
        try:
            return figures()
        finally:
            go.set()

    def go_on(seconds: float, count: float) -> None:
        """Go on for so long; on a busy machine until there have been so many conflicts."""
        time.sleep(seconds)
        deadline = time.monotonic() + LONGEST
        while sum(conflicts) < count and time.monotonic() < deadline:
            time.sleep(0.05)

    figures()  # from here on the clients that measure are connected
    before = figures()
    go.set()
    workers = [threading.Thread(target=conflict, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    try:
        go_on(seconds * WARM, MANY * WARM)
        warm = at_rest()
        go_on(seconds * (1 - WARM), MANY)
        end = at_rest()
    finally:
        stop.set()
        go.set()
        for worker in workers:
            worker.join(30.0)
    redlock.close()
    closed = _settled(figures, before)
    for client in clients:
        client.close()
    return Campaign(seconds, before, warm, end, closed, errors)


def _settled(figures: Any, before: Figures) -> Figures:
    """Return the figures after `close()`.

    Threads need a moment to end, and servers to notice it.
    """
    deadline = time.monotonic() + 10.0
    while True:
        last: Figures = figures()
        same = (last.threads, last.descriptors, last.connections) == (
            before.threads,
            before.descriptors,
            before.connections,
        )
        if same or time.monotonic() > deadline:
            return last
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SECONDS", 60)))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in PLAIN.items()):
        again = [sys.executable, "-m", "tests.nodes.limits", *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, **PLAIN})
    campaign = run(options.seconds)
    if options.json:
        print(json.dumps(asdict(campaign)))
        return
    print(f"{'':8}{'conflicts':>11}{'KiB':>8}{'RSS MiB':>9}{'threads':>9}{'fds':>5}  connections")
    for name in ("before", "warm", "end", "closed"):
        f: Figures = getattr(campaign, name)
        memory = f"{f.memory / 1024:>8.0f}{f.resident / 2**20:>9.1f}"
        rest = f"{f.threads:>9}{f.descriptors:>5}  {f.connections}"
        print(f"{name:8}{f.conflicts:>11}{memory}{rest}")
    print("errors:", campaign.errors or "none")


if __name__ == "__main__":
    main()
