"""Acquire + release on five healthy nodes, in interleaved rounds: on two cores, and on one."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import median
from typing import Any

from benchmarks.contestants import BARE, CONNLOOP, FENCED, FIELD, LOCK, OURS, Contestant, field
from benchmarks.processes import pinned
from benchmarks.stats import ms, paired_ratio, summary, table
from celery_redlock.server import LocalServer

ROUND = 0.03  # seconds
WARM_UP = 100
CORES = {2: "on two cores", 1: "all on one core"}


def measure(nodes: Sequence[LocalServer], rounds: int) -> dict[str, Any]:
    """Return p50, p99 and CPU in seconds and ratios to the bare limit, by cores and contestant.

    On one core, with the nodes, are the limit, what it costs to borrow redis-py's protocol, and we.
    """
    figures = {}
    with field([node.url for node in nodes]) as contestants:
        pids = [one.pid for one in (*nodes, *contestants)]
        for cores, title in CORES.items():
            few = [one for one in contestants if one.entry in (BARE, CONNLOOP, OURS, LOCK)]
            with pinned(pids, cores):
                figures[title] = _measure(contestants if cores > 1 else few, rounds)
    return figures


def _measure(contestants: Sequence[Contestant], rounds: int) -> dict[str, Any]:
    """Measure in turns.

    The speed of a shared machine changes from second to second. So rounds are short and equally
    long for all, their order is shuffled (who runs after whom matters as well), and a ratio is the
    median of the ratios of rounds that ran beside each other.
    """
    order = Random(1)
    sizes = {}
    for contestant in contestants:
        warm = contestant.ask(f"round {WARM_UP}")["seconds"]
        sizes[contestant.entry.name] = max(20, round(ROUND / median(warm)))
    seconds: dict[str, list[list[float]]] = {name: [] for name in sizes}
    cpu: dict[str, list[list[float]]] = {name: [] for name in sizes}
    for _ in range(rounds):
        for contestant in order.sample(contestants, len(contestants)):
            name = contestant.entry.name
            answer = contestant.ask(f"round {sizes[name]}")
            seconds[name].append(answer["seconds"])
            cpu[name].append([answer["cpu"]])
    figures = {name: summary(values) for name, values in seconds.items()}
    for name, figure in figures.items():
        figure["ratio"] = paired_ratio(seconds[name], seconds[BARE.name])
        figure["p99_ratio"] = figure["p99"] / figures[BARE.name]["p99"]
        figure["cpu"] = summary(cpu[name])["p50"]
        figure["cpu_ratio"] = paired_ratio(cpu[name], cpu[BARE.name])
    if fenced := figures.get(FENCED.name):
        fenced["to_unfenced"] = paired_ratio(seconds[FENCED.name], seconds[OURS.name])
    return figures


def show(figures: dict[str, Any]) -> str:
    tables = []
    for title, of_all in figures.items():
        rows = [
            [
                entry.label,
                ms(f["p50"]),
                f"{f['ratio']:.2f}",
                ms(f["p99"]),
                f"{f['p99_ratio']:.2f}",
                f"{f['cpu'] * 1e6:.0f}",
                f"{f['cpu_ratio']:.2f}",
                f"{f['to_unfenced']:.2f}" if entry is FENCED else "",
            ]
            for entry in FIELD
            if (f := of_all.get(entry.name))
        ]
        head = [f"acquire + release, five nodes, {title}"]
        head += ["p50 ms", "x bare", "p99 ms", "x bare", "CPU us", "x bare", "x unfenced"]
        tables.append(table(head, rows))
    return "\n\n".join(tables)
