"""In any window, no more bodies start than their rate says, whatever goes wrong."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from celery_redlock.protocol import quorum
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.rate import Rate
from tests.protocol.sim.starts import crowded, run
from tests.protocol.sim.swarm import draw
from tests.protocol.sim.world.plan import Fault

SEEDS = range(200)


def broken(seed: int) -> list[tuple[float, float]]:
    """The windows of a world in which too many bodies start."""
    return [*crowded(*run(seed, 1 + seed % 3))]


def test_rate_holds_in_every_window_of_simulated_worlds() -> None:
    assert [(seed, found) for seed in SEEDS if (found := broken(seed))] == []


def stepped(seed: int, steps: int, part: float) -> list[tuple[float, float]]:
    """The same, where all nodes' clocks step ahead by a part of a ttl, and nothing else happens."""
    amount = part * draw(seed)[0].ttl
    faults = [Fault("jump", at / 4, nodes=(0, 1, 2), amount=amount) for at in range(steps)]
    return [*crowded(*run(seed, 1 + seed % 3, faults))]


def test_rate_survives_clock_steps_within_the_drift_and_no_larger() -> None:
    """Clocks behave as with any lease (docs/guarantees.md); a worker's wall clock has no effect."""
    assert not any(stepped(seed, 1, 0.009) for seed in range(60))
    assert any(stepped(seed, 100, 1.5) for seed in range(60))


def test_simulated_worlds_of_rates_start_bodies() -> None:
    started = [len(run(seed, 2)[1]) for seed in range(20)]
    assert sum(started) > 50


def _counted_from_the_answer(claim: Claim, now: float, patience: float, rate: Rate) -> Any:
    """Count a start for the window itself, from the moment the nodes receive it."""
    claim.ttl = rate.window
    return quorum.acquire(claim, now, patience)


def _given_back(claim: Claim, now: float, patience: float, rate: Rate) -> Any:
    """Release it like a lock, when the body has ended."""
    ballot = yield from quorum.acquire(claim, now, patience)
    if claim.granted_at is not None:
        yield from quorum.release(claim, now, 0.0)
    return ballot


def _never_late(claim: Claim, now: float, patience: float, rate: Rate) -> Any:
    """Start in spite of a pause on the way, in a slot that ends too soon."""
    ballot = yield from quorum.acquire(claim, now, patience)
    claim.deadline += rate.window
    return ballot


@pytest.mark.parametrize("bug", [_counted_from_the_answer, _given_back, _never_late])
def test_planted_bug_in_rates_is_found(bug: Any) -> None:
    with mock.patch.object(quorum, "start", bug):
        assert any(map(broken, SEEDS))
