"""A lock is held as long as its body runs, whatever that does; see holding.py."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from tests.promises.worker.holding import (
    PAUSED,
    PROCESS,
    SETUPS,
    SOFT,
    Held,
    Setup,
    Strain,
    bear,
    strained_by,
)
from tests.support.cluster import Cluster
from tests.support.monitor import Monitor
from tests.support.wait import wait_until
from tests.support.worker import pool as param

OFTEN = {"prefork": None, 'threads, `redlock_keeper="process"`': PAUSED}
"""In `make test`, all strains or these; the rest is seen by `make test-all` and `make endings`."""


def played() -> Iterator[Any]:
    for setup in SETUPS:
        every = strained_by()
        only = OFTEN.get(setup.name)
        if setup.name in OFTEN:
            strains = [one for one in every if only is None or one.name in only]
            yield pytest.param(setup, strains, id=str(setup))
        if only is not None or setup.name not in OFTEN:
            marks = [*param(setup.pool).marks, pytest.mark.slow]
            yield pytest.param(setup, every, marks=marks, id=f"{setup}, all")


@pytest.mark.parametrize(("setup", "strains"), [*played()])
def test_lock_is_held_as_long_as_its_body_under_every_strain(
    cluster: Cluster, monitor: Monitor, key: str, setup: Setup, strains: list[Strain]
) -> None:
    """Where no process is left to extend it, it is lost, and the holder notices.

    Bodies in processes of their own are strained side by side, except by strains that end the
    worker.
    """
    with cluster.worker("-P", setup.pool, "-c", "5", **SOFT, **setup.conf) as worker:
        if setup.conf == PROCESS:  # which takes a second to start, at the first lock
            cluster.result(cluster.send("work", f"{key}-first", queue=worker.queue), 20.0)
            main = psutil.Process(worker.process.pid)
            wait_until(
                lambda: any(one.net_connections("tcp") for one in main.children()),
                20.0,
                "its process is connected",
            )

        def borne(strain: Strain) -> Held:
            return bear(strain, cluster, monitor, worker, f"{key}-{strains.index(strain)}")

        last = [strain for strain in strains if strain.ends]
        others = [strain for strain in strains if not strain.ends]
        with ThreadPoolExecutor(len(others) if setup.pool == "prefork" else 1) as threads:
            seen = dict(zip(others, threads.map(borne, others), strict=True))
        seen |= {strain: borne(strain) for strain in last}
    for strain, one in seen.items():
        assert one.held == (strain.name not in setup.loses), (strain, one)
        assert bool(one.noticed_by) == (not one.held), (strain, one)
