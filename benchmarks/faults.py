"""Acquire while one node of five is hung (SIGSTOP) or dead (SIGKILL)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.contestants import FIELD, OURS, Contestant, Gone, field
from benchmarks.stats import ms, quantile, table
from celery_redlock.server import LocalServer

# One node: nothing to survive. Fenced, or by lock(): the same.
ENTRIES = [entry for entry in FIELD if entry.name not in ("redis-lock", "fenced", "lock")]
STATES = ("healthy", "hung", "dead")


class Record:
    """What one contestant did in one state."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.episodes: list[list[float]] = []
        self.failed = 0
        self.never_returned = False

    def figures(self, healthy: Record) -> dict[str, Any]:
        together = [seconds for episode in self.episodes for seconds in episode]
        figures = {
            "calls": len(together),
            "failed": self.failed,
            "never_returned": self.never_returned,
        }
        if together:
            figures |= {
                "p50": median(together),
                "p99": median(quantile(episode, 0.99) for episode in self.episodes),
                "first": median(self.first),
                "first_max": max(self.first),
                # Side by side, so that a busy moment of the machine spoils one episode only.
                "p99_to_healthy": median(
                    quantile(mine, 0.99) / quantile(before, 0.99)
                    for mine, before in zip(self.episodes, healthy.episodes, strict=False)
                ),
            }
        return figures


def _ask(contestant: Contestant, record: Record, size: int, budget: float) -> None:
    """Measure the first acquire after the fault, then `size` more or `budget` seconds of them."""
    if record.never_returned:
        return
    try:
        # The child breaks a call off after 2 s; only one that cannot be broken off, or whose
        # releases hang too, meets this limit.
        timeout = 15 + 2 * budget
        record.first += contestant.ask(f"acquire 1 {budget}", timeout)["seconds"]
        answer = contestant.ask(f"acquire {size} {budget}", timeout)
        record.episodes.append(answer["seconds"])
        record.failed += answer["failed"]
    except Gone:
        record.never_returned = True


def measure(
    servers: Sequence[LocalServer], episodes: int, size: int, budget: float
) -> dict[str, Any]:
    """Return p50, p99 and the first acquire in seconds by contestant and state.

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
        name: {state: record.figures(by_state["healthy"]) for state, record in by_state.items()}
        for name, by_state in records.items()
    }


def _cells(state: dict[str, Any]) -> list[str]:
    if state["never_returned"]:
        return ["never returned", "", ""]
    fails = state["failed"] > state["calls"] // 2
    ratio = "fails" if fails else f"{state['p99_to_healthy']:.2f}"
    return [ratio, ms(state["p99"]), f"{ms(state['first'])} / {ms(state['first_max'])}"]


def show(figures: dict[str, Any]) -> str:
    rows = []
    for entry in ENTRIES:
        if not (states := figures.get(entry.name)):
            continue
        row = [entry.label, ms(states["healthy"]["p99"])]
        for state in ("hung", "dead"):
            row += _cells(states[state])
        rows.append(row)
        if entry is OURS:
            rows.append(["  target", "", "<= 1.10", "", "<= 5", "<= 1.10", "", "<= 5"])
    head = ["acquire, one node of five at fault", "healthy p99"]
    for state in ("hung", "dead"):
        head += [f"{state}: x healthy", "p99 ms", "first ms, max"]
    return table(head, rows)
