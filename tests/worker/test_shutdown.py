"""Every ending that a worker does not survive, or needs settings of its own for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.worker.harness import OFTEN, Cluster, often, pool
from tests.worker.scenarios import POOLS, played_on
from tests.worker.stage import Ending, Monitor, play

pytestmark = pytest.mark.worker


def marks(name: str, ending: Ending) -> Any:
    """What is the same on a pool that `make test` has is seen by `make test-all`."""
    return (often if set(OFTEN) & set(ending.pools) else pool)(name).marks


ENDINGS = [
    pytest.param(name, ending, marks=marks(name, ending))
    for name in POOLS
    for ending in played_on(name, own=True)
]


@pytest.fixture(autouse=True)
def _nothing_left(cluster: Cluster) -> Iterator[None]:
    """What one that fails has left with the broker must not disturb the others."""
    yield
    cluster.client.flushdb()


@pytest.mark.parametrize(("pool", "ending"), ENDINGS, ids=str)
def test_ending(cluster: Cluster, monitor: Monitor, key: str, pool: str, ending: Ending) -> None:
    play(ending, cluster, monitor, pool, None, key)
