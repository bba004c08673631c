"""`redlock release`: free a key whose holder is dead or must not keep it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from ..protocol.errors import QuorumUnavailable
from ..protocol.names import RESERVED_SUFFIX, checked_glob
from ..protocol.texts import counted, printable
from ..survey.force_release import SETTLED_S, Freed, force_release, stop_command
from ..survey.models import Entry, Survey
from ..survey.snapshot import look_for, survey
from .context import NO_QUORUM, PROBLEM, REFUSED, Site, can_ask, on_site, timeout_option
from .formatting import entry_lines, lines, name_of, owner_text, print_unreachable

__all__ = ["command"]

WARNINGS = {
    "reservation": "Its message stays in the queue: another of the same key may then be published,"
    " and both run, one after the other.",
    "tick": "Another beat may then send this tick again.",
    "foreign": "No lock of ours: whatever program put it there may rely on it.",
    "lock": "Its holder is not stopped by this. If it lives, its body goes on, and another may run"
    " beside it.",
}
"""The risk of freeing a key, by kind. Only these kinds can be freed."""
MANY = ("lock", "reservation", "foreign")
"""Kinds that --match lists and frees."""
TAKEN_BACK = (
    "If nobody else takes the key, a holder that lives takes it back when it next extends its"
    " lease: within a third of its ttl."
)


@click.command("release")
@click.argument("key", required=False)
@click.option("--match", metavar="GLOB", help="Free all keys that match, not one: 'order:*'.")
@click.option("--dry-run", is_flag=True, help="With --match: list them, and free none.")
@click.option("--yes", is_flag=True, help="With --match: list them, and free them without asking.")
@click.option("--force", is_flag=True, help="Free without asking; with --match also keys in use.")
@click.option("--reservation", is_flag=True, help="Free the reservation, not the lock.")
@click.option("--slot", type=click.IntRange(min=1), help="The slot, if the lock has a limit.")
@click.option("--digest", help="The token's digest, if there are several; see show and ls.")
@timeout_option()
@on_site
def command(
    site: Site,
    key: str | None,
    *,
    match: str | None,
    dry_run: bool,
    yes: bool,
    force: bool,
    reservation: bool,
    slot: int | None,
    digest: str | None,
    timeout: float,
) -> int:
    """Free one key whose holder is dead, or all that match a glob.

    It shows the holder, asks, and frees only the token that it has shown, never a later one.
    Without a terminal to ask on it refuses, unless --force is given. It does not stop the holder:
    read the text before the question.

    With --match it lists the keys that match, and skips keys in use unless --force is given. In use
    are a lock that a quorum holds (the lock of a dead holder ends by itself within its ttl), the
    reservation of a task that holds its lock, and a value that is not from this library.

    Exit code 0: the key is free, or was before; 1: there was nothing to free; 3: too few nodes
    answered; 4: not freed, because the answer was no or another holds it meanwhile.
    """
    if (key is None) == (match is None):
        raise click.UsageError("name one KEY, or give --match GLOB: one of them, not both")
    if match is None and (dry_run or yes):
        raise click.UsageError("--dry-run and --yes go with --match; one KEY is freed by --force")
    if dry_run and yes:
        raise click.UsageError("--dry-run frees nothing, --yes frees: give one of them")
    if match is not None and (slot or digest):
        raise click.UsageError("--slot and --digest go with one KEY; --match frees all that fits")
    redlock = site.redlock
    if match is not None:
        match = checked_glob(match.removeprefix(redlock.prefix))
        seen = survey(redlock, match, kinds=MANY, timeout=timeout)
        lives = {one: "" if force else _lives(one, seen) for one in seen.entries}
        print_unreachable(seen)
        seen = replace(
            seen, entries=tuple(e for e in lives if not reservation or e.kind == "reservation")
        )
        how = {"dry_run": dry_run, "yes": yes, "force": force}
        return _release_all(site, seen, lives, timeout=timeout, **how)
    assert key is not None
    resource, seen = look_for(redlock, key, timeout)
    print_unreachable(seen)
    meant = redlock.prefix + resource + (RESERVED_SUFFIX if reservation else "")
    there = [
        entry
        for entry in seen.entries
        if entry.kind in WARNINGS
        and (entry.key == meant or (entry.slot > 1 and not reservation))
        and digest in (None, entry.digest)
    ]
    found = [entry for entry in there if slot in (None, entry.slot)]
    shared = any(entry.shared for entry in there)
    if len(found) > 1 or (slot and shared):  # a reader's slot changes when other readers end
        by = "--digest" if shared else "--slot or --digest"
        holders = (f"  {name_of(one)}: {owner_text(one.owner, one.digest)}" for one in there)
        count = counted(len(there), "holder")
        raise click.UsageError(lines(f"{resource} has {count}; say which, by {by}:", *holders))
    if not found:
        what = "reservation" if reservation else "lock"
        which = f" in slot {slot}" if slot else ""
        which += f" with the digest {digest}" if digest else ""
        said = f"{resource}: no node has a {what} of it{which}"
        if not reservation and any(entry.kind == "reservation" for entry in seen.entries):
            free = site.command("release", resource, "--reservation")
            said += f"; this frees its reservation: {free}"
        return _end(site, None, Freed("gone"), said, PROBLEM)
    (entry,) = found
    if not force and (why := _refusal(site, entry, seen)):
        return _end(site, entry, Freed("refused"), why, REFUSED)
    if not entry.digest:
        why = f"{entry.key} is no string, or too long: it cannot be compared; delete it by hand"
        return _end(site, entry, Freed("refused"), why, REFUSED)
    freed = force_release(redlock, entry, timeout)
    code = REFUSED if freed.outcome == "changed" else 0
    return _end(site, entry, freed, _outcome_text(site, entry, freed), code)


def _lives(entry: Entry, seen: Survey) -> str:
    """Return why an entry's holder counts as living; empty if there is no sign of it."""
    if entry.kind == "foreign":
        return "another program may rely on it"
    if entry.kind == "lock":
        away = sum(not look.reachable for look in seen.looks)
        if entry.endless or entry.nodes + away < entry.quorum:
            return ""
        return "a quorum holds it" if entry.held else "a quorum may hold it: nodes do not answer"
    others = (one for one in seen.entries if one.kind == "lock" and one.held)
    holds = any(
        one.resource == entry.resource
        and one.owner is not None
        and entry.owner is not None
        and one.owner.task_id == entry.owner.task_id
        for one in others
    )
    return "its task is at work" if holds else ""


def _release_all(
    site: Site,
    seen: Survey,
    lives: Mapping[Entry, str],
    *,
    dry_run: bool,
    yes: bool,
    force: bool,
    timeout: float,
) -> int:
    """List the entries found, then free them one by one; never a token that was not listed."""
    wanted = [entry for entry in seen.entries if not lives[entry]]
    done: dict[Entry, dict[str, Any]] = {}

    def ended(outcome: str, text: str, code: int) -> int:
        rows = [
            {**entry.data(), "lives": lives[entry], **done.get(entry, {"outcome": "listed"})}
            for entry in seen.entries
        ]
        site.say({"outcome": outcome, "said": text, "entries": rows}, printable(text))
        return code

    if not seen.entries:
        return ended("gone", "nothing that fits is held or reserved", PROBLEM)
    for entry in () if site.as_json else seen.entries:
        note = f"  left alone, {why}: --force frees it" if (why := lives[entry]) else ""
        click.echo(
            lines(name_of(entry), *(f"  {line}" for line in entry_lines(entry, seen))) + note
        )
    count = f"{counted(len(wanted), 'key')} of {len(seen.entries)} to be freed"
    if dry_run:
        return ended("listed", f"{count}; nothing was done", 0)
    if not wanted:
        return ended("refused", f"{count}: their holders live; --force frees them", REFUSED)
    if not yes:
        if not can_ask():
            why = "there is no terminal to ask on: look with --dry-run, then give --yes"
            return ended("refused", why, REFUSED)
        warnings = {WARNINGS[entry.kind] for entry in wanted}
        click.echo(lines("", *sorted(warnings), _runbook(site)), err=True)
        if not click.confirm(f"{count}. Free them?", err=True):
            return ended("refused", "left as they were", REFUSED)
    if not force and any(entry.kind == "lock" and not entry.held for entry in wanted):
        time.sleep(
            SETTLED_S
        )  # one may be a lock that is being acquired: it has a quorum in a moment
    for entry in wanted:
        outcome, on = "refused", 0
        said = f"{name_of(entry)}: no string, or too long to compare: delete it by hand"
        try:
            if entry.digest:
                living = force or entry.kind != "lock" or entry.endless
                freed = force_release(site.redlock, entry, timeout, living=living)
                outcome, on, said = freed.outcome, freed.nodes, _outcome_text(site, entry, freed)
        except QuorumUnavailable as error:  # freeing the next one would fail, too
            outcome, said = "unknown", str(error)
        done[entry] = {"outcome": outcome, "freed_on": on, "said": said}
        if not site.as_json:
            click.echo(printable(said))
        if outcome == "unknown":
            break
    outcomes = Counter(one["outcome"] for one in done.values())
    left = len(seen.entries) - outcomes["freed"] - outcomes["gone"]
    text = f"{counted(outcomes['freed'], 'key')} freed, {left} left as they were"
    code = NO_QUORUM if outcomes["unknown"] else REFUSED if left else 0
    return ended("partly" if left else "freed", text, code)


def _runbook(site: Site) -> str:
    return f"What to do first: {site.page('runbook', 'a-stuck-lock')}"


def _refusal(site: Site, entry: Entry, seen: Survey) -> str:
    """Ask the user; return why nothing must be freed, or an empty string for yes."""
    if not can_ask():
        look = site.command("show", entry.resource)
        return (
            f"there is no terminal to ask on: look with {look}, then give --force. {_runbook(site)}"
        )
    warning = WARNINGS[entry.kind]
    stop = stop_command(entry.owner.task_id) if entry.owner is not None else ""
    if entry.kind == "lock":
        warning += (f" Stop it first: {stop}" if stop else "") + f"\n{TAKEN_BACK}"
    said = [name_of(entry), *entry_lines(entry, seen), "", *warning.split("\n"), _runbook(site)]
    click.echo(lines(*said), err=True)
    return "" if click.confirm("Free it?", err=True) else "left as it was"


def _outcome_text(site: Site, entry: Entry, freed: Freed) -> str:
    name = name_of(entry)
    if freed.outcome == "changed":
        see = site.command("show", entry.resource)
        return f"{name}: not freed: by now a quorum holds it, or it is another's; see {see}"
    if freed.outcome == "gone":
        what = "had ended" if entry.shared else "was free"
        return f"{name}: {what} already; nothing was done"
    text = f"{name}: freed on {counted(freed.nodes, 'node')}"
    if entry.owner is not None:
        text += f"; {owner_text(entry.owner, entry.digest)} had it"
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
