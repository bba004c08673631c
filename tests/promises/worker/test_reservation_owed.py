"""Reservations freed while nodes are away are freed on their return, though the process ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from celery_redlock.server import LocalServer
from tests.promises.worker.reserving import Reservations
from tests.support.cluster import Cluster
from tests.support.wait import wait_until
from tests.support.worker import Worker

KEEPS = ["--appendonly", "yes", "--appendfsync", "always"]
"""A node that comes back with what it had."""
DELAY = 2.0
"""Seconds until a body begins: its node is killed meanwhile."""


@pytest.fixture
def node() -> Iterator[LocalServer]:
    with LocalServer(config=KEEPS) as one:
        yield one


@pytest.fixture
def cluster(node: LocalServer, server: LocalServer, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster([node], server, tmp_path, task_ignore_result=True)
    yield made
    made.close()


@pytest.fixture
def reservations(cluster: Cluster) -> Iterator[Reservations]:
    made = Reservations(cluster)
    yield made
    made.close()


def begun_without_node(
    cluster: Cluster, reservations: Reservations, node: LocalServer, worker: Worker, key: str
) -> None:
    """A body that is to free its reservation as it begins finds no node."""
    reservations.until_executing.apply_async((key,), countdown=DELAY)
    assert reservations.tokens(key)
    worker.said("received")
    node.kill()
    cluster.entered(key)
    wait_until(lambda: cluster.runs(key)[0].end, 10.0, "the body is over")


@pytest.mark.parametrize("limit", [("--max-tasks-per-child", "1"), ()], ids=["recycled", "lives"])
def test_reservation_of_a_child_is_freed_by_its_parent_when_the_node_is_back(
    cluster: Cluster,
    reservations: Reservations,
    node: LocalServer,
    key: str,
    limit: tuple[str, ...],
) -> None:
    with cluster.worker("-c", "1", *limit) as worker:
        (child,) = psutil.Process(worker.process.pid).children()
        begun_without_node(cluster, reservations, node, worker, key)
        if limit:
            wait_until(lambda: not child.is_running(), 10.0, "the child has ended")
            worker.said(f"k:{key}#reserved cannot be freed yet")
        node.start()
        reservations.freed(key, 10.0)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_ending_worker_logs_the_reservations_it_could_not_free(
    cluster: Cluster, reservations: Reservations, node: LocalServer, key: str, pool: str
) -> None:
    with cluster.worker("-P", pool, "-c", "1") as worker:
        begun_without_node(cluster, reservations, node, worker, key)
        worker.terminate()
        worker.ended()
        said = {"prefork": "cannot be freed", "threads": "`celery -A APP redlock release KEY`"}
        assert f"k:{key}#reserved" in worker.text
        assert said[pool] in worker.text
        node.start()
        assert reservations.tokens(key), "it is as it says"
