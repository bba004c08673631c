"""A lock is held as long as its body runs, whatever that does; see holding.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster
from tests.support.monitor import Monitor
from tests.support.worker import Worker
from tests.support.worker import pool as param
from tests.worker.holding import SETUPS, SOFT, Setup, Strain, bear, strained_by

pytestmark = pytest.mark.worker

OFTEN = ("prefork", 'threads, `redlock_keeper="process"`')
"""In `make test`; the others are seen by `make test-all`, and `make endings` plays them as well."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            setup,
            marks=[*param(setup.pool).marks, *([] if setup.name in OFTEN else [pytest.mark.slow])],
            id=str(setup),
        )
        for setup in SETUPS
    ],
)
def setup(request: pytest.FixtureRequest) -> Setup:
    setup: Setup = request.param
    return setup


@pytest.fixture(scope="module")
def worker(cluster: Cluster, setup: Setup) -> Iterator[Worker]:
    with cluster.worker("-P", setup.pool, "-c", "2", **SOFT, **setup.conf) as worker:
        yield worker


@pytest.mark.parametrize("strain", strained_by(), ids=str)
def test_it_is_held(
    cluster: Cluster, monitor: Monitor, worker: Worker, key: str, setup: Setup, strain: Strain
) -> None:
    """Or lost, where nobody is left to extend it; and then the holder notices."""
    seen = bear(strain, cluster, monitor, worker, key)
    assert seen.held == (strain.name not in setup.loses), seen
    assert bool(seen.noticed_by) == (not seen.held), seen
