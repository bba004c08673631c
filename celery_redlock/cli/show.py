"""`redlock show`: all that is known of one resource."""

from __future__ import annotations

from typing import Any

import click

from ..survey.models import Entry, Survey
from ..survey.snapshot import look_at, resource_of
from .context import PROBLEM, Site, on_site
from .formatting import (
    away,
    left,
    lines,
    nodes_data,
    owner_text,
    span,
    state_of,
    timeout_option,
    waits_said,
)

__all__ = ["command", "described"]

ASKED_FOR = 1.0
"""Seconds to wait for workers: all of them, as nobody knows how many there are."""


@click.command("show")
@click.argument("key")
@timeout_option
@on_site
def command(site: Site, key: str, timeout: float) -> int:
    """All that is known of KEY, given with or without the prefix.

    Who holds it, what each node says, its reservation, its fencing token, who stands in line; with
    an app also which tasks wait in its workers, which are given a second to answer.
    Exit code 1 if no node and no worker knows anything of it; 3 if too few nodes answer.
    """
    resource = resource_of(site.redlock, key)
    seen = look_at(site.redlock, resource, timeout)
    away(seen)
    waits, unasked = _waits(site, resource)
    data = {
        "at": seen.at,
        "resource": resource,
        "nodes": nodes_data(seen.looks),
        "entries": [entry.data() for entry in seen.entries],
        "waits": waits,
        "unasked": unasked,
    }
    nothing = f"{resource}: no node knows anything of it; it is free"
    said = _text(seen, resource) if seen.entries else [nothing]
    site.say(data, lines(*said, *waits_said(waits, unasked)))
    return 0 if seen.entries or waits else PROBLEM


def _waits(site: Site, resource: str) -> tuple[list[dict[str, Any]], str]:
    """Which tasks wait in the workers, where no node sees them; and why that is not known."""
    if site.app is None:
        return [], "tasks that wait parked in workers are not seen without their app: -A APP"
    from ..doctor.workers import waiting_for

    return waiting_for(site.app, [resource], ASKED_FOR)


def described(entry: Entry, seen: Survey) -> list[str]:
    """What is known of one key: who has it, and what each node says."""
    since = "" if entry.held_for is None else f" for {span(entry.held_for)}"
    said = [
        f"{entry.kind}{f' slot {entry.slot}' if entry.slot > 1 else ''}: "
        f"{owner_text(entry.owner, entry.digest)},{since}"
        f" on {entry.nodes} of {entry.total} nodes{state_of(entry)}"
    ]
    said += [
        f"    {look.name}  {left(ttl, look)}"
        for ttl, look in zip(entry.ttls, seen.looks, strict=True)
    ]
    for rival in entry.rivals:
        on = [
            look.name for ttl, look in zip(rival.ttls, seen.looks, strict=True) if ttl is not None
        ]
        said.append(f"  but {owner_text(rival.owner, rival.digest)} on {', '.join(on)}")
    return said


def _text(seen: Survey, resource: str) -> list[str]:
    said = [resource]
    if not any(e.kind in ("lock", "tick", "foreign") for e in seen.entries):
        said.append("  no node has a lock of it: it is free")
    for entry in seen.entries:
        if entry.kind == "fence":
            said.append(f"  fencing token last granted: {entry.fence}")
        elif entry.kind == "line":
            first = ", ".join(span(seconds) for seconds in entry.waits)
            said.append(f"  in line: {entry.waiting}" + (f", for {first}" if first else ""))
        elif entry.kind == "mark":
            said.append(f"  done: {entry.resource} on {entry.nodes} of {entry.total} nodes")
        else:
            said += [f"  {line}" for line in described(entry, seen)]
    return said
