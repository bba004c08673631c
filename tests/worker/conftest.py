"""One cluster and, where a module's tests do not kill it, one worker per module."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from celery_redlock.server import start_servers
from tests.worker.harness import Cluster, Worker


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with start_servers(6) as (*nodes, broker):
        cluster = Cluster(nodes, broker, tmp_path_factory.mktemp("worker"))
        yield cluster
        cluster.close()


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Iterator[Worker]:
    """A prefork worker with three children."""
    with cluster.worker("-c", "3") as worker:
        yield worker


@pytest.fixture(autouse=True)
def _no_overlap(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test that has a worker: the oracle."""
    used = "cluster" in request.fixturenames
    cluster: Cluster | None = request.getfixturevalue("cluster") if used else None
    begin = time.monotonic()
    yield
    if cluster is not None:
        cluster.check(since=begin)


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A key of this test's own."""
    name: str = request.node.name
    return "".join(letter if letter.isalnum() else "-" for letter in name)
