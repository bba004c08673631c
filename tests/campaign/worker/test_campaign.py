"""Real workers under faults of every kind, judged by the accounts of their bodies.

`make faults` is the same for longer, and `make faults MUTANT=...` looks for one planted bug.
What is judged, and what is a limit, is in `oracle.py` and in docs/bug-or-limit.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import celery
import pytest

from tests.campaign.worker.campaign import campaign
from tests.campaign.worker.mutants import MUTANTS
from tests.campaign.worker.nemesis import (
    PHASES,
    PHASES_OF_ETCD,
    PHASES_OF_POSTGRES,
    SHORT,
    SHORT_OF_POSTGRES,
)
from tests.campaign.worker.oracle import VERDICTS
from tests.campaign.worker.postgres_acts import LEFT_OUT
from tests.campaign.worker.stores import STORES
from tests.support import etcd, postgres

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.worker,
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and PR_SET_PDEATHSIG"),
    pytest.mark.skipif(
        tuple(celery.VERSION[:2]) < (5, 5),
        reason="Celery 5.4 loses late acknowledged tasks at a cold shutdown, also without locks",
    ),
]


def test_short_campaign_over_redis_finds_no_violation(tmp_path: Path) -> None:
    report = campaign(tmp_path / "run", 5.0, seed=1, phases=(SHORT,))
    assert report.problems == [], str(report)
    # A busy machine runs fewer; a campaign that runs nothing proves nothing.
    assert len(report.verdict.bodies) > 30, str(report)
    assert sum(report.counts.values()) > 3, str(report)
    assert report.waits.probes > 3, str(report)
    assert report.verdict.beside > 0, str(report)
    assert report.lost == 0


def test_short_campaign_over_one_authority_postgresql_finds_no_violation(tmp_path: Path) -> None:
    postgres.require()
    phases = (SHORT_OF_POSTGRES,)
    report = campaign(tmp_path / "run", 6.0, seed=1, phases=phases, store="postgresql")
    assert report.problems == [], str(report)
    assert len(report.verdict.bodies) > 30, str(report)
    assert sum(report.counts.values()) > 3, str(report)
    assert report.lost == 0
    assert LEFT_OUT in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_long_campaign_with_all_faults_finds_no_violation(tmp_path: Path, store: str) -> None:
    if store != "redis":
        (etcd if store == "etcd" else postgres).require()
    # Four seconds and more for each of the phases.
    report = campaign(tmp_path / "run", 40.0, seed=1, store=store)
    assert report.problems == [], str(report)


def test_short_campaign_over_one_authority_etcd_finds_no_violation(tmp_path: Path) -> None:
    etcd.require()
    phases = (SHORT_OF_POSTGRES,)
    report = campaign(tmp_path / "run", 6.0, seed=1, phases=phases, store="etcd")
    assert report.problems == [], str(report)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["blind-release", "not-undone", "swallow"])
def test_campaign_over_postgresql_finds_planted_bugs(tmp_path: Path, mutant: str) -> None:
    postgres.require()
    report = campaign(tmp_path / "run", 60.0, seed=1, mutant=mutant, store="postgresql")
    assert MUTANTS[mutant].is_found(report.problems), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_campaign_over_redis_finds_planted_bugs(tmp_path: Path, mutant: str) -> None:
    report = campaign(tmp_path / "run", 120.0, seed=1, mutant=mutant)
    assert MUTANTS[mutant].is_found(report.problems), str(report)


def test_phases_of_a_campaign_have_unique_names() -> None:
    for phases in (PHASES, PHASES_OF_POSTGRES, PHASES_OF_ETCD):
        assert len({phase.name for phase in phases}) == len(phases)


def test_verdicts_of_the_oracle_stand_in_the_docs_word_for_word() -> None:
    page = (ROOT / "docs" / "bug-or-limit.md").read_text(encoding="utf-8")
    for verdict in VERDICTS:
        assert f"| {verdict} |" in page
