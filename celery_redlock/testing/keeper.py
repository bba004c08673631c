"""Who extends leases for a process that may be paused, from a process of its own.

The two share a little memory. In it the process says what it holds, until when, and that it gave it
up; the keeper says until when it has extended that. Over connections of its own it can only renew
(`Verb.RENEW`): its requests may arrive behind the release.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import quorum
from ..lease import NEVER, Claim, drift
from ..quorum import Verb
from .operation import Operation
from .plan import chance, struck_at
from .process import Process

if TYPE_CHECKING:
    from .world import World


class KeptClaim(Claim):
    """A claim that stands as long as its holder or its keeper has extended it.

    Attributes:
        kept: Until when the keeper has extended it, as the keeper last wrote; seconds.
    """

    __slots__ = ("kept",)

    def __init__(self, resource: str, token: str, ttl: float, nodes: int) -> None:
        super().__init__(resource, token, ttl, nodes)
        self.kept = NEVER

    def _open(self, now: float) -> bool:
        # Before a loss is declared; once it is, it is final.
        if self.granted_at is not None and now >= self.deadline:
            self.deadline = max(self.deadline, self.kept)
        return super()._open(now)

    def _settle(self, now: float) -> None:
        before, self.granted_at = self.granted_at, None
        super()._settle(now)
        self.granted_at = before
        self.deadline = max(self.deadline, self.kept)
        if before is not None and now >= self.deadline:
            self.lose("refused")


class Keeper(Process):
    """Extends what its child holds and has not extended for half a ttl; buries it.

    Attributes:
        known: What makes the keeper's own claims.
    """

    known: type[Claim] = Claim

    def __init__(self, world: World, index: int, child: Process, *, connected: bool = True) -> None:
        super().__init__(world, index, child.host, connected=connected)
        self.child = child
        self._looks = self._rounds = 0
        child.keeper, child.claim = self, KeptClaim
        for worker in child.workers:
            claim = worker.claim
            if isinstance(claim, KeptClaim) and claim.granted_at is not None:
                self.keep(claim)

    def die(self) -> None:
        """Another takes its place, and finds what is held in the shared memory."""
        super().die()
        if not self.child.dead:
            world = self.world
            world.at(world.now + world.knobs.ttl / 10, self._succeed, None)

    def _succeed(self, _argument: Any) -> None:
        if not self.child.dead:
            processes = self.world.processes
            processes.append(Keeper(self.world, len(processes), self.child, connected=False))

    def keep(self, claim: KeptClaim) -> None:
        """The child holds something."""
        self.later(0.0, self._look, claim)

    def hears_of_death(self) -> None:
        """The child's end of the pipe is closed."""
        self.later(0.001, self._bury)

    def gone(self) -> bool:
        """Whether the child has really ended: only then may its locks be freed."""
        return self.child.dead

    def struck_off(self, claim: KeptClaim) -> bool:
        """Whether the child has given it back, or up: its word is final."""
        return claim.ended or claim.lost is not None

    def _bury(self, _argument: Any = None) -> None:
        for worker in self.child.workers:
            if worker.claim is not None and not worker.claim.ended:
                copy = self._copy(worker.claim, self.clock())
                steps = quorum.release(copy, self.clock(), self.world.knobs.node_timeout)
                Operation(self, steps, lambda _held: None).start()

    def _look(self, claim: KeptClaim) -> None:
        """Extend if the child has not done so; look again when that may be."""
        if self.gone():
            self._bury()
            return
        now = self.clock()
        deadline = max(claim.deadline, claim.kept)
        if self.struck_off(claim) or now >= deadline:
            return
        due = deadline - claim.ttl / 2
        if due > now:
            self.later(due - now + 1e-6, self._look, claim)
            return
        copy = self._copy(claim, now)
        knobs = self.world.knobs
        patience = max(0.001, min(knobs.patience, deadline - now))
        self._rounds += 1
        strike = struck_at(self._stream("strike", 0), self._rounds, knobs) if knobs.strikes else 0
        Operation(
            self,
            quorum.extend([copy], now, patience, verb=Verb.RENEW),
            lambda _ballot: self._renewed(claim, copy),
            lambda: self._renewed(claim, copy),
            strike,
        ).start()

    def _copy(self, claim: Claim, now: float) -> Claim:
        """The claim as the keeper knows it: a quorum of nodes holds it until its deadline."""
        copy = self.known(claim.resource, claim.token, claim.ttl, len(claim.expiries))
        deadline = max(claim.deadline, getattr(claim, "kept", NEVER))
        copy.expiries = [deadline + drift(claim.ttl)] * len(claim.expiries)
        copy.grant(now)
        copy.written = [True] * len(claim.expiries)
        return copy

    def _renewed(self, claim: KeptClaim, copy: Claim) -> None:
        # Any time may pass between knowing it and writing it down.
        drawn = chance(self._stream("publish", 0), self._rounds)
        late = claim.ttl * (drawn - 0.8) * 5 if drawn > 0.8 else 0.0
        self.later(late, self._publish, (claim, copy.deadline))

    def _publish(self, what: tuple[KeptClaim, float]) -> None:
        claim, deadline = what
        claim.kept = max(claim.kept, deadline)
        self.later(claim.ttl / 10, self._look, claim)
