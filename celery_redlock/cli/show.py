"""`redlock show`: show everything known about one resource."""

from __future__ import annotations

import math

import click

from ..protocol.texts import of_nodes
from ..survey.durations import span
from ..survey.models import Survey
from ..survey.snapshot import look_at, look_for
from ..survey.waiting import count_parked, waited_for
from .context import PROBLEM, WORKERS_TIMEOUT_S, Site, on_site, timeout_option
from .formatting import entry_lines, lines, print_unreachable, start_lines, wait_lines

__all__ = ["command"]

SPELLING = """a text such as "7", "a b" or "a@b" is quoted: 'order:"a b"'; `celery -A APP redlock \
explain TASK ARGS` prints it"""
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
    waits, parked, unasked, *_ = waiting(site.app, WORKERS_TIMEOUT_S)
    waits = [wait for wait in waits if resource in waited_for(wait)]
    strangers = None
    if site.app is not None:
        slots = sum(wait.get("where") == "slot" for wait in waits)
        strangers = max(0, _places(seen, resource) - parked.queued.get(resource, 0) - slots)
        if strangers:  # or they have left the queue while the workers were asked
            now = look_at(site.redlock, resource, timeout)
            strangers = min(strangers, _places(now, resource))
    seen = count_parked(seen, parked)
    data = {**seen.data(), "resource": resource, "waits": waits, "unasked": unasked}
    data["unreported"] = strangers
    said = [*_lines(seen, resource), *wait_lines(waits, unasked)]
    if strangers:
        said += _unreported(
            strangers, seen, resource, site.page("hot-keys", "what-a-worker-holds-back")
        )
    site.say(data, lines(*said))
    return 0 if seen.entries or seen.pauses or waits else PROBLEM


def _places(seen: Survey, resource: str) -> int:
    """Return the length of a resource's wait queue on the nodes."""
    queues = (entry for entry in seen.entries if entry.kind == "line")
    return next((queue.waiting for queue in queues if queue.resource == resource), 0)


def _unreported(count: int, seen: Survey, resource: str, page: str) -> list[str]:
    """Return lines about waiters that no worker reports."""
    queue = next(one for one in seen.entries if (one.kind, one.resource) == ("line", resource))
    ttl = max((left for left in queue.ttls if left is not None), default=math.inf)
    ends = f"; all places end in {span(ttl)} if nobody else waits" if ttl < math.inf else ""
    return [
        f"  no worker reports {count} of those that wait: it is the place of a worker that has died"
        " or does not answer, or of a program that is not a worker",
        f"    a release passes over the place of a dead process{ends}",
        "    the task of a dead worker runs once the broker has delivered its message again, see"
        f" {page}",
    ]


def _lines(seen: Survey, resource: str) -> list[str]:
    paused = [f"  {pause}" for pause in seen.pauses]
    if not seen.entries and paused:
        return [resource, "  no node has a lock of it: nobody holds it", *paused]
    if not seen.entries:
        return [
            f"{resource}: no node knows anything of it: nobody holds it",
            f"  is the key spelt as the locks are? {SPELLING}",
        ]
    said = [resource, *paused]
    kinds = {entry.kind for entry in seen.entries}
    if kinds.isdisjoint(("lock", "tick", "foreign")):
        free = "" if kinds & {"reservation", "start"} else ": nobody holds it"
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
