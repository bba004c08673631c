"""Waiting for a lock that is held: how soon it is handed on, by how many tries, and how fairly."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
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
    urls: Sequence[str], handed: int, rounds: int, seconds: float, peers: bool = True
) -> dict[str, Any]:
    """Measure those who can wait, in turns.

    Args:
        urls: The nodes.
        handed: How often the lock is handed to one waiter, by each contestant.
        rounds: How often it goes through a whole crowd, and how often some clients take turns.
        seconds: For how long they do.
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
        handovers = hand_over({team[0].entry.name: team for team in teams}, handed)
    for name, values in handovers.items():
        together = [value for one in values for value in one]
        figures[name] = {
            "handover": median(together),
            "handover_p99": quantile(together, 0.99),
            "ratio": paired_ratio(values, handovers[BARE.name]),
        }
    # We and the limit beside each other; the peers one by one, as each is a crowd of processes.
    others = [entry for entry in entries if entry.name in figures and entry not in (BARE, OURS)]
    for group in ([BARE, OURS], *([entry] for entry in others)):
        with contextlib.ExitStack() as stack:
            crowds = [stack.enter_context(_team(entry, urls, CROWD)) for entry in group]
            turns = rounds if group[0] is BARE else min(rounds, 2)
            rushed = _rushes(crowds, urls, turns, seconds)
        for name, of_one in rushed.items():
            figures[name] |= {figure: median(values) for figure, values in of_one.items()}
            for figure in ("crowd", "wins", "cpu") if group[0] is BARE else ():
                pairs = zip(of_one[figure], rushed[BARE.name][figure], strict=True)
                figures[name][f"{figure}_ratio"] = median(mine / its for mine, its in pairs)
    return figures


def _rushes(
    crowds: Sequence[Sequence[Contestant]], urls: Sequence[str], rounds: int, seconds: float
) -> dict[str, dict[str, list[float]]]:
    """What each contestant's rushes gave, round by round, in turns."""
    found: dict[str, dict[str, list[float]]] = {team[0].entry.name: {} for team in crowds}
    for number in range(-1, rounds):  # the first warms it up
        for team in crowds if number % 2 else crowds[::-1]:
            name = team[0].entry.name
            one = _crowd(team, urls, f"crowd:{name}:{number}")
            one |= _turns(team[:CLIENTS], urls, f"turns:{name}:{number}", seconds)
            if number >= 0:
                for figure, value in one.items():
                    found[name].setdefault(figure, []).append(value)
    return found


def show(figures: dict[str, Any]) -> str:
    def to_bare(figure: str) -> str:
        return f"{f[figure]:.2f}" if figure in f else ""

    rows = []
    for entry in WAITERS:
        f = figures.get(entry.name)
        if f is None:
            continue
        split = f"{f['split']:.1%}" if "split" in f else ""
        rows.append([
            entry.label,
            *(ms(f["handover"]), ms(f["handover_p99"]), f"{f['ratio']:.2f}"),
            *(f"{f['crowd'] * 1000:.0f}", to_bare("crowd_ratio"), f"{f['crowd_tries']:.1f}"),
            *(f"{f['wins']:.0f}", to_bare("wins_ratio"), f"{f['fairness']:.1f}"),
            *(f"{f['tries']:.1f}", split, f"{f['cpu'] * 1e6:.0f}", to_bare("cpu_ratio")),
        ])  # fmt: skip
    head = [
        "waiting, five nodes",
        *("handed on, p50 ms", "p99 ms", "x bare"),
        *(f"{CROWD} once each, ms", "x bare", "tries a win"),
        *(f"{CLIENTS} in turns, wins/s", "x bare", "max/min"),
        *("tries a win", "split", "CPU us a win", "x bare"),
    ]
    return table(head, rows)


@contextlib.contextmanager
def _team(entry: Entry, urls: Sequence[str], size: int) -> Iterator[list[Contestant]]:
    with contextlib.ExitStack() as stack:
        team = []
        for _ in range(size):
            team.append(Contestant(entry, urls))
            stack.callback(team[-1].close)
        yield team


def hand_over(
    teams: Mapping[Any, Sequence[Contestant]], count: int
) -> dict[Any, list[list[float]]]:
    """Seconds from the begin of a release until the one who waits has the lock, by team."""
    order = Random(1)
    took: dict[Any, list[list[float]]] = {team: [] for team in teams}
    for number in range(count):
        for team in order.sample(list(teams), len(teams)):
            holder, waiter = teams[team]
            key = f"handover:{holder.entry.name}:{number}"
            holder.ask(f"take {key}")
            waiter.tell(f"wait {key}")
            time.sleep(order.uniform(0.05, 0.3))  # until it waits, and out of step with any poll
            freed = holder.ask("free")["at"]
            took[team].append([waiter.answer()["at"] - freed])
    return took


def _crowd(team: Sequence[Contestant], urls: Sequence[str], key: str) -> dict[str, float]:
    """A crowd that all wants the lock once: until the last has had it."""
    before = _writes(urls)
    answers = _rush(team, key, 60.0, 1)
    wins = sum(len(answer["at"]) for answer in answers)
    took = max(answer["end"] for answer in answers) - answers[0]["start"]
    return {
        "crowd": took if wins == CROWD else float("inf"),
        "crowd_tries": (_writes(urls) - before) / wins,
    }


def _turns(
    team: Sequence[Contestant], urls: Sequence[str], key: str, seconds: float
) -> dict[str, float]:
    """Some clients that want the lock again as soon as they have given it back."""
    before = _writes(urls)
    answers = _rush(team, key, seconds, 10**9)
    wins = [len(answer["at"]) for answer in answers]
    figures = {
        "wins": sum(wins) / seconds,
        "cpu": sum(answer["cpu"] for answer in answers) / sum(wins),
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
