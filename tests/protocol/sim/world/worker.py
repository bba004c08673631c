"""Workers that want locks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_redlock.protocol import quorum
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.names import slots
from celery_redlock.protocol.round import Round
from celery_redlock.protocol.values import SHARED, Owner
from tests.protocol.sim.world.operation import Operation
from tests.protocol.sim.world.plan import chance, key_of, struck_at

if TYPE_CHECKING:
    from tests.protocol.sim.world.process import Process


class Worker:
    """A thread that wants a lock, again and again. Mirrors `Redlock._try` and `_release`."""

    def __init__(self, process: Process, number: int, outer: Worker | None = None) -> None:
        self.process = process
        self.number = number
        self.claim: Claim | None = None
        self.done = False
        self._outer = outer
        self._inner: Worker | None = None
        self._knows = False  # that its lock is lost
        self._rounds = process.world.knobs.rounds if outer is None else 1
        self._tries = self._attempts = self._operations = 0
        self._draws = 0
        self._key = key_of(process.world.seed, "worker", process.index, number)
        self._owner = Owner(f"host{process.index}", 10 + number)
        think = process.world.knobs.think if outer is None else 0.0
        process.later(self._draw() * think, self._begin)

    def _draw(self) -> float:
        self._draws += 1
        return chance(self._key, self._draws)

    def _begin(self, _argument: Any = None) -> None:
        if self._rounds <= 0:
            self.done = True
            return
        self._rounds -= 1
        self._tries = self.process.world.knobs.tries
        self._attempt()

    def _attempt(self, _argument: Any = None) -> None:
        process, knobs = self.process, self.process.world.knobs
        self._attempts += 1
        mark = SHARED if knobs.shared and self._draw() < knobs.shared else ""
        token = self._owner.token(f"{self._attempts}{mark}")
        self.claim = claim = Claim(self._resources(), token, knobs.ttl, knobs.nodes)
        if process.table is not None:
            process.table.register(claim)
        self._knows = False
        steps = quorum.acquire(claim, process.clock(), knobs.patience, process.proposal())
        operation = Operation(process, steps, self._tried, self._interrupted, self._strike())
        struck = self._struck()
        operation.start()
        if struck and not operation.over:
            process.later(struck * knobs.patience, operation.interrupt)

    def _resources(self) -> list[str]:
        """Return the resources it wants this time; any slot of those that several may hold."""
        knobs = self.process.world.knobs
        first = self._resource()
        others = int(self._draw() * knobs.several) if knobs.several > 1 else 0
        names = [first, *(self._resource() for _ in range(others))]
        return [self._slot(name) for name in dict.fromkeys(names)]

    def _slot(self, name: str) -> str:
        knobs = self.process.world.knobs
        limit = knobs.limit_of(name)
        if knobs.varies:
            limit = 1 + int(self._draw() * limit)
        return slots(name, limit)[int(self._draw() * limit)] if limit > 1 else name

    def _resource(self) -> str:
        keys = self.process.world.knobs.keys
        if self._outer is not None:
            assert self._outer.claim is not None
            return f"r{(int(self._outer.claim.resource[1:]) + 1) % keys}"
        return f"r{int(self._draw() * keys)}" if keys > 1 else "r0"

    def _strike(self) -> int:
        """At which point of its next operation an exception strikes; 0 for none."""
        knobs = self.process.world.knobs
        if not knobs.strikes:
            return 0
        self._operations += 1
        return struck_at(self._key ^ 0x57A1, self._operations, knobs)

    def _struck(self) -> float:
        knobs = self.process.world.knobs
        if not knobs.interrupts:
            return 0.0
        drawn = self._draw()
        return drawn / knobs.interrupts if drawn < knobs.interrupts else 0.0

    def _interrupted(self) -> None:
        claim = self.claim
        assert claim is not None
        self.clean_up(claim)
        self._strike_off(claim)
        self.process.world.audit.interrupted(self, claim)
        self._rest()

    def clean_up(self, claim: Claim) -> None:
        """Clean up as `Redlock` does when an exception interrupts an attempt."""
        process = self.process
        if claim.ended:  # struck while it was undoing what had failed
            steps: Any = quorum.undo(claim, process.clock())
        else:
            steps = quorum.release(claim, process.clock(), process.world.knobs.node_timeout)
        Operation(process, steps, lambda _held: None).start()

    def _tried(self, ballot: Round) -> None:
        process, claim, knobs = self.process, self.claim, self.process.world.knobs
        assert claim is not None
        now = process.clock()
        if claim.granted_at is None:
            self._strike_off(claim)
            process.world.audit.failed(self, claim, ballot, now)
            self._tries -= 1
            if self._tries > 0:
                process.later(self._draw() * knobs.patience, self._attempt)
            else:
                self._rest()
            return
        process.last_fence = claim.fencing_token or 0
        process.world.grants += 1
        process.world.audit.granted(self, claim, now)
        process.world.note(f"granted {process.index}.{self.number} until {claim.deadline:.6f}")
        if knobs.extension:
            process.watch(self, claim)
            if process.table is not None:
                process.table.granted(claim)
        if knobs.nested and self._outer is None and self._draw() < knobs.nested:
            self._inner = Worker(process, self.number + 100 * self._attempts, outer=self)
            process.workers.append(self._inner)
        self._work((claim, now + self._draw() * knobs.hold))

    def _work(self, what: tuple[Claim, float]) -> None:
        """Work under the lock, asking now and then whether it still is ours."""
        process = self.process
        claim, until = what
        now = process.clock()
        if claim.ended:
            return
        says = claim.held(now)
        process.world.audit.held(self, claim, says, now)
        if not says and not self._knows:
            self._knows = True
            heedless = process.world.knobs.heedless
            until = now + self._draw() * heedless if heedless else now
        elif now >= until and says and self._inner is not None and not self._inner.done:
            until = now + claim.ttl / 10  # an inner lock is released first
        if now >= until:
            self._release()
        else:
            process.later(min(until - now, claim.ttl / 4), self._work, (claim, until))

    def lost(self, claim: Claim) -> None:
        """The watchdog says that the lease is lost."""
        process = self.process
        self._strike_off(claim)
        process.world.audit.signalled(self, claim, process.clock())
        if not claim.ended and not process.world.knobs.heedless:
            self._release()

    def _release(self) -> None:
        process, claim, knobs = self.process, self.claim, self.process.world.knobs
        assert claim is not None
        process.schedule.drop(claim)
        process.world.note(f"releases {process.index}.{self.number}")
        steps = quorum.release(claim, process.clock(), knobs.node_timeout)
        again = self._release_again
        operation = Operation(process, steps, self._released, again, self._strike())
        struck = self._struck()
        operation.start()
        if struck and not operation.over:
            process.later(struck * knobs.patience, operation.interrupt)

    def _release_again(self) -> None:
        """An exception struck in a release; it strikes once."""
        assert self.claim is not None
        steps = quorum.release(self.claim, self.process.clock(), 0.0)
        Operation(self.process, steps, self._released).start()

    def _released(self, released: quorum.Released) -> None:
        assert self.claim is not None
        self._strike_off(self.claim)
        self.process.world.audit.released(self, self.claim, released.held, self.process.clock())
        self._rest()

    def _strike_off(self, claim: Claim) -> None:
        if self.process.table is not None:
            self.process.table.unregister(claim)

    def _rest(self) -> None:
        self.process.later(self._draw() * self.process.world.knobs.think, self._begin)
