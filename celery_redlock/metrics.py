"""Prometheus metrics of what becomes of locks, in the processes where it happens.

    from celery_redlock.metrics import install

    install(port=9468)  # where the app is made: in workers, beats, web servers

Counters and histograms only, made of the signals (`signals.py`) and of what nodes do (`events.py`).
Gauges come from the nodes, by the exporter (`exporter.py`): no process knows what all hold. The
label `task` is a task's name, empty outside tasks; never a key, never an id: there are too many.

Under prefork the bodies run in children, while the main process answers Prometheus: that needs
prometheus_client's multiprocess mode, a directory in PROMETHEUS_MULTIPROC_DIR before the program
starts. Counters and histograms of children that have died stay in the sums, as they must.

Any thread may observe while another forks: a child that was forked inside an observation would wait
endlessly for a lock that none of its threads holds. So observing and forking exclude each other;
and so do reading these metrics and forking. Other collectors of the same registry are read without
that: one may take seconds, and the thread that extends leases must not wait for it.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from celery.signals import worker_ready

from .events import NODE_FAILURES, Listener, subscribe, unsubscribe
from .messages import signals
from .protocol.errors import ConfigurationError
from .protocol.lease import Lease
from .protocol.values import Owner

__all__ = ["BUCKETS", "Metrics", "install"]

logger = logging.getLogger("celery_redlock.metrics")

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"

COUNTERS: dict[str, tuple[str, tuple[str, str]]] = {
    "acquire": ("Calls for a lock, by how they ended", ("task", "outcome")),
    "extend": ("Rounds that were to renew a lease", ("task", "outcome")),
    "lost": ("Leases that ended before their holder let go", ("task", "reason")),
    "deduplicated": ("Tasks not sent or not run: another has the key", ("task", "where")),
    "node_errors": ("Times a node failed us", ("node", "kind")),
}
"""`celery_redlock_..._total`: what each counts, and its labels."""
HISTOGRAMS = {
    "acquire": ("From the first call for a lock until it was granted", "task"),
    "hold": ("How long a lock was held", "task"),
    "node_rtt": ("From a request to a node's answer, while it was waited for", "node"),
}
"""`celery_redlock_..._seconds`: what each measures, and its label."""
BUCKETS: dict[str, tuple[float, ...]] = {
    "acquire": (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
                1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
    "hold": (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0),
    "node_rtt": (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
}  # fmt: skip
"""The histograms, and the upper bounds of their buckets unless others are given; seconds."""

OF_A_TASK = {
    "acquire": ("acquired", "held", "unavailable"),
    "extend": ("extended", "failed"),
    "lost": ("expired", "refused", "max_lifetime"),
}
OF_A_NODE = {"node_errors": NODE_FAILURES}
"""Counters that begin at 0, with the values of their second label: to Prometheus, a rise from
nothing to 1 is none."""

_gate = threading.RLock()


def _after_fork() -> None:
    global _gate
    _gate = threading.RLock()


os.register_at_fork(
    before=lambda: _gate.acquire(),
    after_in_parent=lambda: _gate.release(),
    after_in_child=_after_fork,
)


def _gated(kind: Any) -> Any:
    """Make a kind of metric that is not read while this process forks."""

    class Gated(kind):  # type: ignore[misc]
        def collect(self) -> list[Any]:
            with _gate:
                return list(super().collect())

    return Gated


class Metrics(Listener):
    """The metrics, once installed in a registry: see `install`."""

    def __init__(self, registry: Any, buckets: Mapping[str, Sequence[float]]) -> None:
        import prometheus_client

        Counter, Histogram = map(_gated, (prometheus_client.Counter, prometheus_client.Histogram))
        self.registry = registry
        self._server: Any = None
        self._known: set[str] = set()
        self._children: dict[tuple[Any, ...], Any] = {}
        self._counters = {
            name: Counter(f"celery_redlock_{name}", about, labels, registry=registry)
            for name, (about, labels) in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(
                *(f"celery_redlock_{name}_seconds", about, [label]),
                registry=registry,
                buckets=buckets[name],
            )
            for name, (about, label) in HISTOGRAMS.items()
        }
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
            # A beat need not know the task that it sends.
            signals.beat_deduplicated: (
                lambda sender, entry, where, **_: count(
                    "deduplicated", _name(sender) or str(entry.task), where
                )
            ),
        }
        for signal, receiver in self._receivers.items():
            signal.connect(receiver, weak=False, dispatch_uid=(__name__, id(self)))
        subscribe(self)

    def close(self) -> None:
        """Observe no more, and answer no more."""
        global _installed
        for signal in self._receivers:
            signal.disconnect(dispatch_uid=(__name__, id(self)))
        unsubscribe(self)
        worker_ready.disconnect(dispatch_uid=__name__)
        for metric in (*self._counters.values(), *self._histograms.values()):
            self.registry.unregister(metric)
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
        if _installed is not None and _installed[0] is self:
            _installed = None

    # -- Observing -------------------------------------------------------------------------------

    def not_extended(self, lease: Lease) -> None:
        """Count a round that no signal tells of."""
        owner = Owner.of(lease.token)
        task = signals.named(owner.task) if owner is not None else None
        self._count("extend", _name(task, lease), "failed")

    def node_answered(self, node: str, seconds: float) -> None:
        """Measure how long a node took."""
        self._begin_at_zero(node, OF_A_NODE)
        self._observe("node_rtt", seconds, node)

    def node_failed(self, node: str, kind: str) -> None:
        """Count a node's failure."""
        self._count("node_errors", node, kind)

    def _acquired(self, sender: Any, lease: Lease, waited: float, **_more: Any) -> None:
        task = _name(sender, lease)
        self._begin_at_zero(task, OF_A_TASK)
        self._count("acquire", task, "acquired")
        self._observe("acquire", waited, task)

    def _begin_at_zero(self, label: str, counters: Mapping[str, Iterable[str]]) -> None:
        if label in self._known:
            return
        with _gate:
            self._known.add(label)
            for counter, values in counters.items():
                for value in values:
                    self._child(self._counters[counter], label, value)

    def _count(self, counter: str, *labels: str) -> None:
        with _gate:
            self._child(self._counters[counter], *labels).inc()

    def _observe(self, histogram: str, seconds: float, label: str) -> None:
        with _gate:
            self._child(self._histograms[histogram], label).observe(seconds)

    def _child(self, metric: Any, *labels: str) -> Any:
        # prometheus_client finds them too, in ten times the time.
        key = (metric, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child

    # -- Answering -------------------------------------------------------------------------------

    def begin(self, consumer: Any, port: int | None, addr: str) -> None:
        """Begin in a worker's main process, when it is ready; the arguments are `install`'s."""
        from celery.concurrency.prefork import TaskPool
        from prometheus_client import CollectorRegistry, start_http_server

        from .config.task_lock import lock_of

        for task in consumer.app.tasks.values():
            if lock_of(task) is not None:
                self._begin_at_zero(task.name, OF_A_TASK)
        if port is None:
            return
        if isinstance(consumer.pool, TaskPool) and not os.environ.get(DIRECTORY):
            logger.warning(
                "metrics show the worker's main process alone, and tasks run in its children: set"
                " %s to an empty directory before the worker starts",
                DIRECTORY,
            )
        served = CollectorRegistry()
        served.register(_Served(self.registry))
        try:
            self._server = start_http_server(port, addr, served)
        except OSError as error:
            logger.error("no metrics on %s:%d: %s", addr, port, error)
            return
        logger.info("metrics on http://%s:%d/metrics", addr, self._server[0].server_port)


class _Served:
    """What a process shows: its own metrics, or in multiprocess mode those of its whole family."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry

    def collect(self) -> list[Any]:
        """Return the metrics, as prometheus_client asks for them."""
        path = os.environ.get(DIRECTORY)
        if path:
            from prometheus_client.multiprocess import MultiProcessCollector

            bury(path)
            return list(MultiProcessCollector(None, path).collect())
        return list(self._registry.collect())

    def describe(self) -> list[Any]:
        """Return nothing: it is not to be collected when it is registered."""
        return []


def bury(path: str) -> None:
    """Remove live gauges of processes that have died: those of the program, as we have none."""
    from prometheus_client.multiprocess import mark_process_dead

    files = glob.glob(os.path.join(glob.escape(path), "gauge_live*_*.db"))
    for pid in {found[1] for file in files if (found := re.search(r"_(\d+)\.db$", file))}:
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            mark_process_dead(int(pid), path)
        except OSError:
            continue  # it lives, and is not ours


_installed: tuple[Metrics, tuple[Any, ...]] | None = None


def install(
    registry: Any = None,
    *,
    buckets: Mapping[str, Sequence[float]] | None = None,
    port: int | None = None,
    addr: str = "127.0.0.1",
) -> Metrics:
    """Count and measure what becomes of locks in this process, and in those forked from it.

    Call it where the app is made, before the worker forks. Calling it again with the same arguments
    changes nothing.

    Args:
        registry: prometheus_client's; its default one if None.
        buckets: Other upper bounds, in seconds, for the histograms named in `BUCKETS`.
        port: Where a worker's main process answers over HTTP, once it is ready; 0 for any free
            port; None for nowhere, if the program shows the registry itself.
        addr: On which address; loopback unless told otherwise. Who can reach it can read it.

    Raises:
        ConfigurationError: prometheus_client is not installed, PROMETHEUS_MULTIPROC_DIR names no
            directory, the buckets cannot be, or it has been called with other arguments before.
    """
    global _installed
    try:
        import prometheus_client
    except ImportError:
        raise ConfigurationError(
            'metrics need prometheus_client: pip install "celery-redlock[prometheus]"'
        ) from None
    path = os.environ.get(DIRECTORY)
    if path is not None and not os.path.isdir(path):
        raise ConfigurationError(
            f"{DIRECTORY} must name a directory that exists and is empty when the program starts;"
            f" it is {path!r}"
        )
    registry = prometheus_client.REGISTRY if registry is None else registry
    chosen = _buckets(buckets or {})
    if port is not None and not (isinstance(port, int) and 0 <= port < 65536):
        raise ConfigurationError(f"port must be a number from 0 to 65535, or None; it is {port!r}")
    given = (id(registry), chosen, port, addr)
    if _installed is not None:
        if _installed[1] != given:
            raise ConfigurationError(
                "metrics.install() was called before, with other arguments; call it once"
            )
        return _installed[0]
    metrics = Metrics(registry, chosen)
    _installed = metrics, given

    def ready(sender: Any = None, **_signal: Any) -> None:
        metrics.begin(sender, port, addr)

    worker_ready.connect(ready, weak=False, dispatch_uid=__name__)
    return metrics


def _buckets(given: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    for name, bounds in given.items():
        if name not in BUCKETS:
            raise ConfigurationError(
                f"buckets: there is no histogram {name!r}; there are {', '.join(BUCKETS)}"
            )
        numbers = all(isinstance(b, (int, float)) and b > 0 for b in bounds)
        if not bounds or not numbers or list(bounds) != sorted(set(bounds)):
            raise ConfigurationError(
                f"buckets[{name!r}] must be rising numbers of seconds above 0; they are {bounds!r}"
            )
    return {name: tuple(given.get(name, bounds)) for name, bounds in BUCKETS.items()}


def _name(task: Any, lease: Lease | None = None) -> str:
    """Return the task's name; of one that this process does not know, what its token says."""
    if task is not None:
        return str(task.name)
    owner = Owner.of(lease.token) if lease is not None else None
    return owner.task if owner is not None else ""
