"""`redlock ls`: list locks and reservations."""

from __future__ import annotations

import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click

from ..config.options import GLOBAL
from ..protocol.texts import counted, printable
from ..survey.models import KINDS, Entry, Survey
from ..survey.waiting import at_once
from .context import Site, choosing, on_site
from .formatting import print_unreachable
from .lock_table import lock_table

__all__ = ["command"]

ORDERS: dict[str, Callable[[Entry], Any]] = {
    "key": lambda e: 0,  # a survey is already sorted by key
    "task": lambda e: e.owner.task if e.owner is not None else "",
    "age": lambda e: -(e.held_for or 0.0),
    "ttl": lambda e: min((ttl for ttl in e.ttls if ttl is not None), default=math.inf),
    "waiting": lambda e: -e.waiting,
}


@click.command("ls")
@click.option(
    "--sort",
    type=click.Choice(list(ORDERS)),
    default="key",
    show_default=True,
    help="age: longest held first; ttl: first to expire first; waiting: longest queue first.",
)
@click.option("--wide", is_flag=True, help="Show all columns, uncut, at any width.")
@on_site
@choosing
def command(
    site: Site, *, look: Callable[[], Survey], timeout: float, sort: str, wide: bool
) -> None:
    """List locks that are held, and reservations.

    Each has one line. A terminal that is too narrow gets fewer columns; left out are, in this
    order: fence, pid, host, ttl, task id, waiting, held for, task. A pipe gets all of them, as with
    --wide.

    The list is a snapshot. Exit code 0, also if it is empty; 3 if too few nodes answer.
    """
    from ..doctor.votes import ask, votes_in

    seen: Survey
    facts, (seen, unasked) = at_once(
        lambda: ask(site.redlock, timeout), lambda: site.with_parked(look)
    )
    left = votes_in(facts, site.redlock.client.addresses, site.app)
    seen = replace(seen, entries=tuple(sorted(seen.entries, key=ORDERS[sort])))
    print_unreachable(seen)
    text = ""
    if not site.as_json:
        fit = sys.stdout.isatty() and not wide
        width = shutil.get_terminal_size().columns if fit else None
        text = "\n".join(_lines(seen, site, width, unasked, left))
    site.say({**seen.data(), "votes_in": left, "unasked": unasked}, text)


def _lines(
    seen: Survey, site: Site, width: int | None, unasked: str, left: float | None
) -> list[str]:
    said = [site.nothing]
    if seen.entries:
        counts = Counter(entry.kind for entry in seen.entries)
        said = lock_table(seen.entries, width, waiters=site.app is not None)
        said += [
            ", ".join(
                f"{counts[kind]} {kind}" if kind == "foreign" else counted(counts[kind], kind)
                for kind in KINDS
                if counts[kind]
            )
        ]
        said += [printable(unasked)] if site.app is not None and unasked else []
    said += [str(pause) for pause in seen.pauses]
    if left is not None:
        said.append(_voteless(left, site))
    return said


def _voteless(left: float, site: Site) -> str:
    default = f" (for the default ttl of {GLOBAL['ttl'].default:g} s; -A APP knows its own)"
    return (
        f"no quorum has a vote for another {math.ceil(left)} s{'' if site.app else default}: nodes"
        " that were started a short time ago may have forgotten locks; tasks then go on by"
        " themselves"
    )
