"""A separate process that extends leases for another process, which may be paused.

Mirrors `supervisor.LeaseSupervisor` and the memory it shares with those it keeps,
`shared_table.SharedLeaseTable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from celery_redlock.protocol import quorum
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.lease import NEVER
from celery_redlock.protocol.round import Verb
from tests.protocol.sim.world.operation import Operation
from tests.protocol.sim.world.plan import chance, struck_at
from tests.protocol.sim.world.process import Process

if TYPE_CHECKING:
    from tests.protocol.sim.world.world import World

LATE, LOOK_EVERY, MIN_PAUSE_S, MAX_PAUSE_S = 1 / 2, 1 / 10, 0.02, 0.1  # as in supervisor.py


class LeaseRecord:
    """A process's record of a lease, with the acknowledgements of its keeper."""

    __slots__ = ("expiries", "held", "kept", "resources", "token", "ttl")

    def __init__(self, claim: Claim) -> None:
        self.resources, self.token, self.ttl = claim.resources, claim.token, claim.ttl
        self.held = False
        self.expiries: Sequence[float] = [NEVER] * len(claim.expiries)
        self.kept: Sequence[float] = ()


class SharedLeaseTable:
    """The notes of one process, and the bell that wakes its keeper."""

    def __init__(self) -> None:
        self.notes: dict[str, LeaseRecord] = {}
        self.keeper: LeaseSupervisor | None = None

    def register(self, claim: Claim) -> None:
        """Note a claim before its token is written to any node."""
        note = self.notes[claim.token] = LeaseRecord(claim)
        claim.kept = lambda: note.kept
        if self.keeper is not None:
            self.keeper.wake()

    def granted(self, claim: Claim) -> None:
        """Note that the claim was granted or extended."""
        note = self.notes.get(claim.token)
        if note is not None:
            note.held, note.expiries = True, tuple(claim.expiries)

    def unregister(self, claim: Claim) -> None:
        """Note that the claim was released or lost."""
        self.notes.pop(claim.token, None)
        claim.kept = None


class LeaseSupervisor(Process):
    """A process that extends its child's late leases, and releases them when the child dies.

    Attributes:
        known: What makes the keeper's own claims.
    """

    known: type[Claim] = Claim

    def __init__(self, world: World, index: int, child: Process, *, connected: bool = True) -> None:
        super().__init__(world, index, child.host, connected=connected)
        self.child = child
        if child.table is None:
            child.table = SharedLeaseTable()
        self.notes = child.table.notes
        child.table.keeper = self
        self._claims: dict[str, Claim] = {}
        self._looking = False
        self._rounds = 0
        self._period = min(max(world.knobs.ttl * LOOK_EVERY, MIN_PAUSE_S), MAX_PAUSE_S)
        if self.notes:
            self.wake()

    def die(self) -> None:
        """Let another keeper take its place, and read the child's leases from the table."""
        super().die()
        if not self.child.dead:
            world = self.world
            world.at(world.now + world.knobs.ttl / 10, self._succeed, None)

    def _succeed(self, _argument: Any) -> None:
        processes = self.world.processes
        processes.append(LeaseSupervisor(self.world, len(processes), self.child, connected=False))

    def wake(self) -> None:
        """Look at the table, which has a new note."""
        if not self._looking:
            self._looking = True
            self.later(self._period, self._look)

    def hears_of_death(self) -> None:
        """Receive the death of the child, as by its pidfd."""
        self.later(0.001, self._look)

    def gone(self) -> bool:
        """Return True if the child has really ended: only then may its locks be released."""
        return self.child.dead

    def _reap(self) -> None:
        for note in list(self.notes.values()):
            claim = Claim(note.resources, note.token, note.ttl, len(note.expiries))
            claim.written = (1 << claim.nodes) - 1
            steps = quorum.release(claim, self.clock(), self.world.knobs.node_timeout)
            Operation(self, steps, lambda _held: None).start()
        self.notes.clear()

    def _look(self, _argument: Any = None) -> None:
        """Extend what the child has not; look again as long as there is anything."""
        self._looking = False
        if self.gone():
            self._reap()
        now = self.clock()
        seen: dict[str, Claim] = {}
        late: list[tuple[LeaseRecord, Claim]] = []
        for token, note in self._read().items():
            if note.held:
                claim = seen[token] = self._claim(note, now)
                if claim.held(now) and claim.deadline - now < note.ttl * LATE:
                    late.append((note, claim))
        self._claims = seen
        if late:
            self._looking = True
            self._extend(late, now)
        elif self.notes:
            self.wake()

    def _read(self) -> dict[str, LeaseRecord]:
        return self.notes

    def _claim(self, note: LeaseRecord, now: float) -> Claim:
        """Return the keeper's claim for a note, with what its holder has written since."""
        claim = self._claims.get(note.token)
        if claim is not None:
            news = claim.learn(note.expiries)
            if claim.lost is None or not news:
                return claim
        fresh = self.known(note.resources, note.token, note.ttl, len(note.expiries))
        fresh.learn(note.expiries)
        if claim is None:
            fresh.learn(note.kept)
        fresh.granted_at = now
        return fresh

    def _extend(self, late: list[tuple[LeaseRecord, Claim]], now: float) -> None:
        claims = [claim for _note, claim in late]
        knobs = self.world.knobs
        patience = min(min(c.deadline - now, knobs.patience) for c in claims)
        self._rounds += 1
        Operation(
            self,
            quorum.extend(claims, now, max(0.001, patience), verb=Verb.RENEW),
            lambda _ballot: self._extended(late),
            lambda: self._extended(late),
            struck_at(self._stream("strike", 0), self._rounds, knobs) if knobs.strikes else 0,
        ).start()

    def _extended(self, late: list[tuple[LeaseRecord, Claim]]) -> None:
        # Any time may pass between knowing it and writing it down.
        drawn = chance(self._stream("write", 0), self._rounds)
        seconds = self.world.knobs.ttl * (drawn - 0.8) * 5 if drawn > 0.8 else 0.0
        self.later(seconds, self._write, late)

    def _write(self, late: list[tuple[LeaseRecord, Claim]]) -> None:
        for note, claim in late:
            note.kept = tuple(claim.expiries)
        self._looking = False
        if self.notes:
            self.wake()
