"""What telling of locks costs: with nobody listening, with receivers, with traces."""

from __future__ import annotations

import random
import timeit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.stats import paired_ratio, table
from celery_redlock import Redlock
from celery_redlock.events import has_listeners
from celery_redlock.messages import signals

EACH = 150
"""Locks in one round."""
LOOKS = 4
"""When granted, when refused or told, when released: at most."""
WAYS = {
    "nobody": "nobody listens",
    "lost": "one receiver, of lock_lost",
    "all": "a receiver of each signal",
    "traced": "OpenTelemetry's spans, thrown away",
}


def measure(urls: Sequence[str], rounds: int) -> dict[str, Any]:
    """Ratios to nobody listening; and the seconds that are spent on finding that out."""
    redlock = Redlock(urls, restart_guard="off")
    seconds: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    try:
        for _ in range(EACH):
            _lock(redlock)
        for _ in range(rounds):
            for way in random.sample(list(WAYS), len(WAYS)):
                with _listening(way):
                    seconds[way].append([_lock(redlock) for _ in range(EACH)])
    finally:
        redlock.close()
    one = median(median(values) for values in seconds["nobody"])
    ratios = {way: paired_ratio(seconds[way], seconds["nobody"]) for way in WAYS}
    return {"acquire and release": one, "ratios": ratios, "unheard": _unheard() / one}


def show(figures: dict[str, Any]) -> str:
    rows = [[WAYS[way], f"{ratio:.2f}"] for way, ratio in figures["ratios"].items()]
    part = f"{figures['unheard']:.3%}"
    rows.append(["to find that nobody listens, part of acquire + release", part])
    return table(["telling of locks", "x nobody"], rows)


def _lock(redlock: Redlock) -> float:
    begin = perf_counter()
    with redlock.lock("r"):
        pass
    return perf_counter() - begin


def _unheard() -> float:
    """Seconds that one lock spends on finding that nobody listens."""
    times = 200_000
    return LOOKS * min(timeit.repeat(has_listeners, number=times, repeat=5)) / times


@contextmanager
def _listening(way: str) -> Iterator[None]:
    def receive(**_more: Any) -> None: ...

    names = {"lost": ["lock_lost"], "all": signals.__all__}.get(way, [])
    for name in names:
        getattr(signals, name).connect(receive)
    if way == "traced":
        from opentelemetry.sdk.trace import TracerProvider

        from celery_redlock import tracing

        tracing.instrument(TracerProvider(shutdown_on_exit=False))
    try:
        yield
    finally:
        for name in names:
            getattr(signals, name).disconnect(receive)
        if way == "traced":
            tracing.uninstrument()
