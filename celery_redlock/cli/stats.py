"""`redlock stats`: how much is locked, by task."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import click

from ..protocol.values import printable
from ..survey.durations import span
from ..survey.models import Entry
from ..survey.snapshot import survey
from .context import Site, on_site, table
from .formatting import counted, say_away
from .options import USUAL_KINDS, timeout_option
from .waiting import look_with_parked

__all__ = ["command"]


@dataclass
class Tally:
    """How much one task has: locks, reservations, waiters for its locks, and its oldest lock.

    `oldest` is in seconds; None if the task holds none.
    """

    locks: int = 0
    reservations: int = 0
    waiting: int = 0
    oldest: float | None = None


@click.command("stats")
@click.option("--match", default="*", metavar="GLOB", help="Count only resources whose name fits.")
@timeout_option()
@on_site
def command(site: Site, match: str, timeout: float) -> None:
    """Count locks and reservations by task.

    And waiters (with an app), what is odd, and how fast the nodes answer.
    """
    redlock, known = site.redlock, site.app is not None
    seen, unasked = look_with_parked(
        site, lambda: survey(redlock, match, kinds=USUAL_KINDS, timeout=timeout)
    )
    say_away(seen)
    tallies = _tallies(seen.entries)
    splits = sum(entry.split for entry in seen.entries)
    leaks = sum(entry.leaked for entry in seen.entries)
    foreign = sum(entry.kind == "foreign" for entry in seen.entries)
    data = {
        "at": seen.at,
        "tasks": [{"task": task, **vars(tally)} for task, tally in tallies.items()],
        "splits": splits,
        "leaks": leaks,
        "foreign": foreign,
        "nodes": [look.data() for look in seen.looks],
        "unasked": unasked,
    }
    rows = [
        (
            *(task or "(no task)", tally.locks, tally.reservations),
            "-" if tally.oldest is None else span(tally.oldest),
            *((tally.waiting,) if known else ()),
        )
        for task, tally in tallies.items()
    ]
    nodes = [
        (look.name, f"{look.rtt * 1e3:.2f} ms" if look.reachable else "-", look.error)
        for look in seen.looks
    ]
    columns = ("task", "locks", "reservations", "oldest", *(("waiting",) if known else ()))
    odd = f"{counted(splits, 'split vote')}, {counted(leaks, 'key')} without a ttl, {foreign} not"
    parts = [
        table(columns, rows) if rows else "nothing is held",
        f"{odd} of ours",
        table(("node", "round trip", "error"), nodes),
        *([printable(unasked)] if known and unasked else []),
    ]
    site.say(data, "\n\n".join(parts))


def _tallies(entries: Iterable[Entry]) -> dict[str, Tally]:
    """Return how much each task has; under "" what is held outside tasks."""
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
        if entry.resource not in queues:  # of several slots, once
            queues.add(entry.resource)
            tally.waiting += entry.waiting
    return dict(sorted(tallies.items()))
