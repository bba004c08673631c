"""Counters and histograms of locks, for Prometheus and for OpenTelemetry.

They are made from the signals (`messages/signals.py`) and from the events of nodes (`events.py`).
The label `task` is a task's name, empty outside tasks. It is never a key or an id, because there
are too many of these.

Any thread may observe while another forks. A child that was forked inside an observation would wait
endlessly for a lock that none of its threads holds. So observing and forking exclude each other.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from .events import NODE_FAILURES, Listener, subscribe, unsubscribe
from .messages import signals
from .protocol.lease import Lease
from .protocol.values import Owner

__all__ = ["BUCKETS", "COUNTERS", "HISTOGRAMS", "TASK_COUNTERS", "Measures", "no_fork"]

COUNTERS: dict[str, tuple[str, tuple[str, str]]] = {
    "acquire": ("Requests for a lock, by outcome", ("task", "outcome")),
    "extend": ("Extensions of a lease, by outcome", ("task", "outcome")),
    "lost": ("Leases that ended before their release", ("task", "reason")),
    "deduplicated": ("Tasks not sent or not run, because another has the key", ("task", "where")),
    "node_errors": ("Failures of a node, by kind", ("node", "kind")),
}
"""The description and the labels of each counter."""
HISTOGRAMS = {
    "acquire_duration": ("Time from the request for a lock until its grant", "task"),
    "hold": ("How long a lock was held", "task"),
    "node_rtt": ("Time from a request to a node's answer in time", "node"),
}
"""The description and the label of each histogram; all are in seconds."""
BUCKETS: dict[str, tuple[float, ...]] = {
    "acquire_duration": (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
                1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
    "hold": (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0),
    "node_rtt": (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
}  # fmt: skip
"""The default upper bounds of the buckets of each histogram; seconds."""

TASK_COUNTERS = {
    "acquire": ("acquired", "held", "unavailable"),
    "extend": ("extended", "failed"),
    "lost": ("expired", "refused", "max_lifetime", "stalled"),
}
NODE_COUNTERS = {"node_errors": NODE_FAILURES}
"""Counters that begin at 0, with the values of their second label: a step from no value to 1 is not
an increase for Prometheus."""

_forking = threading.RLock()


def no_fork() -> threading.RLock:
    """Return a lock that keeps every thread of this process from forking while it is held."""
    return _forking


def _after_fork() -> None:
    global _forking
    _forking = threading.RLock()


if hasattr(os, "register_at_fork"):  # Windows lacks it, and a program that publishes may run there
    os.register_at_fork(
        before=lambda: _forking.acquire(),
        after_in_parent=lambda: _forking.release(),
        after_in_child=_after_fork,
    )


class Measures(Listener, ABC):
    """A listener that turns events into calls of a subclass's `add` and `record`."""

    def __init__(self) -> None:
        self._begun: set[str] = set()
        count, observe = self._count, self._observe
        self._receivers: dict[Any, Any] = {
            signals.lock_acquired: self._acquired,
            signals.lock_contended: lambda sender, **_: count("acquire", _name(sender), "held"),
            signals.lock_unavailable: (
                lambda sender, **_: count("acquire", _name(sender), "unavailable")
            ),
            signals.lock_extended: (
                lambda sender, lease, **_: count("extend", _name(sender, lease), "extended")
            ),
            signals.lock_lost: (
                lambda sender, loss, **_: count("lost", _name(sender, loss.lease), loss.reason)
            ),
            signals.lock_released: (
                lambda sender, lease, held_for, **_: observe("hold", held_for, _name(sender, lease))
            ),
            signals.task_skipped: (
                lambda sender, where, **_: count("deduplicated", _name(sender), where)
            ),
            # A beat may not have imported the task that it sends.
            signals.beat_deduplicated: (
                lambda sender, entry, where, **_: count(
                    "deduplicated", _name(sender) or str(entry.task), where
                )
            ),
        }
        for signal, receiver in self._receivers.items():
            signal.connect(receiver, weak=False, dispatch_uid=(__name__, id(self)))
        subscribe(self)

    @abstractmethod
    def add(self, counter: str, amount: int, *labels: str) -> None:
        """Add to one of `COUNTERS`."""

    @abstractmethod
    def record(self, histogram: str, seconds: float, label: str) -> None:
        """Record a value of one of `HISTOGRAMS`."""

    def close(self) -> None:
        """Stop observing."""
        for signal in self._receivers:
            signal.disconnect(dispatch_uid=(__name__, id(self)))
        unsubscribe(self)

    def not_extended(self, lease: Lease) -> None:
        """Count a failed round, which sends no signal."""
        owner = Owner.of(lease.token)
        task = signals.named(owner.task) if owner is not None else None
        self._count("extend", _name(task, lease), "failed")

    def node_answered(self, node: str, seconds: float) -> None:
        """Measure the time that a node took."""
        self._begin_at_zero(node, NODE_COUNTERS)
        self._observe("node_rtt", seconds, node)

    def node_failed(self, node: str, kind: str) -> None:
        """Count a node's failure."""
        self._count("node_errors", node, kind)

    def _acquired(self, sender: Any, lease: Lease, waited: float, **_more: Any) -> None:
        task = _name(sender, lease)
        self._begin_at_zero(task, TASK_COUNTERS)
        self._count("acquire", task, "acquired")
        self._observe("acquire_duration", waited, task)

    def _begin_at_zero(self, label: str, counters: Mapping[str, Iterable[str]]) -> None:
        if label in self._begun:
            return
        with _forking:
            self._begun.add(label)
            for counter, values in counters.items():
                for value in values:
                    self.add(counter, 0, label, value)

    def _count(self, counter: str, *labels: str) -> None:
        with _forking:
            self.add(counter, 1, *labels)

    def _observe(self, histogram: str, seconds: float, label: str) -> None:
        with _forking:
            self.record(histogram, seconds, label)


def _name(task: Any, lease: Lease | None = None) -> str:
    """Return the task's name; for a task that is unknown here, the name in the lease's token."""
    if task is not None:
        return str(task.name)
    owner = Owner.of(lease.token) if lease is not None else None
    return owner.task if owner is not None else ""
