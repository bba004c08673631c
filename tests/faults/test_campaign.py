"""Real workers under faults of every kind, judged by what their bodies wrote.

`make faults` is the same for longer, and `make faults MUTANT=...` looks for one planted bug.
What is judged, and what is a limit, is in `oracle.py` and in docs/bug-or-limit.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import celery
import pytest

from tests.faults.campaign import campaign
from tests.faults.nemesis import PHASES, SHORT
from tests.faults.oracle import VERDICTS

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.worker,
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and PR_SET_PDEATHSIG"),
    pytest.mark.skipif(
        tuple(celery.VERSION[:2]) < (5, 5),
        reason="Celery 5.4 loses late acknowledged tasks at a cold shutdown, also without locks",
    ),
]


def test_no_two_bodies_overlap_and_nothing_stays_locked_is_stuck_or_is_lost(tmp_path: Path) -> None:
    report = campaign(tmp_path / "run", 5.0, seed=1, phases=(SHORT,))
    assert report.problems == [], str(report)
    # A busy machine runs fewer; a campaign that runs nothing proves nothing.
    assert len(report.verdict.bodies) > 30, str(report)
    assert sum(report.counts.values()) > 3, str(report)
    assert report.waits.probes > 3, str(report)
    assert report.lost == 0


@pytest.mark.slow
def test_all_faults_for_a_while(tmp_path: Path) -> None:
    report = campaign(tmp_path / "run", 40.0, seed=1)  # four and more for each of the phases
    assert report.problems == [], str(report)


@pytest.mark.slow
def test_the_oracle_sees_what_a_minority_quorum_does(tmp_path: Path) -> None:
    report = campaign(tmp_path / "run", 60.0, seed=1, mutant="minority-quorum")
    assert report.first is not None, str(report)


def test_all_phases_have_a_name_of_their_own() -> None:
    assert len({phase.name for phase in PHASES}) == len(PHASES)


def test_the_verdicts_stand_in_the_docs_word_for_word() -> None:
    page = (ROOT / "docs" / "bug-or-limit.md").read_text(encoding="utf-8")
    for verdict in VERDICTS:
        assert f"| {verdict} |" in page
