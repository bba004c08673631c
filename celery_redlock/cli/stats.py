"""`redlock stats`: count locks by task."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import click

from ..protocol.texts import counted, printable
from ..survey.durations import span
from ..survey.models import Entry, Survey
from ..survey.snapshot import survey
from .context import USUAL_KINDS, Site, on_site, table, timeout_option
from .formatting import print_unreachable

__all__ = ["command"]


@dataclass
class Tally:
    """Totals of one task."""

    locks: int = 0
    reservations: int = 0
    waiting: int = 0  # waiters for its locks
    oldest: float | None = None  # seconds that its oldest lock has been held; None without a lock


@click.command("stats")
@click.option("--match", default="*", metavar="GLOB", help="Count only matching resources.")
@timeout_option()
@on_site
def command(site: Site, match: str, timeout: float) -> None:
    """Count locks and reservations by task.

    It also shows waiters (with an app), oddities such as keys without a ttl, and how fast the nodes
    answer.
    """
    redlock = site.redlock
    site.choose(("--match", match if match != "*" else None))

    def look() -> Survey:
        return survey(redlock, match, kinds=USUAL_KINDS, timeout=timeout)

    seen, unasked = site.with_parked(look)
    print_unreachable(seen)
    tallies = _tallies(seen.entries)
    odd = {
        "splits": sum(entry.split for entry in seen.entries),
        "leaks": sum(entry.leaked for entry in seen.entries),
        "foreign": sum(entry.kind == "foreign" for entry in seen.entries),
    }
    data = {
        "at": seen.at,
        "tasks": [{"task": task, **vars(tally)} for task, tally in tallies.items()],
        **odd,
        "nodes": [look.data() for look in seen.looks],
        "unasked": unasked,
    }
    columns = ["task", "locks", "reservations", "oldest", "waiting"]
    rows = [
        [task or "(no task)", t.locks, t.reservations, _age(t), t.waiting]
        for task, t in tallies.items()
    ]
    if site.app is None:  # without workers to ask, the waiters are not known
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    nodes = [
        (look.name, f"{look.rtt * 1e3:.2f} ms" if look.reachable else "-", look.error)
        for look in seen.looks
    ]
    parts = [
        table(columns, rows) if rows else site.nothing,
        f"{counted(odd['splits'], 'split vote')}, {counted(odd['leaks'], 'key')} without a ttl,"
        f" {odd['foreign']} not of ours",
        table(("node", "round trip", "error"), nodes),
        *([printable(unasked)] if site.app is not None and unasked else []),
    ]
    site.say(data, "\n\n".join(parts))


def _age(tally: Tally) -> str:
    return "-" if tally.oldest is None else span(tally.oldest)


def _tallies(entries: Iterable[Entry]) -> dict[str, Tally]:
    """Return the totals of each task; locks held outside tasks are under ""."""
    tallies: dict[str, Tally] = {}
    queues = set()
    for entry in entries:
        if entry.owner is None:
            continue
        tally = tallies.setdefault(entry.owner.task, Tally())
        if entry.kind == "reservation":
            tally.reservations += 1
            continue
        tally.locks += 1
        tally.oldest = max(entry.held_for or 0.0, tally.oldest or 0.0)
        if entry.resource not in queues:  # all slots share one wait queue: count it once
            queues.add(entry.resource)
            tally.waiting += entry.waiting
    return dict(sorted(tallies.items()))
