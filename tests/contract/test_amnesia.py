"""Nodes that come back empty while locks are held: seen without the guard, and closed by it."""

from __future__ import annotations

import pytest

from celery_redlock.server import LocalServer
from tests.contract.amnesia import Campaign, Hold, Outcome


def test_campaign_of_restarts_without_the_guard_finds_an_overlap(
    servers: list[LocalServer],
) -> None:
    """Proves that the next test could fail."""
    outcome = Campaign(servers, "off", seed=7).run(20, until_overlap=True)
    assert outcome.overlaps, str(outcome)


def test_campaign_of_restarts_with_the_guard_finds_no_overlap(servers: list[LocalServer]) -> None:
    outcome = Campaign(servers, "uptime", seed=7).run(6)
    assert outcome.overlaps == []
    assert len(outcome.holds) > 20, str(outcome)  # and there was something to overlap


@pytest.mark.slow
def test_two_hundred_restarts_with_the_guard_cause_no_overlap(servers: list[LocalServer]) -> None:
    outcome = Campaign(servers, "uptime", seed=8).run(200)
    assert outcome.overlaps == []


def test_judge_of_the_restart_campaign_sees_an_overlap_and_no_more() -> None:
    outcome = Outcome()
    outcome.holds += [Hold("a", 1.0, 2.0, "x"), Hold("a", 2.0, 3.0, "y"), Hold("b", 1.5, 9, "x")]
    assert outcome.overlaps == []
    late = Hold("a", 2.9, 3.5, "z")
    outcome.holds.append(late)
    assert outcome.overlaps == [(outcome.holds[1], late)]
