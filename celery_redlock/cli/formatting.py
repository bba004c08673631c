"""How entries of a survey, their owners and their times are said to people."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import click

from ..protocol.values import Owner, printable
from ..survey.models import KINDS, Entry, NodeLook, Survey
from .context import SECONDS

__all__ = [
    *("COLUMNS", "away", "choosing", "chosen", "counted", "kinds_of", "left", "lines"),
    *("name_of", "nodes_data", "owner_text", "row", "span", "state_of", "timeout_option"),
    *("IN_LINE", "PARKED", "Say", "rows", "waits_said"),
]

F = TypeVar("F", bound=Callable[..., Any])
Say = Callable[[Survey | None, Sequence[Entry], str], None]
"""Shows a look at the nodes, the entries that were chosen, and what is wrong."""

COLUMNS = ("key", "task", "task id", "host", "pid", "held for", "nodes", "ttl on each", "fence")
"""Of a table of entries; see `row`."""
IN_LINE = "in line"
"""The column of those who wait, as far as the nodes know."""
PARKED = (
    "a worker is one in line, however many tasks wait parked in it: show KEY, or"
    " celery -A APP inspect redlock"
)

timeout_option = click.option(
    "--timeout",
    type=SECONDS,
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="Without an answer, after which a node counts as away.",
)


def choosing(command: F) -> F:
    """Decorates a command that shows some of the entries: --match, --task, --kind, --all."""
    options = [
        click.option(
            "--match",
            default="*",
            metavar="GLOB",
            help="Only resources whose whole name fits, without the prefix: 'order:*'.",
        ),
        click.option(
            "--task", metavar="GLOB", help="Only what tasks hold whose name fits: 'shop.*'."
        ),
        click.option(
            "--kind",
            "kinds",
            type=click.Choice(KINDS),
            multiple=True,
            help="Only these; as often as you like. Else: lock, reservation and foreign.",
        ),
        click.option("--all", "everything", is_flag=True, help="All kinds."),
        timeout_option,
    ]
    for option in reversed(options):
        command = option(command)
    return command


def kinds_of(kinds: Sequence[str], everything: bool) -> tuple[str, ...]:
    """Which kinds to look for."""
    return KINDS if everything else tuple(kinds) or ("lock", "reservation", "foreign")


def chosen(entries: Iterable[Entry], task: str | None) -> list[Entry]:
    """Those whose owner's task fits a glob."""
    if task is None:
        return list(entries)
    return [e for e in entries if e.owner is not None and fnmatchcase(e.owner.task, task)]


def name_of(entry: Entry) -> str:
    """A resource, and what of it this is, if that is not its plain lock."""
    slot = f" slot {entry.slot}" if entry.slot > 1 else ""
    kind = "" if entry.kind == "lock" else f" ({entry.kind})"
    return f"{entry.resource}{slot}{kind}"


def row(entry: Entry) -> list[str]:
    """An entry as a line of a table."""
    owner = entry.owner
    return [
        name_of(entry),
        owner.task or "-" if owner else "-",
        owner.task_id or "-" if owner else "-",
        owner.host if owner else "-",
        str(owner.pid) if owner else "-",
        "-" if entry.held_for is None else span(entry.held_for),
        f"{entry.nodes}/{entry.total}" + state_of(entry),
        " ".join("-" if ttl is None else _short(ttl) for ttl in entry.ttls),
        "-" if entry.fence is None else str(entry.fence),
    ]


def state_of(entry: Entry) -> str:
    """What is odd about it, behind its count of nodes; empty if nothing is."""
    odd = []
    if entry.split:
        odd.append("split")
    elif not entry.held:
        odd.append("no quorum")
    if entry.leaked:
        odd.append("no ttl")
    return " " + ", ".join(odd) if odd else ""


def owner_text(owner: Owner | None, digest: str) -> str:
    """Who that is, on one line."""
    if owner is None:
        who = "another program's value"
    else:
        task = " ".join(part for part in (owner.task, owner.task_id) if part)
        who = f"{task}, " if task else ""
        who += f"pid {owner.pid} on {owner.host}"
    return f"{who}, token {digest}" if digest else who


def left(ttl: float | None, look: NodeLook) -> str:
    """What a node says of a key, in words."""
    if not look.reachable:
        return f"does not answer: {look.error}"
    if ttl is None:
        return "not there"
    return "has no ttl: it never expires" if ttl == math.inf else f"{ttl:.1f} s left"


def waits_said(waits: Iterable[Mapping[str, Any]], unasked: str) -> list[str]:
    """Who waits in the workers, as they have told; and why they have not."""
    said = [
        f"  waits {span(wait['waited'])} in {wait['worker']}"
        f" ({'in a pool slot' if wait.get('where') == 'slot' else 'parked'}):"
        f" {wait.get('task')} {wait.get('task_id')}"
        for wait in waits
    ]
    return [printable(line) for line in (*said, *([f"  ({unasked})"] if unasked else []))]


def span(seconds: float) -> str:
    """A time, short: its two largest units."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(min(seconds, 1e12))
    parts: list[str] = []
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, whole = divmod(whole, size)
        if count or parts:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def counted(count: int, noun: str) -> str:
    """`1 lock`, `2 locks`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def lines(*parts: str) -> str:
    """Lines of foreign text, each printable."""
    return "\n".join(printable(part) for part in parts)


def away(seen: Survey) -> None:
    """Say on stderr which nodes did not answer."""
    for look in seen.looks:
        if not look.reachable:
            click.echo(printable(f"node {look.name} does not answer: {look.error}"), err=True)


def nodes_data(looks: Collection[NodeLook]) -> list[dict[str, Any]]:
    """How the nodes answered, as JSON takes it."""
    return [
        {
            "name": look.name,
            "reachable": look.reachable,
            "error": look.error,
            "rtt": None if math.isnan(look.rtt) else look.rtt,
        }
        for look in looks
    ]


def _short(ttl: float) -> str:
    return "never" if ttl == math.inf else f"{ttl:.0f}" if ttl >= 10 else f"{ttl:.1f}"


HEAD = (*COLUMNS, IN_LINE)
"""Of the live table."""
NARROW = ("key", "task", "task id", "held for", "nodes")
"""Of it, where there is no room for all."""
ROOM = 120
"""Columns of a terminal that has room for all."""
SHORT = 8
"""Characters of a task's id, where it is shortened: enough to find it."""


def rows(entries: Sequence[Entry], width: int) -> list[list[str]]:
    """The live table, its head first; then those who are held longest first."""
    by_age = sorted(entries, key=lambda entry: -(entry.held_for or 0.0))
    whole = [list(HEAD), *([*row(entry), str(entry.waiting)] for entry in by_age)]
    if width < ROOM:
        kept = [HEAD.index(name) for name in NARROW]
        whole = [[line[n] for n in kept] for line in whole]
        for line in whole[1:]:
            line[2] = line[2][:SHORT]
    return [[printable(cell) for cell in line] for line in whole]
