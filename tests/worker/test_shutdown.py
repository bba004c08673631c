"""Every ending that a worker does not survive, or needs settings of its own for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.harness import Cluster
from tests.worker.harness import pool as param
from tests.worker.scenarios import POOLS, played_on
from tests.worker.stage import Ending, Monitor, play

pytestmark = pytest.mark.worker

ENDINGS = [
    pytest.param(pool, ending, marks=param(pool).marks)
    for pool in POOLS
    for ending in played_on(pool, own=True)
]


@pytest.fixture(autouse=True)
def _nothing_left(cluster: Cluster) -> Iterator[None]:
    """What one that fails has left with the broker must not disturb the others."""
    yield
    cluster.client.flushdb()


@pytest.mark.parametrize(("pool", "ending"), ENDINGS, ids=str)
def test_ending(cluster: Cluster, monitor: Monitor, key: str, pool: str, ending: Ending) -> None:
    play(ending, cluster, monitor, pool, None, key)
