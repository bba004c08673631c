"""Acquire while one node of five is hung (SIGSTOP) or dead (SIGKILL)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.contestants import FIELD, OURS, Contestant, Gone, field
from benchmarks.stats import ms, quantile, table
from celery_redlock.server import LocalServer

ENTRIES = [entry for entry in FIELD if entry.name != "redis-lock"]  # one node: nothing to survive
STATES = ("healthy", "hung", "dead")


class Record:
    """What one contestant did in one state."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.seconds: list[float] = []
        self.failed = 0
        self.never_returned = False

    def figures(self) -> dict[str, Any]:
        return {
            "p50": median(self.seconds) if self.seconds else None,
            "p99": quantile(self.seconds, 0.99) if self.seconds else None,
            "first": max(self.first) if self.first else None,
            "calls": len(self.seconds),
            "failed": self.failed,
            "never_returned": self.never_returned,
        }


def _ask(contestant: Contestant, record: Record, size: int, budget: float) -> None:
    """Measure the first acquire after the fault, then `size` more or `budget` seconds of them."""
    if record.never_returned:
        return
    try:
        for command, seconds in (
            (f"acquire 1 {budget}", record.first),
            (f"acquire {size} {budget}", record.seconds),
        ):
            # The child breaks a call off after 2 s; only one that cannot be broken off, or whose
            # releases hang too, meets this limit.
            answer = contestant.ask(command, timeout=15 + 2 * budget)
            seconds += answer["seconds"]
            record.failed += answer["failed"]
    except Gone:
        record.never_returned = True


def measure(
    servers: Sequence[LocalServer], episodes: int, size: int, budget: float
) -> dict[str, Any]:
    """Return p50, p99 and the slowest first acquire in seconds by contestant and state.

    Each episode hits another node, and each state is measured next to a healthy one, with all
    contestants in turn; every state starts with fresh clients.
    """
    records: dict[str, dict[str, Record]] = {}
    with field([server.url for server in servers], ENTRIES) as contestants:
        for contestant in contestants:
            records[contestant.entry.name] = {state: Record() for state in STATES}

        def ready() -> list[Contestant]:
            left = []
            for contestant in contestants:
                if any(r.never_returned for r in records[contestant.entry.name].values()):
                    continue
                contestant.ask("reset")
                contestant.ask("acquire 50 5")
                left.append(contestant)
            return left

        def all_in(state: str, left: Sequence[Contestant]) -> None:
            for contestant in left:
                _ask(contestant, records[contestant.entry.name][state], size, budget)

        for episode in range(episodes):
            victim = servers[episode % len(servers)]
            left = ready()
            all_in("healthy", left)
            victim.pause()
            try:
                all_in("hung", left)
            finally:
                victim.resume()
            left = ready()
            victim.kill()
            try:
                all_in("dead", left)
            finally:
                victim.start()
    return {
        name: {state: record.figures() for state, record in by_state.items()}
        for name, by_state in records.items()
    }


def _cells(state: dict[str, Any], healthy: dict[str, Any]) -> list[str]:
    if state["never_returned"]:
        return ["never returned", "", ""]
    if state["failed"] > state["calls"] // 2:
        return ["fails", ms(state["p50"]), ms(state["first"])]
    return [f"{state['p99'] / healthy['p99']:.2f}", ms(state["p99"]), ms(state["first"])]


def show(figures: dict[str, Any]) -> str:
    rows = []
    for entry in ENTRIES:
        if not (states := figures.get(entry.name)):
            continue
        row = [entry.label, ms(states["healthy"]["p99"])]
        for state in ("hung", "dead"):
            row += _cells(states[state], states["healthy"])
        rows.append(row)
        if entry is OURS:
            rows.append(["  target", "", "<= 1.50", "", "<= 5", "<= 1.50", "", "<= 5"])
    head = ["acquire, one node of five at fault", "healthy p99"]
    for state in ("hung", "dead"):
        head += [f"{state}: x healthy", "p99 ms", "first ms"]
    return table(head, rows)
