"""Pools with one process: Python survives nearly every ending, and the same handlers release.

What only greenlets do is in `test_green.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.promises.worker.ending import Ending, play
from tests.promises.worker.scenarios import POOLS, params
from tests.support.cluster import Cluster
from tests.support.monitor import Monitor
from tests.support.worker import Worker, often


@pytest.fixture(scope="module", params=[often(name) for name in POOLS[1:]])
def pool(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def worker(cluster: Cluster, pool: str) -> Iterator[Worker]:
    with cluster.worker("-c", "3", "-P", pool) as worker:
        yield worker
        cluster.settled()  # or the next worker would wait for what this one did not acknowledge


@pytest.mark.parametrize("ending", params("threads", own=False), ids=str)
def test_lock_is_free_after_each_ending_in_a_pool_of_one_process(
    cluster: Cluster, worker: Worker, monitor: Monitor, pool: str, key: str, ending: Ending
) -> None:
    play(ending, cluster, monitor, pool, worker, key)


def test_nested_calls_share_their_lock_in_a_pool_of_one_process(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    assert cluster.result(cluster.send("factorial", key, 5)) == 120
    cluster.free(key)  # results are stored before locks are freed
