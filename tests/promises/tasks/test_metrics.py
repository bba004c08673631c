"""Metrics: how they are installed, what they are named, what a fork does to them."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from prometheus_client import CollectorRegistry, generate_latest

from celery_redlock import ConfigurationError, SingletonTask, metrics
from celery_redlock.measures import no_fork
from celery_redlock.messages import signals
from celery_redlock.metrics import BUCKETS, install
from celery_redlock.protocol.lease import Lease
from celery_redlock.protocol.values import Owner


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    registry = CollectorRegistry()
    yield registry
    if metrics._installed is not None:
        metrics._installed[0].close()


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(f"celery_redlock_{name}", labels) or 0.0


def lease(task: str = "") -> Lease:
    token = Owner("host", 7, "id", task=task).token("0" * 32, 1.0)
    return Lease("secret-key", token, 30.0, 30.0, lambda: 0.0)


def nothing() -> None:
    pass


def test_second_install_of_metrics_is_a_no_op_or_an_error(registry: CollectorRegistry) -> None:
    assert install(registry) is install(registry)
    signals.task_skipped.send(sender=None, where="run")
    assert value(registry, "deduplicated_total", task="", where="run") == 1
    with pytest.raises(ConfigurationError, match="other arguments"):
        install(registry, port=9468)


def test_closed_metrics_count_no_more(registry: CollectorRegistry) -> None:
    install(registry).close()
    signals.task_skipped.send(sender=None, where="run")
    assert generate_latest(registry) == b""
    install(registry)  # and there is room for another


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"buckets": {"wait": (1.0,)}},
            "no histogram 'wait'; there are acquire_duration, hold, node_rtt",
        ),
        ({"buckets": {"hold": (2.0, 1.0)}}, r"buckets\['hold'\] must be rising"),
        ({"buckets": {"hold": ()}}, r"buckets\['hold'\] must be rising"),
        ({"buckets": {"hold": ("1",)}}, r"buckets\['hold'\] must be rising"),
        ({"port": 70000}, "port must be a number from 0 to 65535"),
        ({"port": "9468"}, "port must be a number from 0 to 65535"),
    ],
)
def test_invalid_buckets_or_port_of_metrics_are_refused(
    given: Any, says: str, registry: CollectorRegistry
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        install(registry, **given)
    assert generate_latest(registry) == b""


def test_missing_directory_of_multiprocess_metrics_is_refused(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="PROMETHEUS_MULTIPROC_DIR must name a directory"):
        install(registry)


def test_metrics_without_prometheus_client_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigurationError, match=r"celery-redlock\[prometheus\]"):
        install()


def test_metrics_may_have_other_buckets(registry: CollectorRegistry) -> None:
    install(registry, buckets={"hold": (1, 7)})
    signals.lock_released.send(sender=None, lease=lease(), held=True, held_for=5.0)
    assert value(registry, "hold_seconds_bucket", task="", le="7.0") == 1
    assert value(registry, "hold_seconds_bucket", task="", le="1.0") == 0
    signals.lock_acquired.send(sender=None, lease=lease(), waited=0.004)
    assert (
        value(
            registry,
            "acquire_duration_seconds_bucket",
            task="",
            le=str(BUCKETS["acquire_duration"][2]),
        )
        == 1
    )


def test_labels_of_metrics_are_task_names_and_never_keys_or_ids(
    registry: CollectorRegistry,
) -> None:
    install(registry)
    task = Celery(set_as_current=False).task(name="shop.charge", shared=False)(nothing)
    for signal_, more in (
        (signals.lock_acquired, {"lease": lease(), "waited": 0.1, "attempts": 1}),
        (signals.lock_contended, {"holder": None, "waited": 0.1}),
        (signals.lock_unavailable, {"votes": (), "waited": 0.1}),
        (signals.lock_extended, {"lease": lease()}),
        (signals.lock_released, {"lease": lease(), "held": True, "held_for": 2.0}),
        (signals.task_skipped, {"task_id": "id-1", "holder": None, "where": "publish"}),
    ):
        signal_.send(sender=task, resource="secret-key", **more)
    text = generate_latest(registry).decode()
    assert set(re.findall(r'task="([^"]*)"', text)) == {"shop.charge"}
    assert "secret-key" not in text and "id-1" not in text and "0" * 32 not in text
    assert value(registry, "deduplicated_total", task="shop.charge", where="publish") == 1
    assert value(registry, "acquire_total", task="shop.charge", outcome="unavailable") == 1


def test_beat_metrics_name_a_task_that_the_beat_does_not_know(registry: CollectorRegistry) -> None:
    install(registry)
    entry = types.SimpleNamespace(task="shop.nightly")
    signals.beat_deduplicated.send(sender=None, resource="t", entry=entry, tick="t", where="beat")
    assert value(registry, "deduplicated_total", task="shop.nightly", where="beat") == 1


def test_worker_metrics_begin_at_zero_for_each_locked_task(registry: CollectorRegistry) -> None:
    app = Celery("x", set_as_current=False, broker="memory://")
    app.task(base=SingletonTask, name="x.locked", shared=False)(nothing)
    app.task(name="x.free", shared=False)(nothing)
    install(registry).begin(types.SimpleNamespace(app=app), None, "")
    lost = {"task": "x.locked", "reason": "expired"}
    assert registry.get_sample_value("celery_redlock_lost_total", lost) == 0.0
    assert "x.free" not in generate_latest(registry).decode()


def _fork_and_wait(child: Callable[[], object]) -> None:
    """Fork, and check that the child ends.

    It might wait for a lock that none of its threads has.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        pid = os.fork()
    if not pid:
        signal.alarm(20)
        child()
        os._exit(0)
    _pid, status = os.waitpid(pid, 0)
    assert os.WIFEXITED(status), "the child waits forever"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_fork_never_splits_an_observation_of_metrics(registry: CollectorRegistry) -> None:
    made, inside = install(registry), threading.Event()
    counted = made._child(made._counters["deduplicated"], "", "run")

    def observe() -> None:
        with no_fork(), counted._value._lock:
            inside.set()
            threading.Event().wait(0.3)  # a fork that does not wait for us comes within it

    def child() -> None:
        made._count("deduplicated", "", "run")
        other = threading.Thread(target=made._count, args=("deduplicated", "", "run"))
        other.start()
        other.join()

    thread = threading.Thread(target=observe)
    thread.start()
    inside.wait()
    _fork_and_wait(child)
    thread.join()


class _Slow:
    """A collector of the program's, which asks a broker, say."""

    def __init__(self) -> None:
        self.asked, self.answered = threading.Event(), threading.Event()

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> list[Any]:
        self.asked.set()
        self.answered.wait(60)
        return []


def test_metrics_of_a_lock_do_not_wait_for_a_slow_collector(registry: CollectorRegistry) -> None:
    made, slow = install(registry), _Slow()
    registry.register(slow)
    scrape = threading.Thread(target=metrics._Served(registry).collect)
    scrape.start()
    extending = threading.Thread(target=made._count, args=("extend", "shop", "extended"))
    try:
        assert slow.asked.wait(30)
        extending.start()
        extending.join(30)
        assert not extending.is_alive(), "who extends leases waits for a collector"
    finally:
        slow.answered.set()
        scrape.join()
        extending.join()
    assert value(registry, "extend_total", task="shop", outcome="extended") == 1


def test_only_live_gauges_of_dead_processes_are_removed(tmp_path: Path) -> None:
    dead = os.fork()
    if not dead:
        os._exit(0)
    os.waitpid(dead, 0)
    names = [
        *(f"gauge_livesum_{dead}.db", f"counter_{dead}.db", f"histogram_{dead}.db"),
        *(f"gauge_livesum_{os.getpid()}.db", f"gauge_max_{dead}.db", "gauge_livesum_1.db"),
    ]
    for name in names:
        (tmp_path / name).touch()
    metrics.remove_dead_gauges(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == set(names[1:])
