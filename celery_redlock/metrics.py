"""Prometheus metrics of locks, in the processes that use them.

    from celery_redlock.metrics import install

    install(port=9468)  # where the app is made: in workers, beats, web servers

These are only counters and histograms (`measures.py`). Gauges come from the nodes, by the exporter
(`survey/exporter.py`), because no process has a list of all locks.

With prefork the bodies run in children, but the main process answers Prometheus. That needs
prometheus_client's multiprocess mode: a directory in PROMETHEUS_MULTIPROC_DIR before the program
starts. Counters and histograms of dead children remain in the sums, as they must.

Reading these metrics and forking exclude each other, like observing and forking. Other collectors
of the same registry are read without that: one may take seconds, and the thread that extends leases
must not wait for it.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from celery.signals import worker_ready

from .measures import BUCKETS, COUNTERS, HISTOGRAMS, TASK_COUNTERS, Measures, no_fork
from .protocol.errors import ConfigurationError
from .protocol.texts import event

__all__ = ["BUCKETS", "Metrics", "install"]

logger = logging.getLogger("celery_redlock.metrics")

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"


def _gated(kind: Any) -> Any:
    """Return a subclass of a kind of metric that is not read while this process forks."""

    class Gated(kind):  # type: ignore[misc]
        def collect(self) -> list[Any]:
            with no_fork():
                return list(super().collect())

    return Gated


class Metrics(Measures):
    """The metrics in a registry: see `install`."""

    def __init__(self, registry: Any, buckets: Mapping[str, Sequence[float]]) -> None:
        import prometheus_client

        Counter, Histogram = map(_gated, (prometheus_client.Counter, prometheus_client.Histogram))
        self.registry = registry
        self._server: Any = None
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
        super().__init__()

    def close(self) -> None:
        """Stop observing, remove the metrics and stop answering over HTTP."""
        global _installed
        super().close()
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

    def add(self, counter: str, amount: int, *labels: str) -> None:
        """Add to a counter."""
        self._child(self._counters[counter], *labels).inc(amount)

    def record(self, histogram: str, seconds: float, label: str) -> None:
        """Record a value of a histogram."""
        self._child(self._histograms[histogram], label).observe(seconds)

    def _child(self, metric: Any, *labels: str) -> Any:
        # Cached here, because prometheus_client takes ten times as long to find them.
        key = (metric, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child

    def begin(self, consumer: Any, port: int | None, addr: str) -> None:
        """Begin in a worker's main process, when it is ready.

        Args:
            consumer: The worker's consumer.
            port, addr: As for `install`.
        """
        from celery.concurrency.prefork import TaskPool
        from prometheus_client import CollectorRegistry, start_http_server

        from .config.task_lock import lock_of

        for task in consumer.app.tasks.values():
            if lock_of(task) is not None:
                self._begin_at_zero(task.name, TASK_COUNTERS)
        if port is None:
            return
        if isinstance(consumer.pool, TaskPool) and not os.environ.get(DIRECTORY):
            logger.warning(
                "the metrics show only the worker's main process, and tasks run in its children:"
                " set %s to an empty directory before the worker starts",
                DIRECTORY,
                extra=event("metrics_incomplete"),
            )
        served = CollectorRegistry()
        served.register(_Served(self.registry))
        try:
            self._server = start_http_server(port, addr, served)
        except OSError as error:
            logger.error(
                "metrics cannot be served on %s:%d: %s",
                *(addr, port, error),
                extra=event("metrics_unserved"),
            )
            return
        logger.info(
            "metrics are served on http://%s:%d/metrics",
            addr,
            self._server[0].server_port,
            extra=event("metrics_served"),
        )


class _Served:
    """The collector of a process: its own metrics, or in multiprocess mode those of its family."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry

    def collect(self) -> list[Any]:
        """Return the metrics; prometheus_client calls it."""
        path = os.environ.get(DIRECTORY)
        if path:
            from prometheus_client.multiprocess import MultiProcessCollector

            remove_dead_gauges(path)
            return list(MultiProcessCollector(None, path).collect())
        return list(self._registry.collect())

    def describe(self) -> list[Any]:
        """Return nothing, so that it is not collected when it is registered."""
        return []


def remove_dead_gauges(path: str) -> None:
    """Remove the live gauges of dead processes: those of the program, because we have none."""
    from prometheus_client.multiprocess import mark_process_dead

    files = glob.glob(os.path.join(glob.escape(path), "gauge_live*_*.db"))
    for pid in {found[1] for file in files if (found := re.search(r"_(\d+)\.db$", file))}:
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            mark_process_dead(int(pid), path)
        except OSError:
            continue  # the process lives, and is another user's


_installed: tuple[Metrics, tuple[Any, ...]] | None = None


def install(
    registry: Any = None,
    *,
    buckets: Mapping[str, Sequence[float]] | None = None,
    port: int | None = None,
    addr: str = "127.0.0.1",
) -> Metrics:
    """Count and measure locks in this process, and in processes forked from it.

    Call it where the app is made, before the worker forks. A second call with the same arguments
    changes nothing.

    Args:
        registry: A registry of prometheus_client; None for its default one.
        buckets: Other upper bounds, in seconds, for the histograms in `BUCKETS`.
        port: The port where a worker's main process answers over HTTP, once it is ready; 0 for any
            free port; None for no port, if the program serves the registry itself.
        addr: The address to listen on. Anybody who can reach it can read the metrics.

    Raises:
        ConfigurationError: prometheus_client is not installed, PROMETHEUS_MULTIPROC_DIR is not a
            directory, the buckets are not valid, or it was called with other arguments before.
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
