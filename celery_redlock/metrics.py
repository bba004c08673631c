"""Prometheus metrics of what becomes of locks, in the processes where it happens.

    from celery_redlock.metrics import install

    install(port=9468)  # where the app is made: in workers, beats, web servers

Counters and histograms only, made of the signals (`signals.py`) and of what nodes do (`events.py`).
Gauges come from the nodes, by the exporter (`exporter.py`): no process knows what all hold. The
label `task` is a task's name, empty outside tasks; never a key, never an id: there are too many.

Under prefork the bodies run in children, and who asks is answered by the main process: that needs
prometheus_client's multiprocess mode, a directory in PROMETHEUS_MULTIPROC_DIR before the program
starts. Counters and histograms of children that have died stay in the sums, as they must.

Any thread may observe while another forks: a child that was forked inside an observation would wait
for ever for a lock that nobody in it holds. So observing and forking exclude each other; and so do
reading these metrics and forking. Other collectors of the same registry are read without that: one
may take seconds, and who extends leases must not wait for it.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from celery.signals import worker_ready

from .events import NODE_FAILURES, Listener, subscribe, unsubscribe
from .messages import signals
from .protocol.errors import ConfigurationError, LeaseLost
from .protocol.lease import Lease
from .protocol.values import Owner

__all__ = ["BUCKETS", "Metrics", "install"]

logger = logging.getLogger("celery_redlock.metrics")

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"

BUCKETS: dict[str, tuple[float, ...]] = {
    "acquire": (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
                1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
    "hold": (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0),
    "node_rtt": (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
}  # fmt: skip
"""The histograms, and the upper bounds of their buckets unless others are given; seconds."""

LOST = ("expired", "refused", "max_lifetime")

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
    """A kind of metric that is not read while this process forks."""

    class Gated(kind):  # type: ignore[misc]
        def collect(self) -> list[Any]:
            with _gate:
                return list(super().collect())

    return Gated


class _Nodes(Listener):
    """What the core tells that no signal does."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def not_extended(self, lease: Lease) -> None:
        owner = Owner.of(lease.token)
        task = signals.named(owner.task) if owner is not None else None
        self._metrics._count(self._metrics.extend, _name(task, lease), "failed")

    def node_answered(self, node: str, seconds: float) -> None:
        self._metrics._node_answered(node, seconds)

    def node_failed(self, node: str, kind: str) -> None:
        self._metrics._node_failed(node, kind)


class Metrics:
    """The metrics, once installed: see `install`.

    Args:
        registry: prometheus_client's.
        buckets: As `BUCKETS`, whole.
    """

    def __init__(self, registry: Any, buckets: Mapping[str, Sequence[float]]) -> None:
        import prometheus_client

        Counter, Histogram = map(_gated, (prometheus_client.Counter, prometheus_client.Histogram))
        self.registry = registry
        self._server: Any = None
        self._known: set[str] = set()
        self._children: dict[tuple[Any, ...], Any] = {}

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(f"celery_redlock_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Any:
            return Histogram(
                *(f"celery_redlock_{name}_seconds", text, labels),
                registry=registry,
                buckets=buckets[name],
            )

        self.acquire = counter("acquire", "Calls for a lock, by how they ended", "task", "outcome")
        self.acquire_seconds = histogram(
            "acquire", "From the first call for a lock until it was granted", "task"
        )
        self.hold_seconds = histogram("hold", "How long a lock was held", "task")
        self.extend = counter("extend", "Rounds that were to renew a lease", "task", "outcome")
        self.lost = counter(
            "lost", "Leases that ended before their holder let go", "task", "reason"
        )
        self.deduplicated = counter(
            "deduplicated", "Tasks not sent or not run: another has the key", "task", "where"
        )
        self.node_errors = counter("node_errors", "Times a node failed us", "node", "kind")
        self.node_rtt_seconds = histogram(
            "node_rtt", "From a request to a node's answer, while it was waited for", "node"
        )
        self._nodes = _Nodes(self)
        self._receivers: tuple[tuple[Any, Callable[..., None]], ...] = (
            (signals.lock_acquired, self._acquired),
            (signals.lock_contended, self._contended),
            (signals.lock_unavailable, self._unavailable),
            (signals.lock_extended, self._extended),
            (signals.lock_lost, self._lost),
            (signals.lock_released, self._released),
            (signals.task_skipped, self._skipped),
            (signals.beat_deduplicated, self._beat),
        )
        for signal, receiver in self._receivers:
            signal.connect(receiver, weak=False, dispatch_uid=(__name__, id(self)))
        subscribe(self._nodes)

    def close(self) -> None:
        """Observe no more, and answer no more."""
        global _installed
        for signal, _receiver in self._receivers:
            signal.disconnect(dispatch_uid=(__name__, id(self)))
        unsubscribe(self._nodes)
        worker_ready.disconnect(dispatch_uid=__name__)
        for metric in {id(metric): metric for metric in vars(self).values()}.values():
            if hasattr(metric, "describe") and metric is not self.registry:
                with contextlib.suppress(KeyError):
                    self.registry.unregister(metric)
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
        if _installed is not None and _installed[0] is self:
            _installed = None

    def foresee(self, tasks: Iterable[str]) -> None:
        """Begin at 0 for these tasks: a rise from nothing to 1 is none to Prometheus."""
        with _gate:
            for task in tasks:
                if task not in self._known:
                    self._known.add(task)
                    for reason in LOST:
                        self._child(self.lost, task, reason)
                    for outcome in ("acquired", "held", "unavailable"):
                        self._child(self.acquire, task, outcome)
                    for outcome in ("extended", "failed"):
                        self._child(self.extend, task, outcome)

    # -- What is told ----------------------------------------------------------------------------

    def _acquired(self, sender: Any, lease: Lease, waited: float, **_more: Any) -> None:
        task = _name(sender, lease)
        self.foresee([task])
        with _gate:
            self._child(self.acquire, task, "acquired").inc()
            self._child(self.acquire_seconds, task).observe(waited)

    def _contended(self, sender: Any, **_more: Any) -> None:
        self._count(self.acquire, _name(sender), "held")

    def _unavailable(self, sender: Any, **_more: Any) -> None:
        self._count(self.acquire, _name(sender), "unavailable")

    def _extended(self, sender: Any, lease: Lease, **_more: Any) -> None:
        self._count(self.extend, _name(sender, lease), "extended")

    def _lost(self, sender: Any, loss: LeaseLost, **_more: Any) -> None:
        self._count(self.lost, _name(sender, loss.lease), loss.reason)

    def _released(self, sender: Any, lease: Lease, held_for: float, **_more: Any) -> None:
        with _gate:
            self._child(self.hold_seconds, _name(sender, lease)).observe(held_for)

    def _skipped(self, sender: Any, where: str, **_more: Any) -> None:
        self._count(self.deduplicated, _name(sender), where)

    def _beat(self, sender: Any, entry: Any, where: str, **_more: Any) -> None:
        # A beat need not know the task that it sends.
        self._count(self.deduplicated, _name(sender) or str(entry.task), where)

    def _node_answered(self, node: str, seconds: float) -> None:
        with _gate:
            if node not in self._known:
                self._known.add(node)
                for kind in NODE_FAILURES:
                    self._child(self.node_errors, node, kind)
            self._child(self.node_rtt_seconds, node).observe(seconds)

    def _node_failed(self, node: str, kind: str) -> None:
        self._count(self.node_errors, node, kind)

    def _count(self, counter: Any, *labels: str) -> None:
        with _gate:
            self._child(counter, *labels).inc()

    def _child(self, metric: Any, *labels: str) -> Any:
        # prometheus_client finds them too, in ten times the time.
        key = (metric, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child

    # -- For who asks ----------------------------------------------------------------------------

    def begin(self, consumer: Any, port: int | None, addr: str) -> None:
        """A worker's main process, when it is ready; the arguments are `install`'s."""
        from .config.task_lock import lock_of

        tasks = consumer.app.tasks.values()
        self.foresee(task.name for task in tasks if lock_of(task) is not None)
        if port is not None:
            _warn(consumer)
            self.serve(port, addr)

    def serve(self, port: int, addr: str) -> None:
        """Answer over HTTP, from a thread of its own; what cannot be is an error in the log."""
        from prometheus_client import CollectorRegistry, start_http_server

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
        """The metrics, as prometheus_client asks for them."""
        path = os.environ.get(DIRECTORY)
        if path:
            from prometheus_client.multiprocess import MultiProcessCollector

            bury(path)
            return list(MultiProcessCollector(None, path).collect())
        return list(self._registry.collect())

    def describe(self) -> list[Any]:
        """Nothing: it is not to be collected when it is registered."""
        return []


def bury(path: str) -> None:
    """Have the live gauges of processes that have died go with them; the program's, we have none.

    Args:
        path: The directory of the multiprocess mode.
    """
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

    Call it where the app is made, before the worker forks. Again with the same arguments it is
    nothing.

    Args:
        registry: prometheus_client's; its default one if None.
        buckets: Other upper bounds, in seconds, for the histograms named in `BUCKETS`.
        port: Where a worker's main process answers over HTTP, once it is ready; None for nowhere:
            the program shows the registry itself. 0 for any that is free.
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


def _warn(consumer: Any) -> None:
    from celery.concurrency.prefork import TaskPool

    if isinstance(consumer.pool, TaskPool) and not os.environ.get(DIRECTORY):
        logger.warning(
            "metrics show the worker's main process alone, and tasks run in its children: set %s to"
            " an empty directory before the worker starts",
            DIRECTORY,
        )


def _name(task: Any, lease: Lease | None = None) -> str:
    """The label: the task's name; of one that this process does not know, what its token says."""
    if task is not None:
        return str(task.name)
    owner = Owner.of(lease.token) if lease is not None else None
    return owner.task if owner is not None else ""
