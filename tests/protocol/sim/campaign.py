"""Many worlds, on all cores: `python -m tests.protocol.sim.campaign --worlds 20000`.

    --seed S        where to begin; seeds follow each other
    --replay SEED   run one world, print all that happens, and if it fails its smallest form
    --mutant NAME   plant a bug: with --replay, or alone to see how soon it is found

Exit code 1 if an invariant failed, or a planted bug was not found.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.protocol.sim.mutants import MUTANTS, planted
from tests.protocol.sim.runner import Result, run, shrink
from tests.protocol.sim.swarm import CHANGED, LIMITS, SEVERAL, SHARED

CORPUS = Path(__file__).with_name("corpus.txt")
PATIENCE = 10_000
"""Seeds after which a planted bug counts as missed."""


@dataclass
class Tally:
    """Totals of some worlds."""

    worlds: int = 0
    operations: int = 0
    grants: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[int] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Add the result of a world."""
        self.worlds += 1
        self.operations += result.operations
        self.grants += result.grants
        self.seconds += result.seconds
        self.faults.update(fault.kind for fault in result.faults)
        if result.violation is not None:
            self.failed.append(result.seed)

    def __iadd__(self, other: Tally) -> Tally:
        self.worlds += other.worlds
        self.operations += other.operations
        self.grants += other.grants
        self.seconds += other.seconds
        self.faults.update(other.faults)
        self.failed += other.failed
        return self


def corpus() -> list[tuple[int, bool]]:
    """Return each seed that ever failed, and if it did so in a bare world."""
    lines = CORPUS.read_text().splitlines()
    found = [line.split() for line in lines if line and not line.startswith("#")]
    return [(int(words[0]), words[1] == "bare") for words in found]


def worlds(seeds: range) -> Tally:
    """Run the worlds of some seeds."""
    tally = Tally()
    for seed in seeds:
        tally.add(run(seed))
    return tally


def hunt(name: str, first: int | None = None) -> tuple[str, Result | None, int]:
    """Look for a planted bug; return the failure and the number of seeds it took."""
    mutant = MUTANTS[name]
    first = mutant.seed if first is None else first
    with planted(mutant):
        for seed in range(first, first + PATIENCE):
            result = run(seed, twist=mutant.twist, only=mutant.invariants)
            if result.violation is not None:
                return name, result, seed - first + 1
    return name, None, PATIENCE


def replay(seed: int, mutant: str | None) -> int:
    """Show one world."""
    planting = planted(MUTANTS[mutant]) if mutant else contextlib.nullcontext()
    twist, only = (MUTANTS[mutant].twist, MUTANTS[mutant].invariants) if mutant else (None, ())
    with planting:
        result = run(seed, trace=True, twist=twist, only=only)
        print(result)
        if result.violation is None:
            return 0
        smallest = shrink(result)
        print(
            f"\nshrunk from {len(result.faults)} faults to {len(smallest.faults)}; as small as it"
            f" gets:\n{smallest}"
        )
    return 1


def campaign(count: int, first: int) -> int:
    """Run worlds and hunt for all planted bugs."""
    size = 250
    # And a quarter of that each: claims of several keys or limits; both together; servers that are
    # swapped or change their roles; readers beside writers.
    spans = [(first, first + count)]
    kinds = (SHARED, CHANGED, LIMITS, SEVERAL, 0)
    spans += [(kind + first, kind + first + count // 4) for kind in kinds[:-1]]
    parts = [
        range(i, min(i + size, last)) for begin, last in spans for i in range(begin, last, size)
    ]
    total = Tally()
    began = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for tally in pool.imap_unordered(worlds, parts):
            total += tally
        took = time.perf_counter() - began
        print(
            f"{total.worlds} worlds from seed {first} on: {total.operations} node operations,"
            f" {total.grants} grants, {total.seconds:.0f} simulated seconds\n"
            f"in {took:.1f} s on {os.cpu_count()} cores:"
            f" {total.worlds / max(took, 1e-9):.0f} worlds/s,"
            f" {total.seconds / max(took, 1e-9):.0f} x real time"
        )
        print("faults: " + ", ".join(f"{n} {kind}" for kind, n in sorted(total.faults.items())))
        print(f"violations: {len(total.failed)}")
        print("planted bugs, from the first seed:")
        missed = 0
        firsts = [(n, next(kind for kind in kinds if m.seed >= kind)) for n, m in MUTANTS.items()]
        for name, result, seeds in pool.starmap(hunt, firsts, 1):
            if result is None:
                missed += 1
                print(f"  {name:28} NOT FOUND in {seeds} seeds")
            else:
                invariant = result.violation.invariant if result.violation else ""
                print(f"  {name:28} {invariant}, {seeds} seeds")
    for seed in sorted(total.failed)[:3]:
        print()
        print(shrink(run(seed)))
        print(f"replay with: python -m tests.protocol.sim.campaign --replay {seed}")
    return 1 if total.failed or missed else 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.protocol.sim.campaign", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--worlds", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=int)
    parser.add_argument("--mutant", choices=sorted(MUTANTS))
    given = parser.parse_args()
    if given.replay is not None:
        return replay(given.replay, given.mutant)
    if given.mutant:
        name, result, seeds = hunt(given.mutant, given.seed)
        print(f"{name}: {'not found' if result is None else result.violation} ({seeds} seeds)")
        return 0 if result else 1
    return campaign(given.worlds, given.seed)


if __name__ == "__main__":
    sys.exit(main())
