"""Hundreds of worlds without a violation, and every planted bug found.

`make sim` runs a hundred thousand. A seed that fails is printed with its knobs, its faults and its
events, in the smallest form that still fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.protocol.sim.campaign import corpus, hunt
from tests.protocol.sim.mutants import MUTANTS, planted
from tests.protocol.sim.runner import Result, play, run, shrink
from tests.protocol.sim.swarm import CHANGED, LIMITS, SEVERAL, SHARED
from tests.protocol.sim.world.plan import Fault, Knobs

ROOT = Path(__file__).parents[3]


def passes(seed: int, *, bare: bool = False) -> Result:
    result = run(seed, bare=bare)
    if result.violation is not None:
        pytest.fail(
            f"{shrink(result)}\nreplay: python -m tests.protocol.sim.campaign --replay {seed}"
        )
    return result


@pytest.mark.parametrize("first", range(0, 500, 250))
def test_simulated_worlds_violate_no_invariant(first: int) -> None:
    results = [passes(seed) for seed in range(first, first + 250)]
    # Worlds in which nothing happens would prove nothing.
    assert sum(result.grants for result in results) > 500
    assert sum(result.operations for result in results) > 10_000
    assert {fault.kind for result in results for fault in result.faults} == {
        *("crash", "restart", "freeze", "pause", "death", "cut", "reset", "refuse"),
        *("full", "silence", "fork"),
    }


def test_simulated_worlds_with_several_keys_or_a_limit_violate_no_invariant() -> None:
    results = [passes(seed) for seed in range(SEVERAL, SEVERAL + 100)]
    several = [result for result in results if result.knobs.several > 1]
    limited = [result for result in results if result.knobs.limit > 1]
    assert len(several) + len(limited) == len(results)
    for kind in (several, limited):
        assert sum(result.grants for result in kind) > 80


def test_simulated_worlds_with_several_keys_and_limits_violate_no_invariant() -> None:
    results = [passes(seed) for seed in range(LIMITS, LIMITS + 40)]
    several = [result for result in results if result.knobs.several > 1]
    varying = [result for result in results if result.knobs.varies]
    for kind in (several, varying):
        assert sum(result.grants for result in kind) > 80


def test_simulated_worlds_never_mix_readers_and_a_writer() -> None:
    results = [passes(seed) for seed in range(SHARED, SHARED + 60)]
    assert sum(result.grants for result in results) > 400


def test_simulated_worlds_with_swapped_servers_violate_no_invariant() -> None:
    results = [passes(seed) for seed in range(CHANGED, CHANGED + 20)]
    kinds = {fault.kind for result in results for fault in result.faults}
    assert {"swap", "role"} <= kinds
    assert sum(result.grants for result in results) > 250


@pytest.mark.parametrize(("seed", "bare"), corpus())
def test_seed_that_failed_once_passes(seed: int, bare: bool) -> None:
    passes(seed, bare=bare)


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_in_the_algorithm_is_found(name: str) -> None:
    _name, result, seeds = hunt(name)
    assert result is not None, f"{MUTANTS[name].what}: not found in {seeds} seeds"
    passes(result.seed)  # it is the bug that was found, not the world


@pytest.mark.parametrize("name", [n for n, m in MUTANTS.items() if m.overlap is not None])
def test_planted_bug_makes_two_hold_one_lock(name: str) -> None:
    mutant = MUTANTS[name]
    assert mutant.overlap is not None
    with planted(mutant):
        result = run(mutant.overlap, twist=mutant.twist, only=("I1",))
    assert result.violation is not None
    assert "hold" in str(result.violation)


def test_server_listed_twice_takes_a_quorum_with_it() -> None:
    # Weighted votes still exclude; but the loss of one server of four is the loss of two votes.
    knobs = Knobs(nodes=3, processes=1, rounds=2, hold=0.1)
    dead = [Fault("restart", 0.0, 500.0, nodes=(1,))]
    twice = Knobs(nodes=3, servers=(0, 1, 1), processes=1, rounds=2, hold=0.1)
    assert play(1, knobs, dead).grants > play(1, twice, dead).grants == 1  # once it is back


def test_seed_gives_the_same_run_in_every_process() -> None:
    code = (
        "from tests.protocol.sim.runner import run; "
        "print([run(s, trace=True).digest for s in range(20)])"
    )
    salt = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # another than ours
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": salt},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    digests = [run(seed, trace=True).digest for seed in range(20)]
    assert other.stdout == f"{digests}\n"
    assert len(set(digests)) == 20


def test_failure_is_shrunk_and_shows_its_events() -> None:
    mutant = MUTANTS["immediate-restart"]
    failure = run(mutant.seed, twist=mutant.twist)
    small = shrink(failure)
    assert small.violation is not None and failure.violation is not None
    assert small.violation.invariant == failure.violation.invariant == "I1"
    assert len(small.faults) <= len(failure.faults)
    assert any(fault.kind == "crash" for fault in small.faults)
    shown = str(small)
    assert f"seed {mutant.seed}: I1" in shown
    assert "Knobs(" in shown and "Fault(kind='crash'" in shown and "granted" in shown
