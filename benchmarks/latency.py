"""Acquire + release on five healthy nodes, in interleaved rounds."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import median
from typing import Any

from benchmarks.contestants import BARE, FENCED, FIELD, OURS, field
from benchmarks.stats import ms, paired_ratio, summary, table

ROUND = 0.03  # seconds
WARM_UP = 100


def measure(urls: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return p50 and p99 in seconds and the ratio to the bare limit, by contestant.

    The speed of a shared machine changes from second to second. So rounds are short and equally
    long for all, their order is shuffled (who runs after whom matters as well), and a ratio is the
    median of the ratios of rounds that ran beside each other.
    """
    order = Random(1)
    with field(urls) as contestants:
        sizes = {}
        for contestant in contestants:
            warm = contestant.ask(f"round {WARM_UP}")["seconds"]
            sizes[contestant.entry.name] = max(20, round(ROUND / median(warm)))
        seconds: dict[str, list[list[float]]] = {name: [] for name in sizes}
        for _ in range(rounds):
            for contestant in order.sample(contestants, len(contestants)):
                name = contestant.entry.name
                answer = contestant.ask(f"round {sizes[name]}")
                if answer["failed"]:
                    raise RuntimeError(f"{name}: failed on healthy nodes")
                seconds[name].append(answer["seconds"])
    figures = {name: summary(values) for name, values in seconds.items()}
    for name, figure in figures.items():
        figure["ratio"] = paired_ratio(seconds[name], seconds[BARE.name])
        figure["p99_ratio"] = figure["p99"] / figures[BARE.name]["p99"]
    fenced = figures[FENCED.name]
    fenced["to_unfenced"] = paired_ratio(seconds[FENCED.name], seconds[OURS.name])
    return figures


def show(figures: dict[str, Any]) -> str:
    rows = [
        [
            entry.label,
            ms(f["p50"]),
            f"{f['ratio']:.2f}",
            ms(f["p99"]),
            f"{f['p99_ratio']:.2f}",
            "<= 1.60" if entry is OURS else "",
            f"{f['to_unfenced']:.2f}" if entry is FENCED else "",
        ]
        for entry in FIELD
        if (f := figures.get(entry.name))
    ]
    head = [
        "acquire + release, five nodes",
        "p50 ms",
        "x bare",
        "p99 ms",
        "x bare",
        "p50 target",
        "x unfenced",
    ]
    return table(head, rows)
