"""The table of the issue on speed: each figure, how far it should get, how far anything can."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.stats import table

Figure = Callable[[dict[str, Any]], float]
TWO, ONE = ("latency", "on two cores"), ("latency", "all on one core")
FIVE, SINGLE = "celery, five nodes", "celery, one node"


class Row(NamedTuple):
    name: str
    goal: str
    now: Figure
    limit: Figure | float = 1.0


def at(*path: str) -> Figure:
    """Return a look-up of one figure in the results."""

    def look(results: dict[str, Any]) -> float:
        found: Any = results
        for key in path:
            found = found[key]
        return float("nan" if found is None else found)

    return look


ROWS = (
    Row(
        "acquire + release p50, all on one core, x bare",
        "<= 1.6",
        at(*ONE, "ours", "ratio"),
        at(*ONE, "connloop", "ratio"),
    ),
    Row(
        "the same on two cores, x bare",
        "<= 1.4",
        at(*TWO, "ours", "ratio"),
        at(*TWO, "connloop", "ratio"),
    ),
    Row(
        "client CPU of a pair, one core, x bare",
        "<= 2",
        at(*ONE, "ours", "cpu_ratio"),
        at(*ONE, "connloop", "cpu_ratio"),
    ),
    Row(
        "Celery: worker CPU added to plain by five nodes, x what bare adds",
        "<= 2.0",
        at(FIVE, "ours", "cpu_to_bare"),
    ),
    Row(
        "worked/s, five nodes, x plain",
        ">= 0.82",
        at(FIVE, "ours", "to_plain"),
        at(FIVE, "bare", "to_plain"),
    ),
    Row(
        "worked/s, one node, x plain",
        ">= 0.95",
        at(SINGLE, "ours", "to_plain"),
        at(SINGLE, "bare", "to_plain"),
    ),
    Row(
        "published/s with until_executing, five nodes, x plain",
        ">= 0.78",
        at("publishing", "ours", "ratio"),
        at("publishing", "bare", "ratio"),
    ),
    Row(
        "hand-off release -> waiter's acquire returns, p50, x bare woken",
        "<= 1.2",
        at("waiting", "ours", "ratio"),
    ),
    Row(
        "32 processes once each, 1 ms section, x bare woken",
        "<= 1.3",
        at("waiting", "ours", "crowd_ratio"),
    ),
    Row(
        "closed loop of 8 processes, sections/s, x bare woken",
        ">= 0.85",
        at("waiting", "ours", "wins_ratio"),
    ),
    Row(
        "client CPU per contended section, 8 processes, x bare woken",
        "<= 1.6",
        at("waiting", "ours", "cpu_ratio"),
    ),
    Row(
        "bodies of 20 ms on one key, two workers of two, x ideal",
        "<= 1.12",
        lambda results: results["hot key"]["parked"]["total"] / results["hot key"]["ideal"],
    ),
    Row(
        "leases alive, ttl 10 s: % of a core",
        "<= 2",
        lambda results: 100 * results["leases"]["ours"]["cpu_share"],
        lambda results: 100 * results["leases"]["bare"]["cpu_share"],
    ),
    Row(
        "leases alive: MiB more",
        "<= 10",
        lambda results: (results["leases"]["ours"]["memory"] or math.nan) / 2**20,
        lambda results: (results["leases"]["bare"]["memory"] or math.nan) / 2**20,
    ),
    Row(
        "acquiring these leases, one after the other, x bare",
        "<= 1.8",
        at("leases", "ours", "acquiring_ratio"),
    ),
    Row(
        "a producer that declares one SingletonTask, over a plain task, ms",
        "<= 10",
        lambda results: 1000 * results["import"]["a producer declares a SingletonTask"],
        0.0,
    ),
    Row(
        "one of five nodes hung, p99 x healthy",
        "<= 1.1",
        at("faults", "ours", "hung", "p99_to_healthy"),
    ),
    Row(
        "one of five nodes dead, p99 x healthy",
        "<= 1.1",
        at("faults", "ours", "dead", "p99_to_healthy"),
    ),
)


def rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows whose sections ran."""
    found = []
    for row in ROWS:
        try:
            now = row.now(results)
        except KeyError:
            continue
        limit = row.limit(results) if callable(row.limit) else row.limit
        found.append({"figure": row.name, "now": now, "goal": row.goal, "limit": limit,
                      "met": met(now, row.goal)})  # fmt: skip
    return found


def met(now: float, goal: str) -> bool:
    """Return whether a goal, as "<= 1.6", is reached by what is shown."""
    relation, number = goal.split()
    shown = round(now, 2)
    return shown <= float(number) if relation == "<=" else shown >= float(number)


def show(found: list[dict[str, Any]]) -> str:
    lines = [
        [row["figure"], f"{row['now']:.2f}", row["goal"], "" if row["met"] else "missed",
         f"{row['limit']:.2f}"]
        for row in found
    ]  # fmt: skip
    return table(["issue rows", "now", "goal", "", "limit"], lines)
