"""A prefork worker shows what its children count, those that have died as well."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from celery_redlock.server import start_servers
from tests.support.cluster import READY, Cluster
from tests.support.nodes import with_acl_user
from tests.support.wait import died, wait_until
from tests.support.worker import Worker

APP = "tests.promises.worker.metering"
MEET, SKIPS = f"{APP}.meet", f"{APP}.skips"
LONG = 30.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("multiproc")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with start_servers(4, config=with_acl_user()) as (*nodes, broker):
        cluster = Cluster(nodes, broker, tmp_path_factory.mktemp("worker"), tasks=APP)
        yield cluster
        cluster.close()


@pytest.fixture(scope="module")
def worker(cluster: Cluster, directory: Path) -> Iterator[Worker]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROMETHEUS_MULTIPROC_DIR", str(directory))
        with cluster.worker("-c", "2") as worker:
            yield worker


class Shown:
    """The metrics of the worker's main process."""

    def __init__(self, worker: Worker) -> None:
        worker.said("metrics are served on http://", READY)
        found = re.search(r"metrics are served on (http://127\.0\.0\.1:\d+/metrics)", worker.text)
        assert found, worker.text
        with urllib.request.urlopen(found[1], timeout=LONG) as answer:
            self.text = answer.read().decode()
        self.families = list(text_string_to_metric_families(self.text))

    def value(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples with these labels; None if there are none."""
        values = [
            sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return sum(values) if values else None


def acquired(worker: Worker) -> float:
    shown = Shown(worker)
    return shown.value("celery_redlock_acquire_total", task=MEET, outcome="acquired") or 0.0


def meet(cluster: Cluster, path: Path, count: int) -> set[int]:
    """Run so many tasks, each in a child of its own, and return their processes."""
    meeting = path / uuid.uuid4().hex
    meeting.mkdir()
    sent = [
        cluster.send("meet", f"{meeting.name}-{number}", str(meeting), count)
        for number in range(count)
    ]
    return {cluster.result(one, LONG) for one in sent}


def test_counters_add_up_over_children_and_outlive_them(
    cluster: Cluster, worker: Worker, directory: Path, tmp_path: Path
) -> None:
    before = acquired(worker)
    children = meet(cluster, tmp_path, 2)
    assert len(children) == 2
    # A lock is given back, and counted, after its task's result is stored.
    held = "celery_redlock_hold_seconds_count"
    wait_until(lambda: Shown(worker).value(held, task=MEET) == before + 2, LONG, "both are counted")
    assert acquired(worker) == before + 2
    for child in children:
        (mine,) = (
            sample.value
            for family in MultiProcessCollector.merge([str(directory / f"counter_{child}.db")])
            for sample in family.samples
            if sample.name == "celery_redlock_acquire_total"
            and sample.labels == {"task": MEET, "outcome": "acquired"}
        )
        assert mine >= 1
    assert Shown(worker).value("test_alive") == 2

    os.kill(min(children), signal.SIGKILL)
    died(min(children), LONG)
    assert acquired(worker) == before + 2
    # The dead child's live gauge goes when it is reaped.
    wait_until(lambda: Shown(worker).value("test_alive") == 1, LONG, "its live gauge is gone")

    assert len(meet(cluster, tmp_path, 2) - children) == 1
    wait_until(lambda: Shown(worker).value(held, task=MEET) == before + 4, LONG, "all are counted")
    assert acquired(worker) == before + 4


def test_metrics_of_children_include_the_nodes(
    cluster: Cluster, worker: Worker, tmp_path: Path
) -> None:
    meet(cluster, tmp_path, 1)
    shown = Shown(worker)
    nodes = [f"127.0.0.1:{node.port}" for node in cluster.nodes]
    rtt = "celery_redlock_node_rtt_seconds_count"
    assert sum(shown.value(rtt, node=node) or 0 for node in nodes) >= 2
    assert "SECRET" not in shown.text  # the nodes' password


def test_skipped_task_is_counted(cluster: Cluster, worker: Worker) -> None:
    with cluster.redlock.lock("k:skipped"):
        cluster.result(cluster.send("skips", "skipped"), LONG)
    shown = Shown(worker)
    assert shown.value("celery_redlock_deduplicated_total", task=SKIPS, where="run") == 1
    assert shown.value("celery_redlock_acquire_total", task=SKIPS, outcome="held") == 1
    assert "k:skipped" not in shown.text
