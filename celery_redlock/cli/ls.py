"""`redlock ls`: what is held and reserved."""

from __future__ import annotations

import math
from collections.abc import Sequence

import click

from ..entry import Entry
from ..survey import survey
from .site import Site, on_site, table
from .words import (
    COLUMNS,
    IN_LINE,
    PARKED,
    away,
    choosing,
    chosen,
    counted,
    kinds_of,
    nodes_data,
    row,
)

__all__ = ["command", "sorted_by"]

ORDERS = ("key", "task", "age", "ttl", "waiting")


@click.command("ls")
@choosing
@click.option(
    "--sort",
    type=click.Choice(ORDERS),
    default="key",
    show_default=True,
    help="age: longest held first; ttl: first to expire first; waiting: longest line first.",
)
@on_site
def command(
    site: Site,
    match: str,
    task: str | None,
    kinds: Sequence[str],
    everything: bool,
    timeout: float,
    sort: str,
) -> None:
    """Locks that are held, and reservations.

    A snapshot. Exit code 0, also if there are none; 3 if too few nodes answer.
    """
    seen = survey(site.redlock, match, kinds=kinds_of(kinds, everything), timeout=timeout)
    entries = sorted_by(chosen(seen.entries, task), sort)
    away(seen)
    data = {
        "at": seen.at,
        "nodes": nodes_data(seen.looks),
        "entries": [entry.data() for entry in entries],
    }
    site.say(data, lambda: _text(entries, site.app is not None))


def sorted_by(entries: list[Entry], order: str) -> list[Entry]:
    """Entries, which come by key, in another order."""
    return sorted(entries, key=_KEYS[order]) if order in _KEYS else entries


_KEYS = {
    "task": lambda e: e.owner.task if e.owner is not None else "",
    "age": lambda e: -(e.held_for or 0.0),
    "ttl": lambda e: min((ttl for ttl in e.ttls if ttl is not None), default=math.inf),
    "waiting": lambda e: -e.waiting,
}


def _text(entries: list[Entry], has_workers: bool) -> str:
    if not entries:
        return "nothing is held"
    rows = [[*row(entry), str(entry.waiting)] for entry in entries]
    said = [table([*COLUMNS, IN_LINE], rows), _sum(entries)]
    return "\n".join([*said, PARKED] if has_workers else said)


def _sum(entries: list[Entry]) -> str:
    kinds = [entry.kind for entry in entries]
    return ", ".join(_counted(kinds.count(kind), kind) for kind in dict.fromkeys(kinds))


def _counted(count: int, kind: str) -> str:
    return f"{count} {kind}" if kind == "foreign" else counted(count, kind)
