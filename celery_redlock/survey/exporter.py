"""Prometheus gauges of the locks on the nodes, from one survey per scrape.

A node that is down is a value, not a failure. If no quorum answers, there are no gauges of locks,
but still those of each node. As with any survey, a lock that is being acquired or released may be
seen on some nodes only.

A survey reads every key below the prefix, on each node. So its result is cached for some seconds,
and for longer if it took long: surveys take no more than a tenth of the time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..protocol.errors import ConfigurationError, QuorumUnavailable
from ..protocol.texts import event, printable
from ..protocol.values import Owner, Vote, quorum_of
from .models import KINDS, Survey
from .snapshot import survey
from .waiting import Parked, at_once, count_parked

if TYPE_CHECKING:
    from ..locking.redlock import Redlock

__all__ = ["Nodes", "exposition", "figures", "make_registry"]

logger = logging.getLogger("celery_redlock.exporter")

CACHE_S = 5.0
"""Seconds for which a survey is cached, unless given."""
CACHE_TIMES_DURATION = 9
"""Cache a survey for at least this multiple of its duration."""
MAX_TASKS = 500
"""Task names that get a label. Names on nodes are untrusted, and there may be any number."""
MAX_NAME_CHARS = 200
OTHERS = "(others)"

GAUGES = {
    "survey_seconds": "How long the last survey of the nodes took",
    "survey_age_seconds": "Age of the survey that is shown",
    "nodes": "How many nodes there are",
    "quorum_up": "1 if a quorum of nodes answered the survey, otherwise 0",
    "quorum_votes_in_seconds": "Time until a quorum has a vote, for a worker that starts now",
    "node_up": "1 if a node answered the survey, otherwise 0",
    "node_ping_seconds": "How long a node took for one answer",
    "held": "Locks on a quorum of nodes",
    "reserved": "Reservations on a quorum of nodes",
    "oldest_hold_seconds": "For how long the oldest lock has been held",
    "waiting": "Waiters, by the task that holds the lock",
    "longest_line": "Length of the longest wait queue of a key",
    "oldest_wait_seconds": "How long the longest waiter has waited",
    "locks_on_nodes": "Locks, by the number of nodes that have them",
    "split": "Keys with several tokens, none of them on a quorum",
    "foreign_keys": "Keys below the prefix that are not of this library",
    "leaked_keys": "Keys below the prefix without a ttl",
    "pause_ends_in_seconds": "Time until the end of each pause that is in force",
    "runbook": "Always 1; its label is the address of the runbook, for alerts",
}
"""The help text of each gauge."""
WAITER_GAUGES = ("waiting", "longest_line", "oldest_wait_seconds")
LABELS = {
    **dict.fromkeys(("node_up", "node_ping_seconds", "leaked_keys"), "node"),
    **dict.fromkeys(("held", "reserved", "oldest_hold_seconds"), "task"),
    **dict.fromkeys(WAITER_GAUGES, "task"),
    "locks_on_nodes": "nodes",
    "pause_ends_in_seconds": "pattern",
    "runbook": "url",
}
"""Label name of each multi-valued gauge."""

Values = Mapping[str, "float | Mapping[str, float]"]
"""Values of gauges: a number, or a number for each value of the label."""


class Nodes:
    """A collector for prometheus_client: register it, or call `collect()`.

    Args:
        redlock: The lock whose nodes and prefix are surveyed.
        cache: Seconds for which a survey is cached.
        timeout: Seconds after which a node that has not returned all keys counts as down.
        parked: Function that asks the workers of an app for their parked tasks; None if no app is
            known. Then there are no gauges of waiters, because the nodes do not see the tasks that
            are parked in workers.
        votes_in: Function that returns the seconds until a quorum has a vote, None if it has one.
            Without it there is no gauge for that.
        runbook: Address of the runbook. Without it there is no gauge for that.
    """

    def __init__(
        self,
        redlock: Redlock,
        *,
        cache: float = CACHE_S,
        timeout: float = 3.0,
        parked: Callable[[], Parked] | None = None,
        votes_in: Callable[[], float | None] | None = None,
        runbook: str = "",
    ) -> None:
        self._redlock = redlock
        self._parked = parked
        self._votes_in = votes_in
        self._runbook = runbook
        self._voteless: float | None = None
        self._cache = cache
        self._timeout = timeout
        self._lock = threading.Lock()
        self._found: Survey | QuorumUnavailable | None = None
        self._at = -math.inf
        self._took = 0.0
        self._errors = 0

    def describe(self) -> list[Any]:
        """Return nothing, so that registration asks no node."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of one survey."""
        from prometheus_client.core import CounterMetricFamily

        with self._lock:  # concurrent scrapes wait, and share one survey
            good_for = max(self._cache, CACHE_TIMES_DURATION * self._took)
            if time.monotonic() >= self._at + good_for:
                self._look()
            found, took, errors = self._found, self._took, self._errors
            voteless = self._voteless
            age = time.monotonic() - self._at
        yield from _gauges({"survey_seconds": took, "survey_age_seconds": age})
        if self._runbook:
            yield from _gauges({"runbook": {self._runbook: 1.0}})
        failed = "Surveys that failed: no quorum, or a bug"
        yield CounterMetricFamily("celery_redlock_survey_errors", failed, value=errors)
        if voteless is not None:
            yield from _gauges({"quorum_votes_in_seconds": voteless})
        if isinstance(found, QuorumUnavailable):
            yield from _gauges(_of_nodes({v.node: v.vote is Vote.YES for v in found.votes}))
        elif found is not None:
            yield from _gauges(_of_nodes({look.name: look.reachable for look in found.looks}))
            values, known = _of_entries(found), self._parked is not None
            yield from _gauges({n: values[n] for n in values if known or n not in WAITER_GAUGES})

    def _look(self) -> None:
        self._found = self._voteless = None
        try:
            found, parked, voteless = at_once(
                self._survey, self._parked or Parked, self._votes_in or (lambda: None)
            )
            if self._votes_in is not None:
                self._voteless = voteless or 0.0
            self._found = found
            if self._parked is not None:
                self._found = count_parked(found, parked, prefix=self._redlock.prefix)
        except QuorumUnavailable as error:
            self._found = error
            self._errors += 1
        except Exception:
            # The scrape must still show what is known, and count the error.
            logger.exception("the survey of the nodes failed", extra=event("survey_failed"))
            self._errors += 1
        self._at = time.monotonic()

    def _survey(self) -> Survey:
        began = time.monotonic()
        try:
            return survey(self._redlock, kinds=KINDS, timeout=self._timeout)
        finally:
            self._took = time.monotonic() - began


def _of_nodes(up: Mapping[str, bool]) -> Values:
    enough = sum(up.values()) >= quorum_of(len(up))
    return {"nodes": len(up), "quorum_up": enough, "node_up": up}


def _of_entries(found: Survey) -> Values:
    locks = [entry for entry in found.entries if entry.kind == "lock"]
    owned = [e for e in found.entries if e.kind in ("lock", "reservation") and e.held]
    holders = {entry.resource: entry.owner for entry in reversed(locks)}
    label = _labels(entry.owner for entry in owned)
    counts: dict[str, Counter[str]] = {name: Counter() for name in ("held", "reserved", "waiting")}
    oldest: dict[str, float] = {}
    longest: dict[str, float] = {}
    waited: dict[str, float] = {}
    for entry in owned:
        task = label(entry.owner)
        counts["held" if entry.kind == "lock" else "reserved"][task] += 1
        if entry.kind == "lock":
            oldest[task] = max(entry.held_for or 0.0, oldest.get(task, 0.0))
    for entry in found.entries:
        if entry.kind == "line" and entry.waiting:
            task = label(holders.get(entry.resource))
            counts["waiting"][task] += entry.waiting
            longest[task] = max(entry.waiting, longest.get(task, 0))
            waited[task] = max(*entry.waits, waited.get(task, 0.0), 0.0)
    on_nodes = Counter(entry.nodes for entry in locks)
    reached = {look.name: (n, look) for n, look in enumerate(found.looks) if look.reachable}
    return {
        "pause_ends_in_seconds": {
            printable(pause.pattern)[:MAX_NAME_CHARS]: pause.ends_in
            for pause in found.pauses
            if not pause.limit
        },
        "node_ping_seconds": {name: look.rtt for name, (_, look) in reached.items()},
        **counts,
        "oldest_hold_seconds": oldest,
        "longest_line": longest,
        "oldest_wait_seconds": waited,
        "locks_on_nodes": {str(n): on_nodes[n] for n in range(1, len(found.looks) + 1)},
        "split": sum(entry.split for entry in found.entries),
        "foreign_keys": sum(entry.kind == "foreign" for entry in found.entries),
        "leaked_keys": {
            name: sum(entry.leaked_on(n) for entry in found.entries)
            for name, (n, _) in reached.items()
        },
    }


def _labels(owners: Iterable[Owner | None]) -> Callable[[Owner | None], str]:
    """Return a function that labels owners by task name: printable, not too long, not too many."""

    def name_of(owner: Owner | None) -> str:
        return printable(owner.task)[:MAX_NAME_CHARS] if owner is not None else ""

    common = Counter(map(name_of, owners)).most_common(MAX_TASKS)
    known = {"", *(name for name, _count in common)}

    def label(owner: Owner | None) -> str:
        name = name_of(owner)
        return name if name in known else OTHERS

    return label


def _gauges(values: Values) -> Iterator[Any]:
    from prometheus_client.core import GaugeMetricFamily

    for name, value in values.items():
        labels = [LABELS[name]] if name in LABELS else []
        family = GaugeMetricFamily(f"celery_redlock_{name}", GAUGES[name], labels=labels)
        for of_label, number in (value if isinstance(value, Mapping) else {"": value}).items():
            family.add_metric([of_label] if labels else [], float(number))
        yield family


def make_registry(redlock: Redlock, **options: Any) -> Any:
    """Return a registry of prometheus_client with the gauges of `Nodes` and nothing else.

    Raises:
        ConfigurationError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry
    except ImportError:
        raise ConfigurationError(
            'the exporter needs prometheus_client: pip install "celery-redlock[prometheus]"'
        ) from None
    registry = CollectorRegistry()
    registry.register(Nodes(redlock, **options))
    return registry


def exposition(registry: Any) -> str:
    """Return all metrics of a registry in Prometheus' text format."""
    from prometheus_client import generate_latest

    text: bytes = generate_latest(registry)
    return text.decode()


def figures(registry: Any) -> list[dict[str, Any]]:
    """Return all metrics of a registry as JSON data: name, labels, value."""
    return [
        {"name": sample.name, "labels": dict(sample.labels), "value": sample.value}
        for metric in registry.collect()
        for sample in metric.samples
    ]
