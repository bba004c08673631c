"""The workers of this directory are pytest-celery's nodes, over processes of this machine."""

from __future__ import annotations

import pytest
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


@pytest.mark.slow
def test_worker_of_the_tests_is_restarted_and_killed_as_a_container(cluster: Cluster) -> None:
    with cluster.worker("-c", "1") as worker:
        before = worker.process.pid
        worker.restart()
        assert worker.process.pid != before and worker.ready()
        code, output = worker.container.exec_run("cat /proc/self/cmdline")
        assert code == 0 and b"cat" in output
        worker.kill("SIGTERM")
        assert worker.ended() == 0
        assert worker.container.status == "exited"
        worker.kill()
