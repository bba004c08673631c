"""The table of the issue on speed: each figure, how far it should get, how far anything can."""

from __future__ import annotations

from typing import Any

from benchmarks.stats import table

TWO, ONE = ("latency", "on two cores"), ("latency", "all on one core")
FIVE, SINGLE = "celery, five nodes", "celery, one node"
WAITING, LEASES, FAULTS = ("waiting", "ours"), "leases", ("faults", "ours")
Limit = float | tuple[str, ...]

# What is measured, its goal, where it is in the results and in which unit, and where its limit is.
ROWS: tuple[tuple[str, str, tuple[str, ...], float, Limit], ...] = (
    ("acquire + release p50, all on one core, x bare",
     "<= 1.6", (*ONE, "ours", "ratio"), 1, (*ONE, "connloop", "ratio")),
    ("the same on two cores, x bare",
     "<= 1.4", (*TWO, "ours", "ratio"), 1, (*TWO, "connloop", "ratio")),
    ("client CPU of a pair, one core, x bare",
     "<= 2", (*ONE, "ours", "cpu_ratio"), 1, (*ONE, "connloop", "cpu_ratio")),
    ("Celery: worker CPU added to plain by five nodes, x what bare adds",
     "<= 2.0", (FIVE, "ours", "cpu_to_bare"), 1, 1.0),
    ("worked/s, five nodes, x plain",
     ">= 0.82", (FIVE, "ours", "to_plain"), 1, (FIVE, "bare", "to_plain")),
    ("worked/s, one node, x plain",
     ">= 0.95", (SINGLE, "ours", "to_plain"), 1, (SINGLE, "bare", "to_plain")),
    ("published/s with until_executing, five nodes, x plain",
     ">= 0.78", ("publishing", "ours", "ratio"), 1, ("publishing", "bare", "ratio")),
    ("hand-off release -> waiter's acquire returns, p50, x bare woken",
     "<= 1.2", (*WAITING, "ratio"), 1, 1.0),
    ("32 processes once each, 1 ms section, x bare woken",
     "<= 1.3", (*WAITING, "crowd_ratio"), 1, 1.0),
    ("closed loop of 8 processes, sections/s, x bare woken",
     ">= 0.85", (*WAITING, "wins_ratio"), 1, 1.0),
    ("client CPU per contended section, 8 processes, x bare woken",
     "<= 1.6", (*WAITING, "cpu_ratio"), 1, 1.0),
    ("bodies of 20 ms on one key, two workers of two, x ideal",
     "<= 1.12", ("hot key", "parked", "total_ratio"), 1, 1.0),
    ("10 000 leases alive, ttl 10 s, % of a core",
     "<= 2", (LEASES, "ours", "cpu_share"), 0.01, (LEASES, "bare", "cpu_share")),
    ("their memory, MiB",
     "<= 10", (LEASES, "ours", "memory"), 2**20, (LEASES, "bare", "memory")),
    ("acquiring them, one after the other, x bare",
     "<= 1.8", (LEASES, "ours", "acquiring_ratio"), 1, 1.0),
    ("a producer that declares one SingletonTask, over a plain task, ms",
     "<= 10", ("import", "a producer declares a SingletonTask"), 0.001, 0.0),
    ("one of five nodes hung, p99 x healthy",
     "<= 1.1", (*FAULTS, "hung", "p99_to_healthy"), 1, 1.0),
    ("one of five nodes dead, p99 x healthy",
     "<= 1.1", (*FAULTS, "dead", "p99_to_healthy"), 1, 1.0),
)  # fmt: skip


def rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows whose sections ran."""
    found = []
    for figure, goal, path, unit, limit in ROWS:
        if path[0] in results:
            most = limit if isinstance(limit, float) else _at(results, limit) / unit
            now = _at(results, path) / unit
            found.append({"figure": figure, "now": now, "goal": goal, "limit": most})
    return found


def _at(results: Any, path: tuple[str, ...]) -> float:
    for key in path:
        results = results.get(key) if results else None  # what could not be measured is not there
    return float("nan" if results is None else results)


def met(now: float, goal: str) -> bool:
    """Return whether what is shown reaches a goal, as "<= 1.6"."""
    relation, number = goal.split()
    shown = round(now, 2)
    return shown <= float(number) if relation == "<=" else shown >= float(number)


def show(found: list[dict[str, Any]]) -> str:
    lines = []
    for row in found:
        missed = "" if met(row["now"], row["goal"]) else "missed"
        lines.append([row["figure"], f"{row['now']:.2f}", row["goal"], missed,
                      f"{row['limit']:.2f}"])  # fmt: skip
    return table(["issue rows", "now", "goal", "", "limit"], lines)
