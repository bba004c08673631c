"""`redlock release`: free a key whose holder is dead, or must not have it."""

from __future__ import annotations

import sys

import click

from ..protocol.names import RESERVED_SUFFIX
from ..protocol.texts import printable
from ..survey.force_release import Freed, force_release, stop_command
from ..survey.models import Entry, Survey
from ..survey.snapshot import look_at, resource_of
from .context import PROBLEM, REFUSED, Site, on_site, timeout_option
from .formatting import counted, described, lines, name_of, say_away

__all__ = ["command"]

WARNINGS = {
    "reservation": "Its message stays in the queue: another of the same key may then be published,"
    " and both run, one after the other.",
    "tick": "Another beat may then send this tick again.",
    "foreign": "No lock of ours: whatever program put it there may rely on it.",
    "lock": "Its holder is not stopped by this. If it lives, its body goes on, and another may run"
    " beside it.",
}
"""What may go wrong, by kind; these can be freed."""
TAKEN_BACK = (
    "If nobody else takes the key, a holder that lives takes it back when it next extends its"
    " lease: within a third of its ttl."
)


@click.command("release")
@click.argument("key")
@click.option("--force", is_flag=True, help="Free it without asking.")
@click.option("--reservation", is_flag=True, help="Free the reservation, not the lock.")
@click.option("--slot", type=click.IntRange(min=1), help="Which holder's, of a lock with a limit.")
@timeout_option()
@on_site
def command(
    site: Site, key: str, *, force: bool, reservation: bool, slot: int | None, timeout: float
) -> int:
    """Free one key whose holder is dead.

    It frees the very token that it has shown, and nothing that came after it. It shows the holder
    and asks; without a terminal to ask on it refuses, unless --force is given. The holder is not
    stopped by it: see what is said before the question.

    Exit code 0: it is free, by this or already; 1: there was nothing to free; 3: too few nodes
    answered; 4: not freed, because the answer was no or another holds it meanwhile.
    """
    redlock = site.redlock
    resource = resource_of(redlock, key)
    seen = look_at(redlock, resource, timeout)
    say_away(seen)
    meant = redlock.prefix + resource + (RESERVED_SUFFIX if reservation else "")
    found = [
        entry
        for entry in seen.entries
        if entry.kind in WARNINGS
        and (entry.key == meant or (entry.slot > 1 and not reservation))
        and slot in (None, entry.slot)
    ]
    if not found:
        what = "reservation" if reservation else "lock"
        return _end(site, None, Freed("gone"), f"{resource}: no node has a {what} of it", PROBLEM)
    if len(found) > 1:
        slots = ", ".join(str(entry.slot) for entry in found)
        raise click.UsageError(
            printable(f"{resource} has {len(found)} holders; say which, by --slot: {slots}")
        )
    (entry,) = found
    if not force and (why := _refusal(entry, seen)):
        return _end(site, entry, Freed("refused"), why, REFUSED)
    if not entry.digest:
        why = f"{entry.key} is no string, or too long: it cannot be compared; delete it by hand"
        return _end(site, entry, Freed("refused"), why, REFUSED)
    freed = force_release(redlock, entry, timeout)
    code = REFUSED if freed.outcome == "changed" else 0
    return _end(site, entry, freed, _said(entry, freed), code)


def _refusal(entry: Entry, seen: Survey) -> str:
    """Ask, and return why nothing is to be done; empty if it is."""
    if not _can_ask():
        return "there is no terminal to ask on: look with show, then give --force"
    warning = WARNINGS[entry.kind]
    stop = stop_command(entry.owner.task_id) if entry.owner is not None else ""
    if entry.kind == "lock":
        warning += (f" Stop it first: {stop}" if stop else "") + f"\n{TAKEN_BACK}"
    said = [name_of(entry), *described(entry, seen), "", *warning.split("\n")]
    click.echo(lines(*said), err=True)
    return "" if click.confirm("Free it?", err=True) else "left as it was"


def _can_ask() -> bool:
    return sys.stdin.isatty()


def _said(entry: Entry, freed: Freed) -> str:
    name = name_of(entry)
    if freed.outcome == "changed":
        return f"{name}: not freed: what is there now is another's (see show)"
    if freed.outcome == "gone":
        return f"{name}: was free already; nothing was done"
    text = f"{name}: freed on {counted(freed.nodes, 'node')}"
    if freed.taken:
        text += "; another has it already"
    if freed.silent:
        text += f"; {', '.join(freed.silent)} did not answer: if it is there, until its ttl is over"
    return text


def _end(site: Site, entry: Entry | None, freed: Freed, text: str, code: int) -> int:
    data = {
        "outcome": freed.outcome,
        "freed_on": freed.nodes,
        "taken": freed.taken,
        "silent": freed.silent,
        "said": text,
        "entry": None if entry is None else entry.data(),
    }
    if code and not site.as_json:
        return site.fail(text, code)
    site.say(data, printable(text))
    return code
