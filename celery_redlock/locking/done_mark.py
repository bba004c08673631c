"""The mark that a finished task leaves with its release, so that a second delivery finds it."""

from __future__ import annotations

from ..protocol.names import slots
from ..protocol.values import Owner
from ..runtime.clock import monotonic
from .held import HeldLease

__all__ = ["look_up", "mark_done"]


def mark_done(held: HeldLease) -> None:
    """The work under a lock is done: leave its mark, when it is given back."""
    if held.claim is not None:
        held.claim.mark = held.mark


def look_up(held: HeldLease) -> tuple[bool, list[Owner]]:
    """Whether a lock's mark is there already, of one who held it before; and who else holds it.

    Raises:
        QuorumUnavailable: That cannot be told.
    """
    if held.mark is None:
        return False, []
    claim = held.claim
    limit = held.request.limit
    names = slots(held.resources[0], limit) if limit > 1 else held.resources
    if claim is None or not claim.held(monotonic()):
        claim = None
    else:
        names = [name for name in names if name not in claim.resources]
    marked, tokens = held.redlock.client.look_up(held.mark[0], claim, names)
    return marked, [owner for token in tokens if (owner := Owner.of(token)) is not None]
