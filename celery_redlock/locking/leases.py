"""Leases by hand: operations of `Redlock` and `AsyncRedlock` on leases that the user extends."""

from __future__ import annotations

from ..config.options import check_option
from ..events import emit
from ..protocol import outcome, quorum
from ..protocol.claim import Claim
from ..protocol.errors import ConfigurationError, LeaseLost, QuorumUnavailable, ResourceHeld
from ..protocol.lease import Lease
from ..protocol.names import checked_names
from ..protocol.texts import of_nodes
from ..protocol.values import Holder
from ..runtime.clock import monotonic
from .client import LockClient
from .request import LockRequest

__all__ = ["acquire", "agreed", "extend", "holders", "release"]


async def acquire(client: LockClient, request: LockRequest) -> Lease:
    """Acquire a lease; see `Redlock.acquire`."""
    last: list[Claim] = []

    def adopt(claim: Claim) -> None:
        last[:] = [claim]

    try:
        return (await client.acquire(request, adopt)).lease(monotonic)
    except BaseException:
        # A time limit may strike in here: release what was written. If a quorum had granted it,
        # waiters have seen us hold it, and wait for our release to notify them.
        for claim in last:
            if not claim.ended:
                await client.release(claim)
        raise


async def extend(client: LockClient, lease: Lease) -> Lease:
    """Renew a lease for its ttl from now; see `Redlock.extend`."""
    claim = _claim_of(client, lease)
    if claim is None or not claim.held(monotonic()):
        reason = claim.lost if claim is not None else None
        raise LeaseLost(
            f"{lease.resource}: the lease to be extended is over ({reason or 'released'});"
            " acquire it again",
            resource=lease.resource,
            lease=lease,
            reason=reason or "expired",
        )
    patience = client.patience(claim.ttl)
    ballot = await client.ask(lambda now: quorum.extend([claim], now, patience))
    if ballot.confirmed() and claim.held(monotonic()):
        renewed = claim.lease(monotonic)
        emit("extended", renewed)
        return renewed
    if claim.held(monotonic()):
        said = f"{of_nodes(ballot.yes, len(client.nodes))} confirmed the extension in time"
        raise client.refused(outcome.unavailable(lease.resource, ballot, client.nodes, said))
    raise LeaseLost(
        f"{lease.resource}: a quorum of nodes no longer holds the lease ({claim.lost})",
        resource=lease.resource,
        lease=lease,
        reason=claim.lost or "expired",
    )


async def release(client: LockClient, lease: Lease) -> bool:
    """Release a lease; return True if it was held until now."""
    claim = _claim_of(client, lease)
    return claim is not None and await client.release(claim)


async def holders(
    client: LockClient, resource: str, limit: int, timeout: float | None
) -> list[Holder]:
    """Ask the nodes who holds a resource; one holder for each slot in use."""
    check_option("limit", limit)
    if not isinstance(resource, str) or not isinstance(limit, int):
        raise ConfigurationError(
            f"holders() takes one resource and one limit, not {resource!r} and {limit!r}: call it"
            " for each of several, as in holders('a', limit=2)"
        )
    try:
        ballot = await client.peek(checked_names(resource), limit, timeout)
    except QuorumUnavailable as error:
        raise client.refused(error) from None
    return [
        outcome.holder(resource, tokens, ballot.quorum, outcome.free_in(ballot, slot))
        for slot in range(limit)
        if (tokens := outcome.tokens(ballot, slot))
    ]


async def agreed(client: LockClient, refusal: ResourceHeld) -> Holder | None:
    """Return the holder behind a refusal; ask all nodes if those that decided it do not agree.

    A quorum was enough to refuse, and one of these nodes may lie, or have a different key.
    """
    known = refusal.holder
    if known is None or known.nodes >= known.quorum or refusal.permanent:
        return known
    try:
        ballot = await client.peek((known.resource,))
    except QuorumUnavailable:
        return known
    found = outcome.tokens(ballot)
    return outcome.holder(known.resource, found, ballot.quorum) if found else known


def _claim_of(client: LockClient, lease: Lease) -> Claim | None:
    if not isinstance(lease, Lease):
        raise ConfigurationError(f"not a Lease, as acquire() returns one: {lease!r}")
    return client.claims.get(lease.token)
