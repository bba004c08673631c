"""Every ending that a worker does not survive, or needs settings of its own for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.monitor import Monitor
from tests.support.worker import often, pool
from tests.worker.ending import Ending, play
from tests.worker.scenarios import POOLS, played_on

pytestmark = pytest.mark.worker


EVERYWHERE = "`kill -9` of the main process"
"""The one ending that `make test` plays on other pools than prefork as well."""


def marks(name: str, ending: Ending) -> Any:
    """All on prefork, one on each kind of pool; the full matrix is seen by `make test-all`."""
    seen = name == "prefork" or ending.name == EVERYWHERE or "prefork" not in ending.pools
    return often(name).marks if seen else [*pool(name).marks, pytest.mark.slow]


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
