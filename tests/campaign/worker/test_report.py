"""Output of a run, and its exit code."""

from __future__ import annotations

from typing import Any

import pytest

from tests.campaign.worker import campaign
from tests.campaign.worker.chronicle import Fault
from tests.campaign.worker.oracle import Problem, Verdict
from tests.campaign.worker.report import Report


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, **more: Any) -> int:
    problems = more.pop("problems", [])
    faults = [Fault("node stop", 104.0, 106.0, nodes=(1,)), Fault("cut", 1.0, 2.0, "one")]
    report = Report(
        7, 60.0, Verdict(problems=problems), faults, {"node stop": 1, "cut": 1}, {}, 100.0, **more
    )
    monkeypatch.setattr(campaign, "campaign", lambda *_all, **_options: report)
    monkeypatch.setattr("sys.argv", ["campaign", "--seed", "7", *arguments])
    return campaign.main()


def test_report_of_a_violation_has_the_seed_and_the_faults_around_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = Problem("overlap within both validities", 105.0, "this AND that")
    assert run(monkeypatch, problems=[problem]) == 1
    text = capsys.readouterr().out
    assert "VIOLATION 5.000 s: overlap within both validities: this AND that" in text
    assert "4.000 .. 6.000  node stop" in text
    assert "cut one" not in text
    assert "1 VIOLATIONS with seed 7" in text


def test_report_fails_if_a_planted_bug_is_not_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--mutant", "leak") == 1
    assert "leak: NOT FOUND in 60 s" in capsys.readouterr().out
    other = Problem("untrue", 105.0, "not what this bug does")
    assert run(monkeypatch, "--mutant", "leak", problems=[other]) == 1
    found = Problem("not freed", 105.0, "this")
    assert run(monkeypatch, "--mutant", "leak", problems=[found], first=8.0) == 0
    assert "leak: FOUND after 8 s" in capsys.readouterr().out
