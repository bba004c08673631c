"""`redlock show`: show everything known about one resource."""

from __future__ import annotations

import click

from ..protocol.texts import of_nodes
from ..survey.durations import span
from ..survey.models import Survey
from ..survey.snapshot import look_for
from ..survey.waiting import count_parked, waited_for
from .context import PROBLEM, WORKERS_TIMEOUT_S, Site, on_site, timeout_option
from .formatting import entry_lines, lines, print_unreachable, start_lines, wait_lines

__all__ = ["command"]

SPELLING = """a text such as "7", "a b" or "a@b" is quoted: 'order:"a b"'; explain prints it"""
"""Hint for the most frequent mistake in keys typed by hand."""


@click.command("show")
@click.argument("key")
@timeout_option()
@on_site
def command(site: Site, key: str, timeout: float) -> int:
    """Show everything about one key.

    KEY may be given with or without the prefix.

    It shows the holder, each node's answer if they differ, the reservation, the fencing token and
    the waiters; with an app also the tasks that wait in its workers, which have a second to answer.

    Exit code 1 if no node and no worker has anything of it; 3 if too few nodes answer.
    """
    from ..doctor.workers import waiting

    resource, seen = look_for(site.redlock, key, timeout)
    print_unreachable(seen)
    waits, parked, unasked = waiting(site.app, WORKERS_TIMEOUT_S)
    waits = [wait for wait in waits if resource in waited_for(wait)]
    seen = count_parked(seen, parked)
    data = {**seen.data(), "resource": resource, "waits": waits, "unasked": unasked}
    site.say(data, lines(*_lines(seen, resource), *wait_lines(waits, unasked)))
    return 0 if seen.entries or seen.pauses or waits else PROBLEM


def _lines(seen: Survey, resource: str) -> list[str]:
    paused = [f"  {pause}" for pause in seen.pauses]
    if not seen.entries and paused:
        return [resource, "  no node has a lock of it: nobody holds it", *paused]
    if not seen.entries:
        return [
            f"{resource}: no node knows anything of it; it is free",
            f"  is the key spelt as the locks are? {SPELLING}",
        ]
    said = [resource, *paused]
    kinds = {entry.kind for entry in seen.entries}
    if kinds.isdisjoint(("lock", "tick", "foreign")):
        free = "" if kinds & {"reservation", "start"} else ": it is free"
        said.append(f"  no node has a lock of it{free}")
    said += [f"  {line}" for line in start_lines(seen.entries)]
    for entry in seen.entries:
        if entry.kind == "fence":
            said.append(f"  fencing token last granted: {entry.fence}")
        elif entry.kind == "line":
            first = ", ".join(map(span, entry.waits))
            said.append(f"  waiting: {entry.waiting}" + (f", for {first}" if first else ""))
        elif entry.kind == "mark":
            said.append(f"  done: {entry.resource} on {of_nodes(entry.nodes, entry.total)}")
        else:
            said += [f"  {line}" for line in entry_lines(entry, seen)]
    return said
