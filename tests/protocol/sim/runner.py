"""Runs one world from a seed, and makes a failing one small."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tests.protocol.sim.audit import Auditor, Violation, conclude
from tests.protocol.sim.swarm import draw, plain
from tests.protocol.sim.world.plan import Fault, Knobs
from tests.protocol.sim.world.world import World

LONGEST = 600.0
"""Virtual seconds after which a world that goes on is stuck."""

Twist = Callable[[Knobs, list[Fault]], tuple[Knobs, list[Fault]]]


@dataclass
class Result:
    """Result of a world."""

    seed: int
    knobs: Knobs
    faults: Sequence[Fault]
    violation: Violation | None = None
    operations: int = 0
    grants: int = 0
    seconds: float = 0.0
    trace: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """A hash of everything that happened; needs the trace."""
        return hashlib.blake2b("\n".join(self.trace).encode(), digest_size=16).hexdigest()

    def __str__(self) -> str:
        faults = "\n".join(f"  {fault}" for fault in self.faults) or "  none"
        head = f"seed {self.seed}: {self.violation or 'nothing wrong'}\n{self.knobs}\nfaults:\n"
        trace = "\ntrace:\n" + "\n".join(self.trace) if self.trace else ""
        return head + faults + trace


def run(
    seed: int,
    *,
    trace: bool = False,
    twist: Twist | None = None,
    only: Sequence[str] = (),
    bare: bool = False,
) -> Result:
    """Run the world of a seed.

    Args:
        seed: Names it.
        trace: Keep the events.
        twist: Changes what the seed has drawn, for planted faults.
        only: The invariants to look at; all if empty.
        bare: Without what `swarm.furnish` adds.
    """
    knobs, faults = (plain if bare else draw)(seed)
    if twist is not None:
        knobs, faults = twist(knobs, faults)
    return play(seed, knobs, faults, trace=trace, only=only)


def play(
    seed: int,
    knobs: Knobs,
    faults: Sequence[Fault],
    *,
    trace: bool = False,
    only: Sequence[str] = (),
) -> Result:
    """Run a world with these very knobs and faults."""
    auditor = Auditor(only)
    world = World(seed, knobs, faults, auditor, trace)
    auditor.start(world)
    result = Result(seed, knobs, faults)
    try:
        world.run(LONGEST)
        # Late messages have arrived, leases without extender have expired (clocks may be slow).
        world.now = max(world.now, world.healed) + 7 * knobs.node_timeout + 1.1 * knobs.ttl
        conclude(world)
    except Violation as violation:
        result.violation = violation
    result.operations, result.grants, result.seconds = world.operations, world.grants, world.now
    result.trace = world.trace or []
    return result


def shrink(failure: Result) -> Result:
    """The smallest world found in which the same invariant fails: faults, clients, rounds."""
    assert failure.violation is not None
    invariant = failure.violation.invariant
    best = failure

    def fails(knobs: Knobs, faults: Sequence[Fault]) -> bool:
        nonlocal best
        result = play(failure.seed, knobs, faults)
        if result.violation is None or result.violation.invariant != invariant:
            return False
        best = result
        return True

    ddmin(list(failure.faults), lambda faults: fails(best.knobs, faults))
    for name, least in (("processes", 1), ("workers", 1), ("rounds", 1), ("tries", 1)):
        while getattr(best.knobs, name) > least:
            smaller = replace(best.knobs, **{name: getattr(best.knobs, name) - 1})
            if not fails(smaller, best.faults):
                break
    for name in ("tail", "interrupts"):
        if getattr(best.knobs, name):
            fails(replace(best.knobs, **{name: 0.0}), best.faults)
    return play(best.seed, best.knobs, best.faults, trace=True)


def ddmin(faults: list[Fault], fails: Callable[[list[Fault]], bool]) -> list[Fault]:
    """Delta debugging: leave out ever smaller parts as long as it still fails (Zeller, 2002)."""
    if faults and fails([]):
        return []
    parts = 2
    while len(faults) >= 2:
        size = max(1, len(faults) // parts)
        for start in range(0, len(faults), size):
            fewer = faults[:start] + faults[start + size :]
            if fails(fewer):
                faults, parts = fewer, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(faults), 2 * parts)
    return faults
