"""Planted bugs in the handing out of fencing tokens; `mutants.py` says what a planted bug is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_redlock.protocol import quorum
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.round import Round
from celery_redlock.testing.fakes import FakeNode
from tests.protocol.sim.world.process import Process

__all__ = ["Bug", "clocks_alone", "counters", "not_told", "steps", "told_anywhere"]

Bug = Callable[[], list[Any]]
"""A function that returns the arguments of `mock.patch.object`."""


def not_told() -> list[Any]:
    """The largest number is taken without telling it to a quorum."""
    fence = quorum._fence

    def silent(ballot: Round) -> bool:
        fence(ballot)
        return True

    return [(quorum, "_fence", silent)]


def steps() -> list[Any]:
    """INCR instead of max(proposal, stored + 1): nothing is proposed."""

    def nothing(self: Process) -> int | None:
        return 1 if self.world.knobs.fencing else None

    return [(Process, "proposal", nothing)]


def counters() -> list[Any]:
    """Take the largest of the nodes' counters, as is common: neither sent to nodes nor proposed."""
    return [*not_told(), *steps()]


def clocks_alone() -> list[Any]:
    """Accept each proposal, whatever the nodes remember."""

    def acquire(self: FakeNode, claim: Claim, token: str | None, now: float) -> Any:
        if token is not None and token != claim.token:
            return token
        self._set(claim, claim.resource, token, now)
        return claim.proposal

    return [(FakeNode, "_acquire_fenced", acquire)]


def told_anywhere() -> list[Any]:
    """The largest number is written to nodes on which our token does not hold the key."""

    def fence(self: FakeNode, claim: Claim, token: str | None) -> bool:
        known = self.fences.get(claim.resource, 0)
        self.fences[claim.resource] = max(claim.fencing_token or 0, known)
        return True

    return [(FakeNode, "_fence", fence)]
