"""`redlock ls`: what is held and reserved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import click

from ..config.options import GLOBAL
from ..survey.models import Entry
from ..survey.snapshot import survey
from .context import Site, on_site, table
from .formatting import (
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
    from ..doctor.votes import ask, votes_in

    redlock = site.redlock
    with ThreadPoolExecutor(1) as pool:  # a node that hangs costs the timeout once
        told = pool.submit(ask, redlock, timeout)
        seen = survey(redlock, match, kinds=kinds_of(kinds, everything), timeout=timeout)
        left = votes_in(told.result(), len(redlock.nodes), site.app)
    entries = sorted_by(chosen(seen.entries, task), sort)
    away(seen)
    data = {
        "at": seen.at,
        "nodes": nodes_data(seen.looks),
        "entries": [entry.data() for entry in entries],
        "votes_in": left,
    }
    site.say(data, lambda: "\n".join(_text(entries, left, has_app=site.app is not None)))


def sorted_by(entries: list[Entry], order: str) -> list[Entry]:
    """Entries, which come by key, in another order."""
    return sorted(entries, key=_KEYS[order]) if order in _KEYS else entries


_KEYS = {
    "task": lambda e: e.owner.task if e.owner is not None else "",
    "age": lambda e: -(e.held_for or 0.0),
    "ttl": lambda e: min((ttl for ttl in e.ttls if ttl is not None), default=math.inf),
    "waiting": lambda e: -e.waiting,
}


def _text(entries: list[Entry], left: float | None, *, has_app: bool) -> Iterator[str]:
    if entries:
        yield table([*COLUMNS, IN_LINE], [[*row(entry), str(entry.waiting)] for entry in entries])
        yield _sum(entries)
        if has_app:
            yield PARKED
    else:
        yield "nothing is held"
    if left is not None:
        default = f" (for the default ttl of {GLOBAL['ttl'].default:g} s; -A APP knows its own)"
        yield (
            f"no quorum has a vote for another {math.ceil(left)} s{'' if has_app else default}:"
            " nodes that were started a short time ago may have forgotten locks; tasks then go on"
            " by themselves"
        )


def _sum(entries: list[Entry]) -> str:
    kinds = [entry.kind for entry in entries]
    return ", ".join(_counted(kinds.count(kind), kind) for kind in dict.fromkeys(kinds))


def _counted(count: int, kind: str) -> str:
    return f"{count} {kind}" if kind == "foreign" else counted(count, kind)
