"""A hot key: many tasks wait for one lock, on two real workers; others are queued behind them.

In a process of its own, as `celery_rate.py`.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import redis

from benchmarks.processes import answer, cancel, consume, in_a_process, settle, until, worker
from benchmarks.stats import table

BODY = 0.02
"""Seconds that the body of a hot task lasts."""
LIMIT = 240.0


def _commands() -> float:
    """Commands that a node has served, on average."""
    nodes = os.environ["BENCH_NODES"].split()
    total = 0
    for url in nodes:
        with redis.Redis.from_url(url) as client:
            stats: Any = client.info("commandstats")
            ours = ("info", "client", "select", "hello", "auth")
            total += sum(
                one["calls"]
                for name, one in stats.items()
                if name.removeprefix("cmdstat_").partition("|")[0] not in ours
            )
    return total / len(nodes)


def _round(log: Path, queue: str, hot: int, others: int) -> dict[str, float]:
    """Have both workers do these tasks; the times that took, in seconds."""
    from benchmarks.hot_app import app

    log.write_bytes(b"")
    with app.producer_pool.acquire(block=True) as producer:
        for _ in range(hot):
            app.tasks["hot"].apply_async((BODY,), queue=queue, producer=producer)
        for number in range(others):
            app.tasks["other"].apply_async((number,), queue=queue, producer=producer)
    before, start = _commands(), time.monotonic()
    consume(app, queue, 2)
    until(lambda: log.read_bytes().count(b"\n") >= hot + others, LIMIT, queue, 0.01)
    commands = _commands() - before
    cancel(app, queue, 2)
    lines = [line.split() for line in log.read_text().splitlines()]
    begins = [float(begin) for kind, begin, _ in lines if kind == "hot"]
    ends = [float(end) for kind, _, end in lines if kind == "hot"]
    figures = {"commands": commands}
    if hot:
        figures["total"] = max(ends) - min(begins)
        figures["longest"] = max(begins) - start
        figures["waited"] = sum(begin - start for begin in begins)
    if others:
        figures["others"] = max(float(end) for kind, _, end in lines if kind == "other") - start
    return figures


def measure(rounds: int, hot: int, others: int, polling: bool) -> dict[str, Any]:
    """Medians, with parking and (if `polling`) without."""
    from benchmarks.hot_app import app

    settle(os.environ["BENCH_NODES"].split())
    found: dict[str, Any] = {"ideal": hot * BODY}
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        for parking in (True, False) if polling else (True,):
            environment = {"BENCH_LOG": str(log), "BENCH_PARKING": "1" if parking else "0"}
            with worker("hot_app", "hot1", **environment), worker("hot_app", "hot2", **environment):
                until(lambda: len(app.control.ping(timeout=0.5)) == 2, 30, "the workers")
                name = f"{'parked' if parking else 'polling'}"
                _round(log, f"warm-up-{name}", 5, 100)
                alone, mixed, without = [], [], []
                for number in range(rounds if parking else 1):
                    alone.append(_round(log, f"alone-{name}-{number}", hot, 0))
                    without.append(_round(log, f"without-{name}-{number}", 0, others))
                    mixed.append(_round(log, f"mixed-{name}-{number}", hot, others))
            own = median(one["commands"] for one in without) / others * hot
            found[name] = {
                "total": median(one["total"] for one in alone),
                "total_ratio": median(one["total"] for one in alone) / found["ideal"],
                "longest": median(one["longest"] for one in alone),
                "others": median(one["others"] for one in mixed),
                "others_without": median(one["others"] for one in without),
                "slowdown": median(
                    one["others"] / two["others"] for one, two in zip(mixed, without, strict=True)
                ),
                "commands": median(one["commands"] / one["waited"] for one in alone),
                "commands_waiting": median(
                    max(0.0, one["commands"] - own) / one["waited"] for one in alone
                ),
                "commands_a_lock": own / hot,
                "rounds": {"alone": alone, "mixed": mixed, "without": without},
            }
    return found


def on_servers(
    broker: str, nodes: Sequence[str], rounds: int, hot: int, others: int, polling: bool
) -> dict[str, Any]:
    """Measure in a process that has these servers in its environment."""
    servers = {"BENCH_BROKER": broker, "BENCH_NODES": " ".join(nodes), "BENCH_LOG": os.devnull}
    figures: dict[str, Any] = in_a_process("hot", rounds, hot, others, polling, **servers)
    return figures


def show(figures: dict[str, Any]) -> str:
    ideal = figures["ideal"]
    rows = []
    for title, figure, of, target in (
        ("all of one key, x ideal", "total", ideal, "<= 1.12"),
        ("longest wait, x ideal", "longest", ideal, "<= 3"),
        ("other tasks behind it, x without it", "slowdown", 1.0, "<= 1.3"),
        ("commands per node, waiting task and second", "commands_waiting", 1.0, "<= 2"),
        ("the same with the locks' own", "commands", 1.0, ""),
    ):
        values = [f"{figures[n][figure] / of:.2f}" for n in ("parked", "polling") if n in figures]
        rows.append([title, *values, *[""] * (2 - len(values)), target])
    return table([f"A hot key, ideal {ideal:g} s", "parked", "polling", "target"], rows)


if __name__ == "__main__":
    answer(measure)
