"""`redlock release`: free a key whose holder is dead, or must not have it."""

from __future__ import annotations

import sys

import click

from ..protocol.commands import RESERVED_SUFFIX
from ..protocol.values import printable
from ..survey.force_release import Freed, free, stop_command
from ..survey.models import Entry, Survey
from ..survey.snapshot import look_at, resource_of
from .context import PROBLEM, REFUSED, Site, on_site
from .formatting import away, counted, lines, name_of, timeout_option
from .show import described

__all__ = ["command"]


@click.command("release")
@click.argument("key")
@click.option("--force", is_flag=True, help="Do not ask.")
@click.option("--reservation", is_flag=True, help="The reservation, not the lock.")
@click.option("--slot", type=click.IntRange(min=1), help="Which, of a lock with a limit.")
@timeout_option
@on_site
def command(
    site: Site, key: str, force: bool, reservation: bool, slot: int | None, timeout: float
) -> int:
    """Free KEY: the very token that is shown, and nothing that came after it.

    It shows the holder and asks; without a terminal to ask on it refuses, unless --force is given.
    The holder is not stopped by it: see what is said before the question.

    Exit code 0: it is free, by this or already; 1: there was nothing to free; 3: too few nodes
    answered; 4: not freed, for want of a yes or because another holds it meanwhile.
    """
    redlock = site.redlock
    resource = resource_of(redlock, key)
    seen = look_at(redlock, resource, timeout)
    away(seen)
    plain = redlock.prefix + resource
    keys = {f"{plain}{RESERVED_SUFFIX}"} if reservation else {plain}
    found = [
        entry
        for entry in seen.entries
        if entry.kind in ("lock", "tick", "reservation", "foreign")
        and (entry.key in keys or (entry.slot > 1 and not reservation))
        and slot in (None, entry.slot)
    ]
    if not found:
        what = "reservation" if reservation else "lock"
        return _end(site, None, Freed("gone"), f"{resource}: no node has a {what} of it", PROBLEM)
    if len(found) > 1:
        raise click.UsageError(
            printable(f"{resource} has {len(found)} holders; say which, by --slot: ")
            + ", ".join(str(entry.slot) for entry in found)
        )
    (entry,) = found
    if not force and (why := _refusal(entry, seen)):
        return _end(site, entry, None, why, REFUSED)
    if not entry.digest:
        why = f"{entry.key} is no string, or too long: it cannot be compared; delete it by hand"
        return _end(site, entry, None, why, REFUSED)
    freed = free(redlock, entry, timeout)
    return _end(site, entry, freed, *_said(entry, freed))


def _refusal(entry: Entry, seen: Survey) -> str:
    """Why nothing is to be done, after asking; empty if it is."""
    if not _can_ask():
        return "there is no terminal to ask on: look with show, then give --force"
    click.echo(lines(name_of(entry), *described(entry, seen), "", *_warning(entry)), err=True)
    return "" if click.confirm("Free it?", err=True) else "left as it was"


def _can_ask() -> bool:
    return sys.stdin.isatty()


def _warning(entry: Entry) -> list[str]:
    if entry.kind == "reservation":
        return [
            "Its message stays in the queue: another of the same key may then be published, and"
            " both run, one after the other.",
        ]
    if entry.kind == "tick":
        return ["Another beat may then send this tick again."]
    if entry.kind == "foreign":
        return ["No lock of ours: whatever program put it there may rely on it."]
    command = stop_command(entry.owner.task_id) if entry.owner is not None else ""
    stop = f" Stop it first: {command}" if command else ""
    return [
        "Its holder is not stopped by this. If it lives, its body goes on, and another may run"
        " beside it." + stop,
        "If nobody else takes the key, a holder that lives takes it back when it next extends its"
        " lease: within a third of its ttl.",
    ]


def _said(entry: Entry, freed: Freed) -> tuple[str, int]:
    name = name_of(entry)
    if freed.outcome == "changed":
        return f"{name}: not freed: what is there now is another's (see show)", REFUSED
    if freed.outcome == "gone":
        return f"{name}: was free already; nothing was done", 0
    text = f"{name}: freed on {counted(freed.nodes, 'node')}"
    if freed.taken:
        text += "; another has it already"
    if freed.silent:
        text += f"; {', '.join(freed.silent)} did not answer: if it is there, until its ttl is over"
    return text, 0


def _end(site: Site, entry: Entry | None, freed: Freed | None, text: str, code: int) -> int:
    data = {
        "outcome": "refused" if freed is None else freed.outcome,
        "freed_on": 0 if freed is None else freed.nodes,
        "taken": freed is not None and freed.taken,
        "silent": [] if freed is None else list(freed.silent),
        "said": text,
        "entry": None if entry is None else entry.data(),
    }
    if code and not site.as_json:
        click.echo(printable(text), err=True)
    else:
        site.say(data, printable(text))
    return code
