"""In any window, no more bodies start than their rate says, whatever goes wrong."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from celery_redlock.protocol import quorum
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.rate import Rate
from tests.sim.starts import crowded, run

SEEDS = range(300)


def broken(seed: int) -> list[tuple[float, float]]:
    """The windows of a world in which too many bodies start."""
    return [*crowded(*run(seed, 1 + seed % 3))]


def test_no_window_has_more_starts_than_the_rate_says() -> None:
    assert [(seed, found) for seed in SEEDS if (found := broken(seed))] == []


def test_the_worlds_start_bodies_at_all() -> None:
    started = [len(run(seed, 2)[1]) for seed in range(20)]
    assert sum(started) > 50


def _counted_from_the_answer(claim: Claim, now: float, patience: float, rate: Rate) -> Any:
    """Whose start counts for the window itself, from whenever the nodes heard of it."""
    claim.ttl = rate.window
    return quorum.acquire(claim, now, patience)


def _given_back(claim: Claim, now: float, patience: float, rate: Rate) -> Any:
    """As a lock: free when its body has ended."""
    ballot = yield from quorum.acquire(claim, now, patience)
    if claim.granted_at is not None:
        yield from quorum.release(claim, now, 0.0)
    return ballot


def _never_late(claim: Claim, now: float, patience: float, rate: Rate) -> Any:
    """Whoever was paused on the way starts all the same, in a slot that ends too soon."""
    ballot = yield from quorum.acquire(claim, now, patience)
    claim.deadline += rate.window
    return ballot


@pytest.mark.parametrize("bug", [_counted_from_the_answer, _given_back, _never_late])
def test_a_planted_bug_is_found(bug: Any) -> None:
    with mock.patch.object(quorum, "start", bug):
        assert any(map(broken, SEEDS))
