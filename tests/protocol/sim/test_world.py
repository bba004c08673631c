"""The simulator keeps the laws of its world; a simulator that breaks them proves anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.round import Round, Verb
from tests.protocol.sim.audit import Auditor, Violation, conclude
from tests.protocol.sim.swarm import RATE, RESTART, draw
from tests.protocol.sim.world.nodes import Connection, Link, Server
from tests.protocol.sim.world.plan import Audit, Fault, Knobs, chance, key_of
from tests.protocol.sim.world.world import World


class Journal(Audit):
    """Everything that was sent, carried out and answered."""

    def __init__(self) -> None:
        self.written: list[tuple[int, int, Round]] = []
        self.read: list[tuple[float, int, int, Round]] = []
        self.sets: list[tuple[float, int, str]] = []
        self.grants: list[tuple[float, int]] = []
        self.failures: list[tuple[float, int]] = []

    def start(self, world: World) -> None:
        self.world = world
        for server in world.servers:
            server.node.witness = world._changed

    def sent(self, link: Link, round_: Round, now: float) -> None:
        self.written.append((link.process.index, link.index, round_))

    def answered(self, link: Link, round_: Round, reply: Any, now: float) -> None:
        self.read.append((self.world.now, link.process.index, link.index, round_))

    def changed(
        self,
        server: Server,
        over: Connection,
        name: str,
        before: str | None,
        after: str | None,
        claim: Claim,
    ) -> None:
        if after is not None:
            self.sets.append((self.world.now, server.index, after))

    def failed(self, worker: Any, claim: Claim, ballot: Round, now: float) -> None:
        self.failures.append((self.world.now, ballot.yes))

    def granted(self, worker: Any, claim: Claim, now: float) -> None:
        self.grants.append((self.world.now, worker.process.index))


def watched(knobs: Knobs, faults: Sequence[Fault] = (), seed: int = 1) -> tuple[World, Journal]:
    journal = Journal()
    world = World(seed, knobs, faults, journal, trace=True)
    journal.start(world)
    return world, journal


LONELY = Knobs(processes=1, rounds=1, think=0.0, hold=0.3, extension=False)


def test_simulated_connection_delivers_in_order() -> None:
    knobs = Knobs(processes=3, workers=2, rounds=6, tail=0.5, delay=0.01, ttl=0.5)
    faults = [
        Fault("freeze", 0.2, 0.4, nodes=(0,)),
        Fault("cut", 0.5, 0.5, (1,), (0, 1), "requests"),
        Fault("cut", 1.2, 0.5, (2,), (0, 1, 2), "replies"),
        Fault("pause", 1.0, 0.5, processes=(1,)),
    ]
    world, journal = watched(knobs, faults)
    world.run()
    for process in range(3):
        for node in range(3):
            sent = [r for p, n, r in journal.written if (p, n) == (process, node)]
            read = [r for _t, p, n, r in journal.read if (p, n) == (process, node)]
            assert len(sent) > 10
            assert sent == read


def test_simulated_connections_overtake_each_other() -> None:
    world, journal = watched(Knobs(processes=1, rounds=9, tail=0.3))
    world.run()
    orders = {
        tuple(n for _t, _p, n, r in journal.read if r is round_)
        for round_ in {r for _p, _n, r in journal.written}
    }
    assert len(orders) > 2


@pytest.mark.parametrize("way", ["requests", "replies", "both"])
def test_simulated_cut_delays_and_does_not_lose(way: str) -> None:
    world, journal = watched(LONELY, [Fault("cut", 0.0, 5.0, (0,), (0,), way)])
    world.run()
    late = [(at, r.verb) for at, _p, node, r in journal.read if node == 0]
    assert [verb for _at, verb in late] == [Verb.ACQUIRE, Verb.RELEASE]
    assert all(at >= 5.0 for at, _verb in late)
    set_at = next(at for at, node, _token in journal.sets if node == 0)
    assert (set_at >= 5.0) is (way != "replies")
    assert journal.grants[0][0] < 0.1  # two of three are a quorum


def test_simulated_cut_affects_only_its_connection() -> None:
    knobs = Knobs(processes=2, rounds=1, think=0.0, hold=0.0)
    world, journal = watched(knobs, [Fault("cut", 0.0, 5.0, (0,), (0,))])
    world.run()
    assert all(at >= 5.0 for at, process, node, _r in journal.read if (process, node) == (0, 0))
    assert min(at for at, process, node, _r in journal.read if (process, node) == (1, 0)) < 1.0


def test_simulated_frozen_node_answers_everything_on_waking() -> None:
    world, journal = watched(LONELY, [Fault("freeze", 0.0, 2.0, nodes=(1,))])
    world.run()
    at_node_1 = [(at, r.verb) for at, _p, node, r in journal.read if node == 1]
    assert [verb for _at, verb in at_node_1] == [Verb.ACQUIRE, Verb.RELEASE]
    assert all(at >= 2.0 for at, _verb in at_node_1)


def test_simulated_paused_process_reads_its_answers_too_late_for_its_lease() -> None:
    pause = Fault("pause", 0.0001, 3.0, processes=(0,))
    world, journal = watched(LONELY, [pause])
    world.run()
    assert journal.read[0][0] == 3.0001
    # A quorum said yes, to a request of three seconds ago: nothing is left of the ttl.
    assert journal.failures[0] == (3.0001, 2)
    assert journal.grants[0][0] > 3.0


def test_simulated_dead_node_loses_the_contents_of_its_connections() -> None:
    # It crashes while the requests are on their way to it.
    world, journal = watched(LONELY, [Fault("crash", 0.0005, 1.2, nodes=(2,))])
    world.run(until=0.5)
    assert [node for _at, node, _token in journal.sets if node == 2] == []
    assert world.processes[0].links[2].breaks == 1
    world.run()
    assert world.processes[0].links[2].channel.up


@pytest.mark.parametrize(("kind", "remembers"), [("crash", False), ("restart", True)])
def test_simulated_crash_forgets_and_a_restart_does_not(kind: str, remembers: bool) -> None:
    knobs = Knobs(processes=1, rounds=1, think=0.0, hold=50.0, ttl=30.0)
    death = Fault("death", 0.5, processes=(0,))  # nobody writes it again
    world, _journal = watched(knobs, [death, Fault(kind, 1.0, 0.5, nodes=(0,))])
    world.run()
    assert world.servers[0].up
    assert bool(world.servers[0].node.held) is remembers


def test_simulated_reset_breaks_a_connection_and_another_is_made() -> None:
    knobs = Knobs(processes=1, rounds=1, think=0.0, hold=2.0)
    world, _journal = watched(knobs, [Fault("reset", 0.5, 0.0, (0, 1), (0,))])
    world.run()
    links = world.processes[0].links
    assert [link.breaks for link in links] == [1, 1, 0]
    assert [link.connections for link in links] == [2, 2, 1]
    assert all(link.channel.up for link in links)


def test_simulated_dead_process_does_nothing_more() -> None:
    knobs = Knobs(processes=1, rounds=5, hold=1.0)
    world, journal = watched(knobs, [Fault("death", 0.3, processes=(0,))])
    world.run()
    assert journal.grants
    assert all(at <= 0.3 for at, _p, _n, _r in journal.read)
    assert world.now < 1.5


def test_simulated_fast_clock_ends_a_key_early() -> None:
    for rate, left in ((1.0, True), (1.005, False)):
        knobs = Knobs(nodes=1, processes=1, think=0.0, hold=99.0, ttl=10.0, node_rates=(rate,))
        world, _journal = watched(knobs, [Fault("death", 0.1, processes=(0,))])
        world.run()
        server = world.servers[0]
        assert (server.node.token("r0", server.clock(9.97)) is not None) is left


def test_simulated_randomness_is_a_pure_function() -> None:
    assert chance(key_of(1, "net", 0, 1, 1), 5) == chance(key_of(1, "net", 0, 1, 1), 5)
    drawn = [chance(key_of(7, "x"), count) for count in range(10_000)]
    assert all(0.0 <= value < 1.0 for value in drawn)
    assert abs(sum(drawn) / len(drawn) - 0.5) < 0.02
    assert len(set(drawn)) == len(drawn)
    # Another purpose, another stream.
    assert chance(key_of(7, "y"), 3) != drawn[3]


def test_simulated_world_without_a_fault_keeps_the_times_of_other_messages() -> None:
    knobs = Knobs(processes=2, rounds=1, think=0.1, hold=0.0, tail=0.3)
    whole, some = (watched(knobs, faults) for faults in ([Fault("cut", 0.0, 9.0, (0,), (0,))], []))
    for world, _journal in (whole, some):
        world.run()
    firsts = [
        {(p, n): at for at, p, n, _r in reversed(journal.read) if n != 0}
        for _world, journal in (whole, some)
    ]
    assert firsts[0] == firsts[1]
    assert firsts[0]


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
    world, _journal = watched(LONELY)
    world.run()
    world.servers[1].node.occupy("r0")
    with pytest.raises(Violation, match="I4"):
        conclude(world)


def test_auditor_finds_a_worker_that_never_ends() -> None:
    world, _journal = watched(LONELY)
    with pytest.raises(Violation, match="I8"):
        conclude(world)


def test_auditor_finds_that_a_fresh_client_cannot_lock() -> None:
    world, _journal = watched(LONELY)
    world.run()
    for server in world.servers[:2]:
        server.refuses_until = float("inf")
    with pytest.raises(Violation, match="I6"):
        conclude(world)
