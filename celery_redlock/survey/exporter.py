"""Gauges for Prometheus, of what lies on the nodes: one survey per scrape, and none too often.

It is a look from outside, at nodes that are asked at slightly different moments (`snapshot.py`): a
lock that is just being taken or freed may be seen on some nodes only. A node that is away is a
value and no failure; where no quorum answers, nothing is said of locks, and still of each node.

A survey reads every key below the prefix, on each node. So it is kept for some seconds, and the
longer it took, the longer: it takes no more than a tenth of the time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..protocol.errors import ConfigurationError, QuorumUnavailable
from ..protocol.values import Owner, Vote, printable, quorum_of
from .models import KINDS, Entry, Survey
from .snapshot import survey

if TYPE_CHECKING:
    from ..locking.redlock import Redlock

__all__ = ["Nodes", "exposition", "figures", "make_registry"]

logger = logging.getLogger("celery_redlock.exporter")

CACHE = 5.0
"""Seconds for which a survey is good, unless another time is given."""
REST = 9
"""It is good for this many times as long as it took, at least."""
MOST_TASKS = 500
"""Task names that get a label. What lies on nodes is foreign text, and may name any number."""
LONGEST_NAME = 200
OTHERS = "(others)"


class Nodes:
    """A collector, as prometheus_client has them: register it, or ask it to `collect()`.

    Args:
        redlock: Whose nodes and prefix.
        cache: Seconds for which a survey is good.
        timeout: Seconds after which a node that has not told all counts as down.
    """

    def __init__(self, redlock: Redlock, *, cache: float = CACHE, timeout: float = 3.0) -> None:
        self._redlock = redlock
        self._cache = cache
        self._timeout = timeout
        self._lock = threading.Lock()
        self._found: Survey | QuorumUnavailable | None = None
        self._at = -math.inf
        self._took = 0.0
        self._errors = 0

    def describe(self) -> list[Any]:
        """Nothing: no node is asked when it is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics, of one survey."""
        with self._lock:  # whoever asks meanwhile is given the same
            if time.monotonic() >= self._at + max(self._cache, REST * self._took):
                self._look()
            found, took, errors = self._found, self._took, self._errors
            age = time.monotonic() - self._at
        yield _gauge("survey_seconds", "How long the last survey of the nodes took", took)
        yield _gauge("survey_age_seconds", "How old it is", age)
        yield _counter("survey_errors", "Surveys that failed: no quorum, or a bug", errors)
        if isinstance(found, QuorumUnavailable):
            up = {vote.node: vote.vote is Vote.YES for vote in found.votes}
            yield from _of_nodes(up, {})
        elif found is not None:
            looks = found.looks
            yield from _of_nodes(
                {look.name: look.reachable for look in looks},
                {look.name: look.rtt for look in looks if look.reachable},
            )
            yield from _of_entries(found)

    def _look(self) -> None:
        self._found = None
        began = time.monotonic()
        try:
            self._found = survey(self._redlock, kinds=KINDS, timeout=self._timeout)
        except QuorumUnavailable as error:
            self._found = error
            self._errors += 1
        except Exception:
            # Whoever asks is to be told what is known, and that something is wrong.
            logger.exception("could not look at the nodes")
            self._errors += 1
        self._at = time.monotonic()
        self._took = self._at - began


def _of_nodes(up: dict[str, bool], ping: dict[str, float]) -> Iterator[Any]:
    yield _gauge("nodes", "How many nodes there are", len(up))
    enough = sum(up.values()) >= quorum_of(len(up))
    yield _gauge("quorum_up", "Whether a quorum of nodes told what they have", enough)
    ups = {(node,): float(is_up) for node, is_up in up.items()}
    yield _gauge("node_up", "Whether a node told what it has", ups, "node")
    pings = {(node,): rtt for node, rtt in ping.items()}
    yield _gauge("node_ping_seconds", "How long a node took for one answer", pings, "node")


def _of_entries(found: Survey) -> Iterator[Any]:
    locks = [entry for entry in found.entries if entry.kind == "lock"]
    held = [entry for entry in locks if entry.held]
    reserved = [e for e in found.entries if e.kind == "reservation" and e.held]
    lines = [entry for entry in found.entries if entry.kind == "line" and entry.waiting]
    holders = {entry.resource: entry.owner for entry in reversed(locks)}
    label = _Labels([*held, *reserved])

    def of_line(entry: Entry) -> str:
        return label(holders.get(entry.resource))

    def of_owner(entry: Entry) -> str:
        return label(entry.owner)

    yield _by_task("held", "Locks that a quorum of nodes has", _sum_by(of_owner, held))
    yield _by_task("reserved", "Reservations that a quorum has", _sum_by(of_owner, reserved))
    yield _by_task(
        "oldest_hold_seconds",
        "For how long the oldest lock has been held",
        _max_by(of_owner, ((entry, entry.held_for or 0.0) for entry in held)),
    )
    yield _by_task(
        "waiting",
        "Who waits, by the task that holds what is waited for",
        _sum_by(of_line, lines, lambda entry: entry.waiting),
    )
    yield _by_task(
        "longest_line",
        "Who waits for one key, at most",
        _max_by(of_line, ((entry, entry.waiting) for entry in lines)),
    )
    yield _by_task(
        "oldest_wait_seconds",
        "For how long the first of a line has waited",
        _max_by(of_line, ((entry, max(entry.waits, default=0.0)) for entry in lines)),
    )
    total = len(found.looks)
    on_nodes = Counter(entry.nodes for entry in locks)
    yield _gauge(
        "locks_on_nodes",
        "Locks, by how many nodes have them",
        {(str(count),): on_nodes[count] for count in range(1, total + 1)},
        "nodes",
    )
    split = sum(entry.split for entry in found.entries)
    yield _gauge("split", "Keys for which the nodes have several tokens, none a quorum", split)
    foreign = sum(entry.kind == "foreign" for entry in found.entries)
    yield _gauge("foreign_keys", "Keys below the prefix that are not of this library", foreign)
    leaked = {
        (look.name,): sum(_leaks(entry, node) for entry in found.entries)
        for node, look in enumerate(found.looks)
        if look.reachable
    }
    yield _gauge("leaked_keys", "Keys below the prefix without a ttl", leaked, "node")


def _leaks(entry: Entry, node: int) -> bool:
    return any(ttls[node] == math.inf for ttls in (entry.ttls, *(r.ttls for r in entry.rivals)))


class _Labels:
    """Task names as labels: printable, not too long and not too many."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        counts = Counter(self._name(entry.owner) for entry in entries)
        self._known = {name for name, _count in counts.most_common(MOST_TASKS)}

    def __call__(self, owner: Owner | None) -> str:
        name = self._name(owner)
        return name if not name or name in self._known else OTHERS

    @staticmethod
    def _name(owner: Owner | None) -> str:
        return printable(owner.task)[:LONGEST_NAME] if owner is not None else ""


def _sum_by(task: Any, entries: Iterable[Entry], value: Any = lambda _entry: 1) -> dict[str, float]:
    """Sums, by the task of each entry."""
    sums: Counter[str] = Counter()
    for entry in entries:
        sums[task(entry)] += value(entry)
    return dict(sums)


def _max_by(task: Any, entries: Iterable[tuple[Entry, float]]) -> dict[str, float]:
    """The largest, by the task of each entry."""
    largest: dict[str, float] = {}
    for entry, value in entries:
        name = task(entry)
        largest[name] = max(value, largest.get(name, 0.0))
    return largest


def _by_task(name: str, text: str, values: dict[str, float]) -> Any:
    return _gauge(name, text, {(task,): value for task, value in values.items()}, "task")


def _gauge(name: str, text: str, value: Any, *labels: str) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    if not labels:
        return GaugeMetricFamily(f"celery_redlock_{name}", text, value=float(value))
    family = GaugeMetricFamily(f"celery_redlock_{name}", text, labels=labels)
    for key, number in value.items():
        family.add_metric(key, float(number))
    return family


def _counter(name: str, text: str, value: int) -> Any:
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(f"celery_redlock_{name}", text, value=value)


def make_registry(redlock: Redlock, **options: float) -> Any:
    """A registry of prometheus_client with these gauges and nothing else.

    Args:
        redlock: Whose nodes and prefix.
        **options: As for `Nodes`.

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
    """All its metrics in Prometheus' text format."""
    from prometheus_client import generate_latest

    text: bytes = generate_latest(registry)
    return text.decode()


def figures(registry: Any) -> list[dict[str, Any]]:
    """All its metrics for a program that reads JSON: name, labels, value."""
    return [
        {"name": sample.name, "labels": dict(sample.labels), "value": sample.value}
        for metric in registry.collect()
        for sample in metric.samples
    ]
