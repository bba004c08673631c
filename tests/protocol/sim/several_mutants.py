"""Planted bugs around claims of several keys, and limits.

`mutants.py` says what a planted bug is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.names import SLOT_SUFFIX, base_of, slots
from celery_redlock.protocol.round import REFUSED, RENEWED, SET_AGAIN, Verb
from celery_redlock.testing.fakes import FakeNode
from tests.protocol.sim.world.plan import Fault, Knobs
from tests.protocol.sim.world.worker import Worker

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
    """Extend all keys that are not another's if one of them may be extended."""

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


def any_slot() -> list[Any]:
    """Each node sets, of every key, whichever slot is free there, not the one that is asked."""
    execute = FakeNode.execute

    def choosing(self: FakeNode, verb: Verb, claims: Sequence[Claim], now: float) -> Any:
        def do(claim: Claim) -> Any:
            names = []
            for asked in claim.resources:
                every = slots(base_of(asked), PERMITS if SLOT_SUFFIX in asked else 1)
                tokens = [self.token(name, now) for name in every]
                mine = [n for n, token in zip(every, tokens, strict=True) if token == claim.token]
                free = [n for n, token in zip(every, tokens, strict=True) if token is None]
                names.append((mine or free or every)[0])
            one = Claim(names, claim.token, claim.ttl, len(claim.expiries))
            return execute(self, verb, [one], now)

        return "".join(map(do, claims)) if verb.extends else do(claims[0])

    def slot(self: Worker, name: str) -> str:
        limit = self.process.world.knobs.limit_of(name)
        return f"{name}{SLOT_SUFFIX}2" if limit > 1 else name

    return [(FakeNode, "execute", choosing), (Worker, "_slot", slot)]


def several_limited(knobs: Knobs, faults: list[Fault]) -> tuple[Knobs, list[Fault]]:
    """All want a key that so many may hold, and most of them one besides that one may hold."""
    return replace(limited(knobs, faults)[0], keys=2, several=3), faults


def limited(knobs: Knobs, faults: list[Fault]) -> tuple[Knobs, list[Fault]]:
    """All want the one key that so many may hold."""
    workers = max(2, knobs.workers)
    return replace(knobs, keys=1, several=1, limit=PERMITS, workers=workers, tries=5), faults
