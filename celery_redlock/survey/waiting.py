"""Count the waiters for a resource: the queue on the nodes, and the tasks parked in workers.

A worker stands in the queue of a resource once, however many of its parked tasks wait, and not at
all while its pool is full. So the nodes alone cannot count the waiters; the workers report the rest
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

__all__ = ["Parked", "at_once", "count_parked", "valid_waits", "waited_for"]

MAX_WAITED_S = 1e12
"""Seconds. No task waits that long: a larger number, or infinity, is nonsense."""


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Run several calls at the same time, such as to nodes and to workers; return their results.

    It waits for all; then it raises the error of the first call that has one.
    """
    with ThreadPoolExecutor(thread_name_prefix="celery_redlock look") as pool:
        return [job.result() for job in [pool.submit(call) for call in calls]]


@dataclass(frozen=True)
class Parked:
    """The parked tasks that workers report, by resource.

    `waited` has the seconds that each task has waited; `queued` the number of workers that stand in
    the queue on the nodes.
    """

    waited: Mapping[str, list[float]] = field(default_factory=dict)
    queued: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, replies: Iterable[Mapping[str, Any]]) -> Parked:
        """Read the replies of workers, one each; invalid parts of them are ignored."""
        waited: dict[str, list[float]] = defaultdict(list)
        queued: Counter[str] = Counter()
        for reply in replies:
            for wait in valid_waits(reply):
                if wait.get("where") == "parked":
                    for name in waited_for(wait):
                        waited[name].append(float(wait["waited"]))
            names = reply.get("queued")
            if isinstance(names, list):
                queued.update({name for name in names if isinstance(name, str)})
        return cls(waited, queued)


def waited_for(wait: Mapping[str, Any]) -> Sequence[str]:
    """Return the resources that a task waits for: each counts. Older workers report one."""
    names = wait.get("resources")
    valid = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if valid and names else [wait["resource"]]


def valid_waits(reply: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the valid waits of a worker's reply; the broker's users can send anything."""
    waits = reply.get("waits")
    for wait in waits if isinstance(waits, list) else ():
        waited = wait.get("waited") if isinstance(wait, Mapping) else None
        known = isinstance(waited, (int, float)) and 0 <= waited < MAX_WAITED_S
        if known and isinstance(wait.get("resource"), str):
            yield wait


def count_parked(seen: Survey, parked: Parked, *, prefix: str | None = None) -> Survey:
    """Return the survey with each parked task counted as a waiter, in its locks and queues.

    Args:
        seen: The survey of the nodes.
        parked: The workers' reports.
        prefix: Prefix of the keys. If given, a resource that tasks wait for without a queue on
            any node gets an entry of the kind `line`.
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
