"""The mark that a finished task leaves with its release, so that a second delivery finds it."""

from __future__ import annotations

from collections.abc import Collection

from ..protocol import outcome, quorum
from ..protocol.names import MAX_SLOTS, slots_of
from ..protocol.replies import DONE
from ..protocol.round import Round
from ..protocol.values import Owner, Query
from ..runtime.clock import monotonic
from .held import HeldLease

__all__ = ["judge", "look_up", "mark_done"]


def mark_done(held: HeldLease) -> None:
    """Mark the work under a lock as done: the release of the lock will leave its mark."""
    if held.claim is not None:
        held.claim.mark = held.mark


def look_up(held: HeldLease) -> tuple[bool, bool]:
    """Ask the nodes if an earlier delivery of the message is done, and if one is at work.

    Raises:
        QuorumUnavailable: Neither is certain, and without the answer the body would begin now.
    """
    if held.mark is None:
        return False, False
    client, claim, limit = held.redlock.client, held.claim, held.request.limit
    mark, rated = held.mark[0], held.request.rate is not None
    # All slots: its limit may have been larger when the first delivery took one.
    every = slots_of(held.resources, 1 if limit == 1 else MAX_SLOTS)
    # Not for a rate: a start lasts longer than its body, and keeps no other delivery out.
    names = [] if rated else [slot for slots in every for slot in slots]
    ours = claim.resources if claim is not None and claim.held(monotonic()) else ()
    asked = [Query((name,), len(client.addresses)) for name in (mark, *names)]
    ballot = client.driver.run(lambda now: quorum.peek(asked, now, client.node_timeout))
    done, at_work = judge(ballot, held.request.owner or client.owner, ours)
    if done is None and not at_work and (ours or rated):
        reason = "too few nodes answered whether the task is done"
        raise client.refused(outcome.unavailable(mark, ballot, client.nodes, reason))
    return bool(done), at_work


def judge(ballot: Round, owner: Owner, ours: Collection[str] = ()) -> tuple[bool | None, bool]:
    """Return if an earlier delivery is done (None if that is uncertain), and if one is at work.

    A quorum of nodes must have the mark: no single node may keep a message from being run. A node
    gets the mark at the moment at which its lock becomes free. So a node on which an earlier
    delivery still has the lock may be about to get the mark, like a node that does not answer.
    Pure.

    Args:
        ballot: A PEEK of the mark, and of the slots in which other deliveries count.
        owner: The delivery that asks.
        ours: The slots that this delivery holds itself.
    """

    def is_earlier(token: str) -> bool:
        return owner.is_copy_of(Owner.of(token))

    numbers = range(len(ballot.claims))
    marked = unmarked = 0
    for mark, *slots in zip(*[outcome.seen(ballot, number) for number in numbers], strict=True):
        if mark is not None and mark[0] == DONE:
            marked += 1
        elif not any(held is not None and is_earlier(held[0]) for held in slots):
            unmarked += 1
    others = len(ballot.votes) - ballot.quorum
    done = True if marked >= ballot.quorum else False if unmarked > others else None
    slots_of_others = [n for n in numbers[1:] if ballot.claims[n].resources[0] not in ours]
    found = [token for number in slots_of_others for token in outcome.may_hold(ballot, number)]
    return done, any(map(is_earlier, found))
