"""Planted bugs around the algorithm: connections, keepers, forks, clean-up after an interruption.

`mutants.py` says what a planted bug is.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from celery_redlock.protocol import quorum
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.node_info import NodeInfo
from celery_redlock.protocol.pipeline import Pipeline
from celery_redlock.protocol.restart_guard import ALWAYS, Memory, RestartGuard
from celery_redlock.protocol.round import Round, Verb
from tests.protocol.sim.world import keeper as keeper_module
from tests.protocol.sim.world.keeper import LeaseRecord, LeaseSupervisor, SharedLeaseTable
from tests.protocol.sim.world.nodes import Link
from tests.protocol.sim.world.operation import Operation
from tests.protocol.sim.world.process import Process
from tests.protocol.sim.world.worker import Worker


def two_connections() -> list[Any]:
    def link(self: Process, index: int, round_: Round) -> Link:
        if round_.verb not in (Verb.RELEASE, Verb.UNDO):
            return self.links[index]
        others = self.__dict__.setdefault("others", {})
        if index not in others:
            others[index] = Link(self, index, self.links[index].server)
            others[index].connections = 1000
            self._open(others[index])
        return others[index]

    return [(Process, "link", link)]


def close_on_timeout() -> list[Any]:
    overdue = Process._overdue

    def impatient(self: Process, round_: Round) -> None:
        operation = self.waiting.get(round_)
        if operation is not None:
            for link in self.links:
                self._drain(link)
        late = [i for i in round_.targets if round_.votes[i] is None] if operation else []
        for index in late:
            link = self.links[index]
            if link.connection is not None and round_ in link.channel.unanswered:
                link.connection.proven = True
                self.drop(link)
        overdue(self, round_)

    return [(Process, "_overdue", impatient)]


def sent_again() -> list[Any]:
    overdue, connected = Process._overdue, Pipeline.connected

    def impatient(self: Process, round_: Round) -> None:
        for link in self.links if round_ in self.waiting else ():
            self._drain(link)
            if link.connection is not None and round_ in link.channel.unanswered:
                link.connection.proven = True
                link.channel.__dict__["again"] = round_
                self.drop(link)
        overdue(self, round_)

    def insistent(self: Pipeline, now: float) -> list[Round]:
        first = connected(self, now)
        again = self.__dict__.pop("again", None)
        if again is None or again in first:
            return first
        self._written(again)
        return [*first, again]

    return [(Process, "_overdue", impatient), (Pipeline, "connected", insistent)]


def struck_while_undoing() -> list[Any]:
    clean_up = Worker.clean_up

    def trusting(self: Worker, claim: Claim) -> None:
        if not claim.ended:
            clean_up(self, claim)

    return [(Worker, "clean_up", trusting)]


def keeper_sets_again() -> list[Any]:
    return [(keeper_module, "Verb", mock.Mock(RENEW=Verb.EXTEND))]


def keeper_counts_from_the_answer() -> list[Any]:
    class Late(Claim):
        __slots__ = ()

        def acknowledged(self, node: int, sent: float, now: float) -> None:
            super().acknowledged(node, now, now)

    return [(LeaseSupervisor, "known", Late)]


def keepers_old_deadline_ignored() -> list[Any]:
    class Careless(Claim):
        __slots__ = ()

        def _open(self, now: float) -> bool:
            return True

    return [(LeaseSupervisor, "known", Careless)]


def loss_revoked() -> list[Any]:
    def held(self: Claim, now: float) -> bool:
        if self.kept is not None:
            self.learn(self.kept())
        return self.granted_at is not None and not self.ended and now < self.deadline

    unregister = SharedLeaseTable.unregister

    def late(self: SharedLeaseTable, claim: Claim) -> None:
        if claim.ended:
            unregister(self, claim)

    return [(Claim, "held", held), (SharedLeaseTable, "unregister", late)]


def keeper_deaf() -> list[Any]:
    unregister, notes = SharedLeaseTable.unregister, LeaseSupervisor._read

    def forgetful(self: SharedLeaseTable, claim: Claim) -> None:
        if self.keeper is not None and claim.token in self.notes and not claim.ended:
            self.keeper.__dict__.setdefault("old", {})[claim.token] = self.notes[claim.token]
        unregister(self, claim)

    def all_notes(self: LeaseSupervisor) -> dict[str, LeaseRecord]:
        return {**self.__dict__.get("old", {}), **notes(self)}

    return [(SharedLeaseTable, "unregister", forgetful), (LeaseSupervisor, "_read", all_notes)]


def freed_before_death() -> list[Any]:
    def gone(self: LeaseSupervisor) -> bool:
        return self.child.dead or self.child.paused_until > self.world.now

    return [(LeaseSupervisor, "gone", gone)]


def fork_releases() -> list[Any]:
    def forked(self: Process, parent: Process) -> None:
        for worker in parent.workers:
            claim = worker.claim
            if claim is not None and claim.held(self.clock()):
                copy = Claim(claim.resource, claim.token, claim.ttl, len(claim.expiries))
                copy.written = claim.written
                steps = quorum.release(copy, self.clock(), 1.0)
                Operation(self, steps, lambda _held: None).start()

    return [(Process, "forked", forked)]


def release_swallowed() -> list[Any]:
    return [(Worker, "clean_up", lambda self, claim: setattr(claim, "ended", True))]


def guard_off() -> list[Any]:
    return [(RestartGuard, "doubt", lambda self, memory, now, recall=0.0: None)]


def swapped_long_ago() -> list[Any]:
    meet = RestartGuard.meet

    def since_opened(
        self: RestartGuard, index: int, facts: NodeInfo, asked: float, now: float, moves: bool
    ) -> Memory:
        opened = self.__dict__.setdefault("opened", {})
        before = self._met.get(index)
        met = meet(self, index, facts, asked, now, moves)
        if met is not before:
            if not facts.history and met.started >= opened.get(index, ALWAYS):
                met.began = met.started
            opened[index] = now
        return met

    return [(RestartGuard, "meet", since_opened)]


def trusted_as_before() -> list[Any]:
    meet = RestartGuard.meet

    def by_run(
        self: RestartGuard, index: int, facts: NodeInfo, asked: float, now: float, moves: bool
    ) -> Memory:
        met = meet(self, index, facts, asked, now, moves)
        known = self.__dict__.setdefault("runs", {})
        met.began = known[facts.run_id] = min(met.began, known.get(facts.run_id, met.began))
        return met

    return [(RestartGuard, "meet", by_run)]


def never_looks_again() -> list[Any]:
    return [(Process, "_look_again", lambda self, link, now: None)]
