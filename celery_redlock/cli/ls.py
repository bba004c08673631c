"""`redlock ls`: what is held and reserved."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import click

from ..config.options import GLOBAL
from ..survey.models import Entry
from .context import Site, on_site, table
from .formatting import COLUMNS, PARKED, counted, row, say_away
from .options import Choice, choosing

__all__ = ["command"]

ORDERS: dict[str, Callable[[Entry], Any]] = {
    "key": lambda e: 0,  # they come so
    "task": lambda e: e.owner.task if e.owner is not None else "",
    "age": lambda e: -(e.held_for or 0.0),
    "ttl": lambda e: min((ttl for ttl in e.ttls if ttl is not None), default=math.inf),
    "waiting": lambda e: -e.waiting,
}


@click.command("ls")
@choosing
@click.option(
    "--sort",
    type=click.Choice(list(ORDERS)),
    default="key",
    show_default=True,
    help="age: longest held first; ttl: first to expire first; waiting: longest queue first.",
)
@on_site
def command(site: Site, choice: Choice, sort: str) -> None:
    """List locks that are held, and reservations.

    A snapshot. Exit code 0, also if there are none; 3 if too few nodes answer.
    """
    from ..doctor.votes import ask, votes_in

    redlock = site.redlock
    with ThreadPoolExecutor(1) as pool:  # a node that hangs costs the timeout once
        told = pool.submit(ask, redlock, choice.timeout)
        seen = choice.survey(redlock)
        left = votes_in(told.result(), len(redlock.nodes), site.app)
    seen = replace(seen, entries=tuple(sorted(seen.entries, key=ORDERS[sort])))
    say_away(seen)
    said = ["nothing is held"]
    if seen.entries:
        kinds = Counter(entry.kind for entry in seen.entries)
        said = [table(COLUMNS, map(row, seen.entries))]
        said += [", ".join(_counted(count, kind) for kind, count in kinds.items())]
        said += [PARKED] if site.app is not None else []
    if left is not None:
        said.append(_voteless(left, site))
    site.say({**seen.data(), "votes_in": left}, "\n".join(said))


def _counted(count: int, kind: str) -> str:
    return f"{count} {kind}" if kind == "foreign" else counted(count, kind)


def _voteless(left: float, site: Site) -> str:
    default = f" (for the default ttl of {GLOBAL['ttl'].default:g} s; -A APP knows its own)"
    return (
        f"no quorum has a vote for another {math.ceil(left)} s{'' if site.app else default}: nodes"
        " that were started a short time ago may have forgotten locks; tasks then go on by"
        " themselves"
    )
