"""Planted bugs, for this campaign to find: each was a bug of the library once.

Loaded by `project.py` and the beats' app alone, in processes of a campaign that was asked to.
"""

from __future__ import annotations

from typing import Any

from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.outcome import Doubt
from celery_redlock.protocol.round import Round
from tests.campaign.publishing.oracle import ERRBACK, LATE, LEFT, LOST, REPLACED
from tests.campaign.publishing.ticks import TICKS
from tests.campaign.worker.mutants import Mutant


def plant(name: str) -> None:
    """Put a bug into the library, in this process and those forked from it."""
    MUTANTS[name].plant()


def _errback_in_place() -> None:
    from celery_redlock.messages.errbacks import ErrorCallback

    ErrorCallback.send = lambda self, task, why: None  # type: ignore[method-assign]


def _kept_claims_count() -> None:
    """Count the time for which a tick's claim is kept as a ttl: nodes have no vote for so long."""
    from celery_redlock.locking.client import LockClient

    hold_for = LockClient.hold_for

    async def kept(self: LockClient, claim: Any, seconds: float, patience: float | None) -> bool:
        self.guard.expect(seconds)
        return await hold_for(self, claim, seconds, patience)

    LockClient.hold_for = kept  # type: ignore[method-assign]


def _guard_in_vain() -> None:
    """Wait without a quorum for nodes that have no vote, though another may answer at once."""
    from celery_redlock.protocol import outcome

    def retry_after(ballot: Round) -> float | None:
        left = sorted(detail.left for detail in ballot.details if isinstance(detail, Doubt))
        lacking = ballot.quorum - ballot.yes - ballot.no
        return left[lacking - 1] if 0 < lacking <= len(left) else None

    outcome._retry_after = retry_after


def _revoked_in_vain() -> None:
    """Revoke a call for one that could not be published."""
    from celery_redlock.messages.replaced import Places

    def leave(self: Places, *_error: object) -> None:
        for claim in self.freed:
            self._revoke(claim)

    Places.__exit__ = leave  # type: ignore[method-assign]


def _again_is_begun() -> None:
    """Treat a message that is delivered again as one that had begun."""
    from celery_redlock.messages.consume import ReservedDelivery
    from celery_redlock.messages.headers import is_redelivered

    successor = ReservedDelivery._successor

    def none_if_again(self: Any, claim: Any) -> Any:
        again = is_redelivered(self._request.delivery_info)
        return None if again else successor(self, claim)

    ReservedDelivery._successor = none_if_again  # type: ignore[method-assign]


def _guarded_if_asked() -> None:
    """Claim ticks only where nodes are named."""
    from celery_redlock.beat import scheduler

    guard = scheduler._guard

    def if_asked(beat: Any) -> None:
        if beat.app.conf.get("redlock_nodes") is not None:
            guard(beat)

    scheduler._guard = if_asked


def _silent_purge() -> None:
    """Purge a queue without freeing the reservations of its messages."""
    from celery_redlock.messages import purge

    purge.purge_first = lambda _app, _queue: (0, True)


def _prolonged_in_any_order() -> None:
    """Prolong a reservation on nodes that may have received its release first."""
    from celery_redlock.locking.prolonging import Prolonging

    soon = Prolonging.soon

    def everywhere(self: Prolonging, taken: Claim, seconds: float, sure: Any, below: float) -> None:
        soon(self, taken, seconds, range(taken.nodes), below)

    Prolonging.soon = everywhere  # type: ignore[method-assign]


MUTANTS: dict[str, Mutant] = {
    "kept-claims-count": Mutant(
        "the claim on a rare tick is no ttl that nodes are waited for", _kept_claims_count,
        ("calm",), (TICKS["nodes"],), seconds=8.0),
    "guarded-if-asked": Mutant(
        "a beat claims its ticks without a setting", _guarded_if_asked, ("calm",),
        (TICKS["unset"],), seconds=6.0),
    "guard-in-vain": Mutant(
        "the restart guard is waited for only if no quorum can come before", _guard_in_vain,
        ("guard",), (LATE,), seconds=10.0),
    "silent-purge": Mutant(
        "a purge frees what the messages have reserved", _silent_purge, ("purge",), (LOST, LEFT),
        seconds=25.0),
    "prolonged-in-any-order": Mutant(
        "a reservation that is freed stays freed", _prolonged_in_any_order, ("calm",), (LEFT,),
        seconds=12.0),
    "revoked-in-vain": Mutant(
        "a queued call is revoked when the one that replaces it is out", _revoked_in_vain,
        ("calm",), (LOST,), seconds=20.0),
    "again-is-begun": Mutant(
        "a message that comes again after a restart may have been replaced", _again_is_begun,
        ("restarts",), (REPLACED,), seconds=30.0),
    "errback-in-place": Mutant(
        "an error callback whose key is held is sent as a task", _errback_in_place, ("calm",),
        (ERRBACK,), seconds=12.0),
}  # fmt: skip
