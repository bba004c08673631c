"""Celery no-op tasks per second and what they cost a real prefork worker with two children.

Run by `__main__.py` as a process of its own (`processes.in_a_process`), since the application reads
its servers from the environment when it is imported.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from random import Random
from statistics import median
from typing import Any

from benchmarks.processes import answer, cancel, consume, cpu, in_a_process, settle, until, worker
from benchmarks.stats import table

LABELS = {"plain": "plain task", "bare": "bare limit around it", "ours": "@locked"}


def measure(rounds: int, size: int) -> dict[str, Any]:
    """Return the median rates and CPU, and the ratios to the others round by round."""
    from benchmarks.celery_app import app

    order = Random(1)
    nodes = os.environ["BENCH_NODES"].split()
    settle(nodes)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in LABELS}
    with worker("celery_app", f"{len(nodes)}-nodes") as session:
        until(lambda: app.control.ping(timeout=0.5), 20, "the worker")
        for name in LABELS:
            _round(session, name, f"warm-up-{name}", 100)
        for number in range(rounds):
            for name in order.sample(list(LABELS), len(LABELS)):
                found[name].append(_round(session, name, f"{name}-{number}", size))
    figures: dict[str, Any] = {}
    for name, mine in found.items():
        figures[name] = {"rate": median(rate for rate, _ in mine)}
        figures[name]["cpu"] = median(seconds for _, seconds in mine)
        for other, its in found.items():
            pairs = zip(mine, its, strict=True)
            figures[name][f"to_{other}"] = median(one[0] / two[0] for one, two in pairs)
        added = [
            (one[1] - plain[1], bare[1] - plain[1])
            for one, plain, bare in zip(mine, found["plain"], found["bare"], strict=True)
        ]
        figures[name]["cpu_added"] = median(one for one, _ in added)
        figures[name]["cpu_to_bare"] = median(one / two for one, two in added)
    return figures


def _round(session: int, name: str, queue: str, size: int) -> tuple[float, float]:
    """Return tasks per second, from the first body that ran to the last, and CPU of one in seconds.

    The messages wait in a queue of their own before the worker hears of it, so that publishing
    them takes nothing from working them off. The CPU is that of the whole worker.
    """
    from benchmarks.celery_app import app, counter

    task = app.tasks[name]
    with app.producer_pool.acquire(block=True) as producer:
        for number in range(size):
            task.apply_async((number,), queue=queue, producer=producer)
    before, used = counter().total(), cpu(session)
    consume(app, queue)
    until(lambda: counter().total() > before, 20, f"first task of {queue}")
    first, start = counter().total(), time.monotonic()
    until(lambda: counter().total() >= before + size, 60, f"{size} tasks of {queue}")
    rate = (before + size - first) / (time.monotonic() - start)
    cancel(app, queue)  # answered behind what the last tasks still cost
    return rate, (cpu(session) - used) / size


def on_servers(
    broker: str, nodes: Sequence[str], rounds: int, size: int, guard: str = "auto"
) -> dict[str, Any]:
    """Measure in a process that has these servers in its environment."""
    with tempfile.NamedTemporaryFile() as counts:
        counts.write(bytes(4096))
        counts.flush()
        servers = {"BENCH_BROKER": broker, "BENCH_NODES": " ".join(nodes), "BENCH_GUARD": guard}
        figures: dict[str, Any] = in_a_process(
            "celery_rate", rounds, size, **servers, BENCH_COUNTER=counts.name
        )
    return figures


def show(title: str, figures: dict[str, Any]) -> str:
    rows = [
        [
            LABELS[name],
            f"{f['rate']:.0f}",
            f"{f['to_plain']:.2f}",
            f"{f['to_bare']:.2f}",
            f"{f['cpu'] * 1e6:.0f}",
            f"{f['cpu_added'] * 1e6:.0f}",
            f"{f['cpu_to_bare']:.2f}" if name == "ours" else "",
        ]
        for name, f in figures.items()
    ]
    head = [f"Celery, {title}", "tasks/s", "x plain", "x bare", "CPU us a task", "added", "x bare"]
    return table(head, rows)


if __name__ == "__main__":
    answer(measure)
