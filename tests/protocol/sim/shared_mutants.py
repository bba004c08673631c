"""Planted bugs around readers, any number of which hold a key together, beside writers.

`mutants.py` says what a planted bug is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.round import Verb
from celery_redlock.protocol.values import is_shared
from celery_redlock.testing.fakes import FakeNode
from tests.protocol.sim.world.plan import Fault, Knobs


def reader_beside_a_writer() -> list[Any]:
    """A reader is let in, and counts the node, where a writer's token is."""
    token = FakeNode.token

    def seen(self: FakeNode, resource: str, now: float, seen_by: str = "") -> str | None:
        found = token(self, resource, now, seen_by)
        return None if is_shared(seen_by) and found != seen_by else found

    return [(FakeNode, "token", seen)]


def writer_beside_readers() -> list[Any]:
    """A writer does not see who reads."""
    token = FakeNode.token

    def seen(self: FakeNode, resource: str, now: float, seen_by: str = "") -> str | None:
        found = token(self, resource, now, seen_by)
        return None if found and is_shared(found) and not is_shared(seen_by) else found

    return [(FakeNode, "token", seen)]


def extended_beside_a_writer() -> list[Any]:
    """A reader's extension sets it again where a writer has come meanwhile."""
    extend = FakeNode._extend

    def careless(self: FakeNode, verb: Verb, claim: Claim, now: float) -> str:
        if is_shared(claim.token) and verb is Verb.EXTEND:
            return "1"
        return extend(self, verb, claim, now)

    return [(FakeNode, "_extend", careless)]


def all_readers_freed() -> list[Any]:
    """A reader that goes takes the others with it."""
    delete = FakeNode._delete

    def clears(self: FakeNode, claim: Claim, name: str, token: str | None) -> bool:
        freed = delete(self, claim, name, token)
        if freed and is_shared(claim.token):
            self.readers[name].clear()
        return freed

    return [(FakeNode, "_delete", clears)]


def crowded(knobs: Knobs, faults: list[Fault]) -> tuple[Knobs, list[Fault]]:
    """All want the same key, and half of them to read."""
    return replace(knobs, keys=1, shared=0.5, tries=5, rounds=4), faults
