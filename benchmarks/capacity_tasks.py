"""Costs of tasks in a real worker to a node: a part of `capacity.py`, in a separate process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.capacity_node import BARE, COUNTED, LIMIT_S, Node, Size, summed
from benchmarks.processes import answer, cancel, consume, until, worker
from celery_redlock import Redlock

TASKS = {
    "locked": "a locked task",
    "in_turn": "a locked task that waited for others",
    "reserved": 'a task with `scope="until_executed"`',
    "paced": "a task with a `rate`",
}


def measure(seed: int, given: Sequence[float]) -> dict[str, Any]:
    """Return what tasks cost, and the connections and waiters of a worker."""
    from benchmarks.capacity_app import app

    size, node = Size._make(given), Node(os.environ["BENCH_NODES"])  # type: ignore[arg-type]
    log, order = Path(os.environ["BENCH_LOG"]), Random(seed)
    rounds: list[dict[str, dict[str, float]]] = []
    found: dict[str, Any] = {}
    nobody = node.connections()
    with worker("capacity_app", f"capacity-{os.getpid()}"):
        until(lambda: app.control.ping(timeout=0.5), 30, "the worker")
        for name in TASKS:
            _round(app, node, log, name, f"warm-up-{name}", 20, {})
        found["connections"] = node.connections() - nobody - 1  # less the producer's own
        before, start = node.info(), time.monotonic()
        time.sleep(5.0 if size.rounds > 2 else 1.0)
        idle = node.since(before, time.monotonic() - start)
        found["idle"] = {name: idle[name] for name in COUNTED}
        for number in range(size.rounds):
            figures = {BARE: node.pairs(size.operations)}
            for name in order.sample(list(TASKS), len(TASKS)):
                queue = f"{name}-{number}"
                figures[TASKS[name]] = _round(app, node, log, name, queue, size.operations, idle)
            rounds.append({name: figures[name] for name in (BARE, *TASKS.values())})
        found["memory"] = _waiting(app, node, size.many // 10)
    found["costs"] = summed(rounds)
    return found


def _round(
    app: Any, node: Node, log: Path, name: str, queue: str, count: int, idle: Mapping[str, float]
) -> dict[str, float]:
    """Return what one of `count` tasks costs, without what the worker does each second anyway."""
    done = log.stat().st_size
    before, start = node.info(), time.monotonic()
    with app.producer_pool.acquire(block=True) as producer:
        for number in range(count):
            app.tasks[name].apply_async((number,), queue=queue, producer=producer)
    consume(app, queue)
    until(lambda: log.stat().st_size >= done + count, LIMIT_S, f"{count} tasks of {queue}", 0.01)
    node.settle()
    did, seconds = node.since(before, count), time.monotonic() - start
    cancel(app, queue)
    return {what: did[what] - idle.get(what, 0.0) * seconds / count for what in COUNTED}


def _waiting(app: Any, node: Node, count: int) -> dict[str, float]:
    """Return the bytes of a waiter and of a reservation.

    The waiters are tasks in the worker, whose keys this process holds. The reserved tasks stay in
    their queue.
    """
    redlock = Redlock([node.url], node_timeout=3.0, restart_guard="off")
    with contextlib.closing(redlock), contextlib.ExitStack() as stack:
        for number in range(count):
            stack.enter_context(redlock.lock(f"locked:{number}", wait=10.0))
        for number in range(count):
            app.tasks["locked"].apply_async((number,), queue="waiting")
            app.tasks["reserved"].apply_async((number,), queue="nobody's")
        consume(app, "waiting")

        def lines() -> int:
            return sum(1 for _ in node.client.scan_iter(match="redlock:locked:*#line", count=1000))

        until(lambda: lines() >= count, LIMIT_S, f"{count} waiters", 0.1)
        return {
            "waiter, with a queue of its own": node.memory_of("redlock:locked:*#line"),
            "reservation": node.memory_of("redlock:reserved:*#reserved"),
        }


if __name__ == "__main__":
    answer(measure)
