"""Three beats of each of three schedulers under faults: each tick once. See `make faults-beat`.

What is judged, and what is forgiven, is in `oracle.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from celery_redlock.server import LocalServer
from tests.campaign.beat.campaign import campaign
from tests.promises.beat.conftest import PASSWORD
from tests.support import stores
from tests.support.beats import KINDS


def test_each_tick_is_sent_once_under_every_fault(
    servers: list[LocalServer], server: LocalServer, tmp_path: Path
) -> None:
    report = campaign(servers, server, tmp_path, 8.0, seed=1)
    assert report.problems == [], str(report)
    # Fewer than are planned: on a busy machine beats take long to start, and are spared meanwhile.
    for kind, least in (("kill", 1), ("stop", 1)):
        assert report.faults.count(kind) >= least, str(report)
    assert PASSWORD not in report.log


@pytest.mark.parametrize("store", ["postgresql", pytest.param("etcd", marks=pytest.mark.slow)])
def test_each_tick_is_sent_once_over_one_authority(
    server: LocalServer, tmp_path: Path, store: str
) -> None:
    with stores.start(store) as nodes:
        report = campaign(nodes, server, tmp_path, 11.0, kinds=("persistent",))
    assert report.problems == [], str(report)
    assert report.faults.count("quorum") >= 1, str(report)


@pytest.mark.slow
def test_oracle_of_beats_finds_that_unguarded_beats_send_twice(
    servers: list[LocalServer], server: LocalServer, tmp_path: Path
) -> None:
    """The run with the guard off must fail, for each scheduler and each entry."""
    report = campaign(servers, server, tmp_path, 6.0, seed=None, redlock_beat=False)
    for kind in KINDS:
        for entry, words in (("tick", "sent twice"), ("interval", "two within")):
            found = report.verdicts[kind, entry].problems
            assert any(words in problem for problem in found), str(report)
