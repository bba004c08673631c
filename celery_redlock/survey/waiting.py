"""Counts who waits for a resource: the queue on the nodes, and the tasks parked in workers.

A worker stands in the queue of a resource once, however many tasks wait parked in it, and not at
all while its pool is full. So the nodes alone cannot tell how many wait; the workers tell the rest
(`celery inspect redlock`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from ..protocol.names import LINE_SUFFIX
from ..protocol.values import quorum_of
from .models import Entry, Survey

__all__ = ["Parked", "at_once", "count_parked", "waited_for", "waits_told"]

MAX_WAITED_S = 1e12
"""No task waits for as long: a number beyond it is nonsense, or infinite."""


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Return what several calls return, which wait at the same time: for nodes, for workers.

    All are waited for; the error of the first that has one is raised.
    """
    with ThreadPoolExecutor(thread_name_prefix="celery_redlock look") as pool:
        return [job.result() for job in [pool.submit(call) for call in calls]]


@dataclass(frozen=True)
class Parked:
    """What workers tell of the tasks that wait parked in them, by resource.

    `waited` has for how long each has waited, in seconds; `queued` how many of the workers stand in
    the queue on the nodes.
    """

    waited: Mapping[str, list[float]] = field(default_factory=dict)
    queued: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, replies: Iterable[Mapping[str, Any]]) -> Parked:
        """Read the replies of workers, one each; what makes no sense in them is passed over."""
        waited: dict[str, list[float]] = defaultdict(list)
        queued: Counter[str] = Counter()
        for reply in replies:
            for wait in waits_told(reply):
                if wait.get("where") == "parked":
                    for name in waited_for(wait):
                        waited[name].append(float(wait["waited"]))
            names = reply.get("queued")
            if isinstance(names, list):
                queued.update({name for name in names if isinstance(name, str)})
        return cls(waited, queued)


def waited_for(wait: Mapping[str, Any]) -> Sequence[str]:
    """Return the names of what a task waits for: each counts. Older workers tell of one."""
    names = wait.get("resources")
    told = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if told and names else [wait["resource"]]


def waits_told(reply: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the waits in a worker's reply that make sense: anybody on the broker can answer."""
    waits = reply.get("waits")
    for wait in waits if isinstance(waits, list) else ():
        waited = wait.get("waited") if isinstance(wait, Mapping) else None
        known = isinstance(waited, (int, float)) and 0 <= waited < MAX_WAITED_S
        if known and isinstance(wait.get("resource"), str):
            yield wait


def count_parked(seen: Survey, parked: Parked, *, prefix: str | None = None) -> Survey:
    """Return a survey in whose locks and queues the parked tasks count as waiting, one by one.

    Args:
        seen: What the nodes told.
        parked: What the workers told.
        prefix: Of the keys. If given, a resource that tasks wait for and no node has a queue of
            gets an entry of the kind `line`.
    """
    entries = [_counted(entry, parked) for entry in seen.entries]
    if prefix is not None:
        known = {entry.resource for entry in entries if entry.kind == "line"}
        entries += [
            _queue_of(resource, waited, prefix, len(seen.looks))
            for resource, waited in parked.waited.items()
            if resource not in known
        ]
    return replace(seen, entries=tuple(entries))


def _counted(entry: Entry, parked: Parked) -> Entry:
    waited = parked.waited.get(entry.resource, [])
    others = max(0, entry.waiting - parked.queued.get(entry.resource, 0))
    if entry.kind not in ("lock", "start", "line") or others + len(waited) == entry.waiting == 0:
        return entry
    waits = tuple(sorted((*entry.waits, *waited), reverse=True)[: max(1, len(entry.waits))])
    held_for = entry.held_for
    if entry.kind == "line":
        held_for = waits[0] if waits else None
    return replace(entry, waiting=others + len(waited), waits=waits, held_for=held_for)


def _queue_of(resource: str, waited: list[float], prefix: str, nodes: int) -> Entry:
    return Entry(
        resource=resource,
        key=prefix + resource + LINE_SUFFIX,
        kind="line",
        slot=1,
        owner=None,
        digest="",
        ttls=(None,) * nodes,
        nodes=0,
        total=nodes,
        quorum=quorum_of(nodes),
        held_for=max(waited),
        waiting=len(waited),
        waits=(max(waited),),
    )
