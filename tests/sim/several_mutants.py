"""Planted bugs around claims of several keys, and limits.

`mutants.py` says what a planted bug is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.round import REFUSED, RENEWED, SET_AGAIN, Verb
from celery_redlock.testing.fakes import FakeNode
from tests.sim.world.plan import Fault, Knobs
from tests.sim.world.worker import Worker

PERMITS = 2


def part_kept() -> list[Any]:
    """A node sets one key after the other, and stops at the first that is held."""

    def acquire(self: FakeNode, claim: Claim, now: float) -> str | None:
        for name in claim.resources:
            token = self.token(name, now)
            if token not in (None, claim.token):
                return token
            self._set(claim, name, token, now)
        return None

    return [(FakeNode, "_acquire", acquire)]


def part_freed() -> list[Any]:
    """Only one of the keys is deleted."""
    execute = FakeNode.execute

    def forgetful(self: FakeNode, verb: Verb, claims: Sequence[Claim], now: float) -> Any:
        if verb in (Verb.RELEASE, Verb.UNDO):
            name = claims[0].resources[0]
            return self._delete(claims[0], name, self.token(name, now))
        return execute(self, verb, claims, now)

    return [(FakeNode, "execute", forgetful)]


def part_extended() -> list[Any]:
    """What one of the keys allows is done to all that are not another's."""

    def extend(self: FakeNode, verb: Verb, claim: Claim, now: float) -> str:
        answer = REFUSED
        for name in claim.resources:
            token = self.token(name, now)
            if token == claim.token or (token is None and verb is Verb.EXTEND):
                self._set(claim, name, token, now)
                answer = RENEWED if token else SET_AGAIN
        return answer

    return [(FakeNode, "_extend", extend)]


def permits() -> list[Any]:
    """Each node counts permits of its own, and does not care which of them anybody has."""
    execute = FakeNode.execute

    def counting(self: FakeNode, verb: Verb, claims: Sequence[Claim], now: float) -> Any:
        def do(verb: Verb, claim: Claim) -> Any:
            (key,) = claim.resources
            names = [f"{key} permit {number}" for number in range(PERMITS)]
            tokens = {name: self.token(name, now) for name in names}
            own = [name for name in names if tokens[name] == claim.token]
            free = [name for name in names if tokens[name] is None]
            one = Claim((own or free or names)[0], claim.token, claim.ttl, len(claim.expiries))
            return execute(self, verb, [one], now)

        if verb.extends:
            return "".join(do(verb, claim) for claim in claims)
        return do(verb, claims[0])

    def resources(self: Worker) -> list[str]:
        return [f"{self._resource()}#slot0"]

    return [(FakeNode, "execute", counting), (Worker, "_resources", resources)]


def limited(knobs: Knobs, faults: list[Fault]) -> tuple[Knobs, list[Fault]]:
    """All want the one key that so many may hold."""
    workers = max(2, knobs.workers)
    return replace(knobs, keys=1, several=1, limit=PERMITS, workers=workers, tries=5), faults
