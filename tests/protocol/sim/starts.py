"""Bodies that start by a rate, in the worlds of the simulator; and the count of their starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from celery_redlock.protocol import quorum
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.names import START_SUFFIX, slots
from celery_redlock.protocol.rate import Rate
from tests.protocol.sim.swarm import draw
from tests.protocol.sim.world import process as processes
from tests.protocol.sim.world.operation import Operation
from tests.protocol.sim.world.plan import Fault, without
from tests.protocol.sim.world.worker import Worker
from tests.protocol.sim.world.world import World

__all__ = ["crowded", "run"]

LATE = 0.9
"""Part of the slack, after the last look at the clock, within which a body may begin."""


class Starter(Worker):
    """Starts bodies, again and again. Mirrors `Acquisition` and `Start`."""

    rate: Rate
    starts: list[float]

    def _attempt(self, _argument: Any = None) -> None:
        process, knobs = self.process, self.process.world.knobs
        self._attempts += 1
        names = slots(f"r0{START_SUFFIX}", self.rate.starts)
        name = names[int(self._draw() * self.rate.starts)]
        self.claim = claim = Claim(
            name, self._owner.token(str(self._attempts)), self.rate.ttl, knobs.nodes
        )
        steps = quorum.start(claim, process.clock(), knobs.patience, self.rate)
        operation = Operation(process, steps, self._tried, self._interrupted, self._strike())
        operation.start()

    def _tried(self, _ballot: Any) -> None:
        claim, process = self.claim, self.process
        assert claim is not None
        if claim.granted_at is None:
            process.later(self._draw() * self.rate.window / 2, self._begin)
            return
        claim.ended = True
        delay = self._draw() * LATE * self.rate.slack / 2
        process.later(delay, self._start, process.clock() + delay)

    def _start(self, due: float) -> None:
        process = self.process
        # Paused between its last look and its first line: beyond any lease, as the docs say.
        if process.clock() <= due + 1e-9:
            self.starts.append(process.world.now)
        self._rest()


def run(seed: int, limit: int, instead: Sequence[Fault] | None = None) -> tuple[Rate, list[float]]:
    """Run a world of a seed that starts bodies; return its rate and its starts, in true time.

    With `instead`, these faults take the place of those of the seed.
    """
    knobs, faults = draw(seed)
    if instead is not None:
        knobs, faults = without(knobs, nodes=3, servers=(), node_rates=(), skews=()), [*instead]
    knobs = without(
        knobs, keys=1, limit=limit, several=1, nested=0.0, keeper=False, extension=False,
        fencing=False, rounds=8, tries=1, workers=max(2, knobs.workers),
    )  # fmt: skip
    # What the nodes are asked for is the world's ttl, by which its faults are measured.
    rate = Rate(limit, (knobs.ttl * 0.99 - 0.002) / 1.05, "")
    starts: list[float] = []
    with (
        mock.patch.object(processes, "Worker", Starter),
        mock.patch.object(Starter, "rate", rate, create=True),
        mock.patch.object(Starter, "starts", starts, create=True),
    ):
        world = World(seed, knobs, faults)
        for process in world.processes:  # what a start needs, it says itself
            process.guard.longest = process.guard.span = 0.0
        world.run(until=200 * knobs.ttl)
    return rate, sorted(starts)


def crowded(rate: Rate, starts: list[float]) -> Iterator[tuple[float, float]]:
    """Yield each window in which more bodies started than may."""
    for first, last in zip(starts, starts[rate.starts :], strict=False):
        if last - first < rate.window:
            yield first, last
