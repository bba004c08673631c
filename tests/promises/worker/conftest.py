"""One cluster and, where a module's tests do not kill it, one worker per module."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from celery_redlock.server import start_servers
from tests.promises.worker.reserving import Reservations
from tests.support.cluster import Cluster
from tests.support.monitor import Monitor
from tests.support.nodes import refused_by, with_acl_user
from tests.support.worker import Worker, handlers_raised_nothing


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """All that has to do with locks runs under the ACL rule of the docs."""
    with start_servers(6, config=with_acl_user()) as (*nodes, broker):
        cluster = Cluster(nodes, broker, tmp_path_factory.mktemp("worker"))
        yield cluster
        cluster.close()
        for node in nodes:
            assert refused_by(node) == set(), "the ACL rule in docs/acl.md is not enough"


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Iterator[Worker]:
    """A prefork worker with three children."""
    with cluster.worker("-c", "3") as worker:
        yield worker
        handlers_raised_nothing(worker)


@pytest.fixture(scope="module")
def reservations(cluster: Cluster) -> Iterator[Reservations]:
    reservations = Reservations(cluster)
    yield reservations
    reservations.close()


@pytest.fixture(scope="module")
def monitor(cluster: Cluster) -> Iterator[Monitor]:
    """Record the requests about locks that a node receives."""
    with Monitor(cluster) as monitor:
        yield monitor


@pytest.fixture(autouse=True)
def _no_overlap(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check after each test with a worker that no bodies overlapped."""
    used = "cluster" in request.fixturenames
    cluster: Cluster | None = request.getfixturevalue("cluster") if used else None
    begin = time.monotonic()
    yield
    if cluster is not None:
        cluster.check(since=begin)
