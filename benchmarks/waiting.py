"""Waiting for a lock that is held: how soon it is handed on, by how many tries, and how fairly."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from random import Random
from statistics import median
from typing import Any

import redis

from benchmarks.contestants import BARE, FIELD, OURS, Contestant, Entry
from benchmarks.environments import Unavailable
from benchmarks.stats import ms, paired_ratio, quantile, table

CROWD, CLIENTS = 32, 8
SECTION = 0.001
"""Seconds for which each has the lock in a rush, as in `adapters/child.py`."""
WAITERS = tuple(one for one in FIELD if one.name in (
    "bare", "ours", "redlock-ng", "redlock-py", "pottery", "redis-lock"
))  # fmt: skip


def measure(
    urls: Sequence[str], handed: int, crowds: int, seconds: float, peers: bool = True
) -> dict[str, Any]:
    """Measure those who can wait, in turns.

    Args:
        urls: The nodes.
        handed: How often the lock is handed to one waiter, by each contestant.
        crowds: How often it goes through a whole crowd.
        seconds: For how long some clients take turns.
        peers: Whether the other libraries take part.
    """
    figures: dict[str, Any] = {}
    entries = WAITERS if peers else (BARE, OURS)
    with contextlib.ExitStack() as stack:
        teams = []
        for entry in entries:
            try:
                teams.append(stack.enter_context(_team(entry, urls, 2)))
            except Unavailable as why:
                print(f"skipped: {entry.label}: {why}", flush=True)
        handovers = _hand_over(teams, handed)
    for name, values in handovers.items():
        together = [value for one in values for value in one]
        figures[name] = {
            "handover": median(together),
            "handover_p99": quantile(together, 0.99),
            "ratio": paired_ratio(values, handovers[BARE.name]),
        }
    for entry in entries:
        if entry.name in figures:
            with _team(entry, urls, CROWD) as team:
                figures[entry.name] |= _crowd(team, urls, crowds)
                figures[entry.name] |= _turns(team[:CLIENTS], urls, seconds)
    return figures


def show(figures: dict[str, Any]) -> str:
    rows = []
    for entry in WAITERS:
        f = figures.get(entry.name)
        if f is None:
            continue
        split = f"{f['split']:.1%}" if "split" in f else ""
        rows.append([
            entry.label,
            *(ms(f["handover"]), ms(f["handover_p99"]), f"{f['ratio']:.1f}"),
            *(f"{f['crowd'] * 1000:.0f}", f"{f['crowd_ratio']:.2f}", f"{f['crowd_tries']:.1f}"),
            *(f"{f['wins']:.0f}", f"{f['fairness']:.1f}", f"{f['tries']:.1f}", split),
        ])  # fmt: skip
    head = [
        "waiting, five nodes",
        *("handed on, p50 ms", "p99 ms", "x bare"),
        *(f"{CROWD} once each, ms", "x ideal", "tries a win"),
        *(f"{CLIENTS} in turns, wins/s", "max/min", "tries a win", "split"),
    ]
    targets = ["targets", "<= 1.000", "", "", "", "<= 1.70", "", "", "<= 3.0", "", "< 10.0%"]
    return table(head, [*rows, targets])


@contextlib.contextmanager
def _team(entry: Entry, urls: Sequence[str], size: int) -> Iterator[list[Contestant]]:
    with contextlib.ExitStack() as stack:
        team = []
        for _ in range(size):
            team.append(Contestant(entry, urls))
            stack.callback(team[-1].close)
        yield team


def _hand_over(teams: Sequence[Sequence[Contestant]], count: int) -> dict[str, list[list[float]]]:
    """Seconds from the begin of a release until the one who waits has the lock, by contestant."""
    order = Random(1)
    took: dict[str, list[list[float]]] = {team[0].entry.name: [] for team in teams}
    for number in range(count):
        for holder, waiter in order.sample(list(teams), len(teams)):
            key = f"handover:{holder.entry.name}:{number}"
            holder.ask(f"take {key}")
            waiter.tell(f"wait {key}")
            time.sleep(order.uniform(0.05, 0.3))  # until it waits, and out of step with any poll
            freed = holder.ask("free")["at"]
            took[holder.entry.name].append([waiter.answer()["at"] - freed])
    return took


def _crowd(team: Sequence[Contestant], urls: Sequence[str], count: int) -> dict[str, float]:
    """A crowd that all wants the lock once: until the last has had it."""
    took, tries = [], []
    for number in range(-1, count):  # the first warms it up
        before = _writes(urls)
        answers = _rush(team, f"crowd:{team[0].entry.name}:{number}", 60.0, 1)
        if number >= 0:
            wins = sum(len(answer["at"]) for answer in answers)
            took.append(max(answer["end"] for answer in answers) - answers[0]["start"])
            tries.append((_writes(urls) - before) / wins)
            if wins < CROWD:
                took[-1] = float("inf")
    ideal = CROWD * SECTION
    return {
        "crowd": median(took),
        "crowd_ratio": median(took) / ideal,
        "crowd_tries": median(tries),
    }


def _turns(team: Sequence[Contestant], urls: Sequence[str], seconds: float) -> dict[str, float]:
    """Some clients that want the lock again as soon as they have given it back."""
    before = _writes(urls)
    answers = _rush(team, f"turns:{team[0].entry.name}", seconds, 10**9)
    wins = [len(answer["at"]) for answer in answers]
    figures = {
        "wins": sum(wins) / seconds,
        "fairness": max(wins) / max(1, min(wins)),
        "tries": (_writes(urls) - before) / sum(wins),
    }
    attempts = sum(answer.get("attempts", 0) for answer in answers)
    if attempts:
        figures["split"] = sum(answer["split"] for answer in answers) / attempts
    return figures


def _rush(team: Sequence[Contestant], key: str, seconds: float, most: int) -> list[dict[str, Any]]:
    start = time.monotonic() + 0.3
    for one in team:
        one.tell(f"rush {key} {start} {seconds} {most}")
    answers = [one.answer(seconds + 60.0) for one in team]
    return [{**answer, "start": start} for answer in answers]


def _writes(urls: Sequence[str]) -> int:
    """Attempts so far, each of which is one SET on every node it asks; the first is always one."""
    with redis.Redis.from_url(urls[0]) as node:
        return int(node.info("commandstats").get("cmdstat_set", {}).get("calls", 0))
