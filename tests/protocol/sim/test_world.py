"""The simulator keeps order and the premises, and its auditor is not asleep."""

from __future__ import annotations

from typing import Any

import pytest

from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.round import Round
from tests.protocol.sim.audit import Auditor, Violation, conclude
from tests.protocol.sim.swarm import RATE, RESTART, draw
from tests.protocol.sim.world.nodes import Link
from tests.protocol.sim.world.plan import Audit, Fault, Knobs
from tests.protocol.sim.world.world import World


class Journal(Audit):
    """Requests that were sent over each connection, and their answers."""

    def __init__(self) -> None:
        self.written: list[tuple[int, int, Round]] = []
        self.read: list[tuple[int, int, Round]] = []

    def sent(self, link: Link, round_: Round, now: float) -> None:
        self.written.append((link.process.index, link.index, round_))

    def answered(self, link: Link, round_: Round, reply: Any, now: float) -> None:
        self.read.append((link.process.index, link.index, round_))


def lonely() -> World:
    """A world with one worker that does one thing."""
    knobs = Knobs(processes=1, rounds=1, think=0.0, hold=0.3, extension=False)
    return World(1, knobs, (), Journal(), trace=True)


def test_simulated_connection_delivers_in_order() -> None:
    knobs = Knobs(processes=3, workers=2, rounds=6, tail=0.5, delay=0.01, ttl=0.5)
    faults = [
        Fault("freeze", 0.2, 0.4, nodes=(0,)),
        Fault("cut", 0.5, 0.5, (1,), (0, 1), "requests"),
        Fault("cut", 1.2, 0.5, (2,), (0, 1, 2), "replies"),
        Fault("pause", 1.0, 0.5, processes=(1,)),
    ]
    journal = Journal()
    World(1, knobs, faults, journal).run()
    for process in range(3):
        for node in range(3):
            sent = [r for p, n, r in journal.written if (p, n) == (process, node)]
            read = [r for p, n, r in journal.read if (p, n) == (process, node)]
            assert len(sent) > 10
            assert sent == read


def test_drawn_worlds_keep_the_premises() -> None:
    kinds = set()
    for seed in range(500):
        knobs, faults = draw(seed)
        for rate in (*knobs.client_rates, *knobs.node_rates):
            assert abs(rate - 1.0) <= RATE + 1e-9
        for fault in faults:
            kinds.add(fault.kind)
            if fault.kind == "crash":
                assert knobs.guard or fault.lasts >= RESTART * knobs.ttl
    assert "jump" not in kinds


# -- The auditor is not asleep --------------------------------------------------------------------


def test_auditor_finds_two_holders() -> None:
    auditor = Auditor()
    world = World(1, Knobs(nodes=1, processes=2), (), auditor)
    auditor.start(world)
    for process in world.processes:
        claim = Claim("r0", f"token of {process.index}", 1.0, 1)
        claim.acknowledged(0, process.clock(), process.clock())
        assert claim.grant(process.clock())
        auditor.granted_to.setdefault("r0", []).append((process.workers[0], claim))
    with pytest.raises(Violation, match=r"I1.*token of 0 and token of 1"):
        auditor._alone(claim)


def test_auditor_finds_a_key_that_stays() -> None:
    world = lonely()
    world.run()
    world.servers[1].node.occupy("r0")
    with pytest.raises(Violation, match="I4"):
        conclude(world)


def test_auditor_finds_a_worker_that_never_ends() -> None:
    world = lonely()
    with pytest.raises(Violation, match="I8"):
        conclude(world)


def test_auditor_finds_that_a_fresh_client_cannot_lock() -> None:
    world = lonely()
    world.run()
    for server in world.servers[:2]:
        server.refuses_until = float("inf")
    with pytest.raises(Violation, match="I6"):
        conclude(world)
