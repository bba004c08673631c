"""Producers, workers and beats under faults, judged by what was accepted and what has run.

`make faults-publish` is the same for longer, and with MUTANT=name it looks for one planted bug.
What is judged, and what is forgiven, is in `oracle.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.campaign.publishing.campaign import SHORT, campaign
from tests.campaign.publishing.mutants import MUTANTS
from tests.campaign.worker.broker import BROKERS
from tests.support import rabbitmq

pytestmark = [
    pytest.mark.worker,
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and PR_SET_PDEATHSIG"),
]


def test_every_accepted_call_runs_and_every_tick_is_sent_once(tmp_path: Path) -> None:
    report = campaign(tmp_path / "run", 8.0, seed=1, phases=SHORT)
    assert report.problems == [], str(report)
    # A campaign in which nothing is called proves nothing.
    calls = report.account.calls.values()
    assert len(report.account.runs) > 20, str(report)
    assert any(not call.given for call in calls), str(report)
    assert any(call.given and call.reserved is None for call in calls), str(report)
    assert len(report.faults) > 3, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("broker", BROKERS)
def test_every_accepted_call_runs_under_all_faults_for_a_while(tmp_path: Path, broker: str) -> None:
    if broker != "redis" and rabbitmq.missing():
        pytest.skip(rabbitmq.missing())
    report = campaign(tmp_path / "run", 60.0, seed=1, broker=broker)
    assert report.problems == [], str(report)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_oracle_of_the_publishing_campaign_finds_planted_bugs(tmp_path: Path, mutant: str) -> None:
    report = campaign(tmp_path / "run", 60.0, seed=1, mutant=mutant)
    assert MUTANTS[mutant].is_found(report.problems), str(report)
