"""Every ending that a worker does not survive, or needs settings of its own for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.promises.worker.ending import Ending, play
from tests.promises.worker.scenarios import POOLS, params
from tests.support.cluster import Cluster
from tests.support.monitor import Monitor
from tests.support.worker import often

ENDINGS = [
    pytest.param(name, *given.values, marks=[*often(name).marks, *given.marks])
    for name in POOLS
    for given in params(name, own=True)
]


@pytest.fixture(autouse=True)
def _nothing_left(cluster: Cluster) -> Iterator[None]:
    """Delete the messages that a failed test has left with the broker."""
    yield
    cluster.client.flushdb()


@pytest.mark.parametrize(("pool", "ending"), ENDINGS, ids=str)
def test_lock_is_free_after_each_ending_that_its_worker_does_not_survive(
    cluster: Cluster, monitor: Monitor, key: str, pool: str, ending: Ending
) -> None:
    play(ending, cluster, monitor, pool, None, key)
