"""The workers of this directory are pytest-celery's nodes, over processes of this machine."""

from __future__ import annotations

from pytest_celery import CeleryTestSetup, CeleryTestWorker

from tests.support.cluster import Cluster
from tests.support.worker import Worker


def test_cluster_of_the_tests_is_a_setup_of_pytest_celery(cluster: Cluster, worker: Worker) -> None:
    setup = cluster.setup(worker)
    assert isinstance(setup, CeleryTestSetup) and isinstance(setup.worker, CeleryTestWorker)
    assert setup.ready(control=True)
    assert setup.worker.container.status == "running"
    assert "tasks are locked on 5 nodes" in setup.worker.logs()
    assert setup.broker.config()["host_url"] == cluster.broker.url
    assert setup.broker.container.client.ping()
    assert setup.backend.container.client.ping()
