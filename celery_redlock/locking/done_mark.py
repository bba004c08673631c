"""The mark that a finished task leaves with its release, so that a second delivery finds it."""

from __future__ import annotations

from ..protocol import outcome, quorum
from ..protocol.lease import NEVER
from ..protocol.names import MAX_SLOTS, slots_of
from ..protocol.replies import DONE
from ..protocol.values import Owner, Query, Vote
from ..runtime.clock import monotonic
from .held import HeldLease

__all__ = ["look_up", "mark_done"]


def mark_done(held: HeldLease) -> None:
    """Have the release of a lock leave its mark: the work under it is done."""
    if held.claim is not None:
        held.claim.mark = held.mark


def look_up(held: HeldLease) -> tuple[bool, list[Owner]]:
    """Ask whether an earlier holder has left the lock's mark, and who else holds the lock.

    One node that knows the mark is enough, and if there is a mark, one of those that granted our
    claim knows it. The earlier holder had a quorum of nodes, and so has our claim: they share a
    node, and that one was free for us only after it had been marked, in one step with the release.
    So if all nodes that granted our claim say no, there was no earlier holder; or its work was not
    done, or it did not release the lock itself.

    Raises:
        QuorumUnavailable: None knows it, and one that granted our claim does not answer.
    """
    if held.mark is None:
        return False, []
    client, claim, limit = held.redlock.client, held.claim, held.request.limit
    mark, nodes = held.mark[0], len(client.addresses)
    granted = [NEVER] * nodes
    # All slots: its limit may have been larger when the first delivery took one.
    every = slots_of(held.resources, 1 if limit == 1 else MAX_SLOTS)
    names = [slot for slots in every for slot in slots]
    if held.request.rate is not None:  # starts outlast their bodies, and keep no other out
        names = []
    if claim is not None and claim.held(monotonic()):
        granted = claim.expiries
        names = [name for name in names if name not in claim.resources]
    asked = [Query((name,), nodes) for name in (mark, *names)]
    ballot = client.driver.run(lambda now: quorum.peek(asked, now, client.node_timeout))
    marked = DONE in outcome.tokens(ballot, 0)
    for vote, expiry in zip(ballot.votes, granted, strict=True):
        if not marked and expiry != NEVER and vote is not Vote.YES:
            told = "a node that granted the lock does not tell whether the task is done"
            raise client.refused(outcome.unavailable(mark, ballot, client.nodes, told))
    others = {token for number in range(len(names)) for token in outcome.tokens(ballot, number + 1)}
    return marked, [owner for token in others if (owner := Owner.of(token)) is not None]
