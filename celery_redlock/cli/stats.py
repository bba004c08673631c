"""`redlock stats`: how much is locked, by task."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import click

from ..survey.models import Entry, Survey
from ..survey.snapshot import survey
from .context import Site, on_site, table
from .formatting import IN_LINE, PARKED, away, counted, lines, nodes_data, span, timeout_option

__all__ = ["Tally", "command", "tallied"]


@dataclass
class Tally:
    """How much one task has.

    Attributes:
        locks: How many it holds.
        reservations: How many of it are reserved.
        waiting: How many stand in line for what it holds.
        oldest: Seconds for which the oldest of its locks has been held; None if it holds none.
    """

    locks: int = 0
    reservations: int = 0
    waiting: int = 0
    oldest: float | None = None


@click.command("stats")
@click.option("--match", default="*", metavar="GLOB", help="Only resources whose whole name fits.")
@timeout_option
@on_site
def command(site: Site, match: str, timeout: float) -> None:
    """Locks, reservations and waiters per task; what is odd; how fast the nodes answer."""
    kinds = ("lock", "reservation", "foreign")
    seen = survey(site.redlock, match, kinds=kinds, timeout=timeout)
    away(seen)
    tallies = tallied(seen.entries)
    odd = {
        "splits": sum(entry.split for entry in seen.entries),
        "leaks": sum(entry.leaked for entry in seen.entries),
        "foreign": sum(entry.kind == "foreign" for entry in seen.entries),
    }
    data: dict[str, Any] = {
        "at": seen.at,
        "tasks": [{"task": task, **vars(tally)} for task, tally in tallies.items()],
        **odd,
        "nodes": nodes_data(seen.looks),
    }
    site.say(data, lambda: _text(tallies, odd, seen, site.app is not None))


def tallied(entries: Iterable[Entry]) -> dict[str, Tally]:
    """How much each task has; under "" what is held outside tasks."""
    tallies: dict[str, Tally] = {}
    counted_lines = set()
    for entry in entries:
        if entry.owner is None:
            continue
        tally = tallies.setdefault(entry.owner.task, Tally())
        if entry.kind == "reservation":
            tally.reservations += 1
            continue
        tally.locks += 1
        tally.oldest = max(entry.held_for or 0.0, tally.oldest or 0.0)
        if entry.resource not in counted_lines:  # of several slots, once
            counted_lines.add(entry.resource)
            tally.waiting += entry.waiting
    return dict(sorted(tallies.items()))


def _text(tallies: dict[str, Tally], odd: dict[str, int], seen: Survey, has_workers: bool) -> str:
    rows = [
        (
            *(task or "(no task)", tally.locks, tally.reservations, tally.waiting),
            "-" if tally.oldest is None else span(tally.oldest),
        )
        for task, tally in tallies.items()
    ]
    nodes = [
        (look.name, "-" if math.isnan(look.rtt) else f"{look.rtt * 1e3:.2f} ms", look.error)
        for look in seen.looks
    ]
    held = table(["task", "locks", "reservations", IN_LINE, "oldest"], rows)
    found = [
        counted(odd["splits"], "split vote"),
        f"{counted(odd['leaks'], 'key')} without a ttl",
        f"{odd['foreign']} not of ours",
    ]
    return "\n".join(
        [
            held if rows else "nothing is held",
            "",
            lines(", ".join(found)),
            "",
            table(["node", "round trip", "error"], nodes),
            *(["", PARKED] if has_workers else []),
        ]
    )
