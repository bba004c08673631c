"""Turn the votes of a round into an error that explains why an attempt failed.

The reason is either another holder or a missing quorum; never report one as the other. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from .claim import Claim
from .errors import NotAcquired, QuorumUnavailable, ResourceHeld
from .lease import NEVER
from .names import grouped
from .rate import Rate
from .replies import FOREIGN
from .restart_guard import Doubt
from .round import Held, Round, Verb
from .texts import are_needed, of_nodes
from .values import NOT_WAITED_FOR, Holder, NodeVote, Owner, Vote, is_shared, token_digest

__all__ = [
    "add_readers",
    "all_held",
    "free",
    "free_in",
    "holder",
    "if_permanent",
    "last_votes",
    "may_hold",
    "refusal",
    "room_in",
    "seen",
    "settled",
    "silent",
    "tokens",
    "unavailable",
]


def refusal(resource: str, ballot: Round, nodes: Sequence[str], ttl: float) -> NotAcquired:
    """Return the error for an attempt that was not granted, from the round that decided it."""
    if ballot.verb is Verb.FENCE and ballot.yes < ballot.quorum:
        told = f"{of_nodes(ballot.yes, len(nodes))} confirmed its fencing token in time"
        return unavailable(resource, ballot, nodes, told)
    if not ballot.quorum_answered:
        return unavailable(resource, ballot, nodes)
    if ballot.yes >= ballot.quorum:
        late = f"a quorum said yes, but too late for a ttl of {ttl:g} s"
        return unavailable(resource, ballot, nodes, late)
    refusing = _details(ballot, Vote.NO)
    names = [detail.name for detail in refusing if isinstance(detail, Held)]
    several = len(ballot.claims[0].resources) > 1 and bool(names)
    name = Counter(names).most_common(1)[0][0] if several else resource
    who = holder(name, refusing, ballot.quorum)
    return ResourceHeld(
        f"{resource}: {name} is held by {who}" if several else f"{resource} is held by {who}",
        resource=resource,
        votes=_votes(ballot, nodes),
        holder=who,
        conflicting=sorted(set(names)),
    )


def unavailable(
    resource: str, ballot: Round, nodes: Sequence[str], what: str = ""
) -> QuorumUnavailable:
    """Return the error for a round that failed without another holder; `what` is the reason.

    Without `what` the reason is that too few nodes voted.
    """
    what = what or f"{of_nodes(ballot.silent, len(nodes))} did not vote"
    votes = _votes(ballot, nodes)
    return QuorumUnavailable(
        f"{resource}: {what}; {are_needed(ballot.quorum)}: " + ", ".join(map(str, votes)),
        resource=resource,
        votes=votes,
        retry_after=_retry_after(ballot),
    )


def _retry_after(ballot: Round) -> float | None:
    """Return the seconds until a quorum is possible; None if it is possible at any moment.

    Only nodes that were started a short time ago are sure to have no vote. Any other silent node
    may answer the next time.
    """
    left = sorted(detail.left for detail in ballot.details if isinstance(detail, Doubt))
    lacking = ballot.quorum - (len(ballot.details) - len(left))
    return left[lacking - 1] if lacking > 0 else None


def holder(
    resource: str, tokens: Sequence[str], quorum: int, expires_in: float | None = None
) -> Holder:
    """Return the holder whose token most nodes hold; `tokens` has one per node that holds any."""
    token, count = Counter(tokens).most_common(1)[0]
    if is_shared(token):  # all readers count as one holder
        count = sum(map(is_shared, tokens))
    return Holder(resource, Owner.of(token), count, quorum, expires_in, token_digest(token))


def add_readers(ballot: Round, look: Round) -> bool:
    """Put the tokens of readers into a writer's ballot, whose answers do not contain them.

    Args:
        ballot: The writer's ACQUIRE. A node where readers are answers only that a key is there.
        look: A PEEK after it.

    Returns:
        True if any token was put in.
    """
    found = False
    for node, held in enumerate(look.details):
        if ballot.details[node] == FOREIGN and isinstance(held, tuple) and is_shared(held[0]):
            ballot.details[node] = held[0]
            found = True
    return found


def seen(ballot: Round, query: int = 0) -> list[tuple[str, float] | None]:
    """Return the (token, seconds left) of a query, or None, on each node that answered a PEEK."""
    details = _details(ballot, Vote.YES)
    return [detail[query] for detail in details] if len(ballot.claims) > 1 else details


def tokens(ballot: Round, query: int = 0) -> list[str]:
    """Return the tokens that the nodes of `seen` hold for a query, one per node that holds any."""
    return [held[0] for held in seen(ballot, query) if held is not None]


def may_hold(ballot: Round, query: int = 0) -> list[str]:
    """Return the tokens that a quorum of nodes may hold for a query of a PEEK.

    Each node that has not answered is counted as holding the token. A token that no node has
    reported is not returned.
    """
    silent = len(ballot.votes) - ballot.yes
    counts = Counter(tokens(ballot, query)).items()
    return [token for token, count in counts if count + silent >= ballot.quorum]


def _details(ballot: Round, wanted: Vote) -> list[Any]:
    pairs = zip(ballot.votes, ballot.details, strict=True)
    return [detail for vote, detail in pairs if vote is wanted]


def free_in(ballot: Round, query: int = 0) -> float:
    """Return the seconds until a quorum is free, without extensions, from a PEEK's answers."""
    left = [0.0 if held is None else held[1] for held in seen(ballot, query)]
    return float(sorted(left)[ballot.quorum - 1])


def room_in(ballot: Round, every: Iterable[Sequence[str]]) -> float:
    """Return the seconds until each of some names has a free slot, from a PEEK over all of them."""
    queries = grouped(range(len(ballot.claims)), every)
    return max(min(free_in(ballot, number) for number in numbers) for numbers in queries)


def free(ballot: Round) -> list[bool]:
    """Return, for each query of a PEEK, True if it may be granted: a quorum reports no holder."""
    numbers = range(len(ballot.claims))
    return [seen(ballot, n).count(None) >= ballot.quorum for n in numbers]


def settled(ballot: Round, queries: Iterable[int]) -> bool:
    """Return True if for each of some queries of a PEEK a quorum holds one token.

    If not, several attempts may be under way at once, and the name may be free in a moment,
    whatever the ttl.
    """
    quorum = ballot.quorum
    return all(max(Counter(tokens(ballot, n)).values(), default=0) >= quorum for n in queries)


def all_held(
    resource: str,
    full: Mapping[str, tuple[int, Sequence[int]]],
    ballot: Round,
    nodes: Sequence[str],
    lost: Holder | None,
    rate: Rate | None = None,
) -> ResourceHeld:
    """Return the error for a request that found no free slot of some of its names.

    Args:
        resource: All requested names as one text, for people.
        full: The names without a free slot, each with its limit and the indexes of its queries.
        ballot: A PEEK over all slots.
        nodes: The nodes' addresses.
        lost: The holder of a slot that was free in this PEEK; None if there was no such slot.
        rate: The rate, if the slots are its starts.
    """
    name, (many, queries) = next(iter(full.items()))
    several = name != resource and rate is None

    def readiness(slot: int) -> tuple[bool, float]:
        """Return a sort key: slots in doubt come first, because they may be free soon.

        A slot is in doubt while no token has a quorum. Then the slots follow by the seconds left.
        """
        counts = Counter(tokens(ballot, slot)).values()
        return max(counts) >= ballot.quorum, free_in(ballot, slot)

    who = lost
    if who is None:
        first = min([n for n in queries if tokens(ballot, n)], key=readiness)
        shown_as = name if rate is None else resource
        who = holder(shown_as, tokens(ballot, first), ballot.quorum, free_in(ballot, first))
    said = f"has all of its {many} holders; one is {who}"
    if rate is not None:
        said = (
            f"has its {rate.starts} starts of the last {rate.window:g} s ({rate.text}); the next in"
            f" {min(free_in(ballot, n) for n in queries):.1f} s"
        )
    if several:
        said = f"{name} {said}"
    return ResourceHeld(
        f"{resource}: {said}" if several else f"{resource} {said}",
        resource=resource,
        votes=[
            NodeVote(name, vote if vote is Vote.SILENT else Vote.NO)
            for name, vote in zip(nodes, ballot.votes, strict=True)
            if vote is not None
        ],
        holder=who,
        conflicting=sorted(full) if several else (),
    )


def if_permanent(
    error: NotAcquired, ballot: Round, nodes: Sequence[str], keys: Sequence[str]
) -> NotAcquired:
    """Return an error that explains it if another program's key has no ttl; else return `error`.

    Args:
        error: The error of the ACQUIRE that was not granted.
        ballot: A PEEK after it.
        nodes: The nodes' addresses.
        keys: The requested names with their prefix.
    """
    found = {
        name: detail[0]
        for name, detail in zip(nodes, ballot.details, strict=True)
        if isinstance(detail, tuple) and detail[1] == math.inf
    }
    if not error.resource or len(found) <= len(nodes) - ballot.quorum:
        return error
    who = holder(error.resource, list(found.values()), ballot.quorum, math.inf)
    key = ("the key " if len(keys) == 1 else "one of the keys ") + ", ".join(keys)
    return ResourceHeld(
        f"{error.resource} is held forever, by {who}: {key} on {', '.join(found)} has no ttl, so"
        " it is no lock of ours. Nobody will free it: delete it if its owner does not need it,"
        " else choose another redlock_prefix",
        resource=error.resource,
        votes=error.votes,
        holder=who,
    )


def last_votes(claim: Claim, nodes: Sequence[str]) -> list[NodeVote]:
    """Return the vote of each node on the last request for `claim`."""
    return [
        NodeVote(name, Vote.SILENT, claim.silent[index])
        if index in claim.silent
        else NodeVote(name, Vote.NO if claim.expiries[index] == NEVER else Vote.YES)
        for index, name in enumerate(nodes)
    ]


def silent(ballot: Round) -> Mapping[int, str]:
    """Return the nodes that have not answered in a round, each with the reason."""
    answers = enumerate(zip(ballot.votes, ballot.details, strict=True))
    whys = [
        (index, NOT_WAITED_FOR if vote is None else str(detail))
        for index, (vote, detail) in answers
        if vote is None or vote is Vote.SILENT
    ]
    return _shared(tuple(whys))


@lru_cache
def _shared(whys: tuple[tuple[int, str], ...]) -> Mapping[int, str]:
    """Return the same object for the same reasons, because each of many leases keeps one."""
    return MappingProxyType(dict(whys))


def _votes(ballot: Round, nodes: Sequence[str]) -> list[NodeVote]:
    votes = []
    for name, vote, detail in zip(nodes, ballot.votes, ballot.details, strict=True):
        if vote is None:
            votes.append(NodeVote(name, Vote.SILENT, NOT_WAITED_FOR))
        elif vote is Vote.NO and isinstance(detail, str):
            held_by = Owner.of(detail) or "another program"
            votes.append(NodeVote(name, vote, f"held by {held_by}"))
        else:
            votes.append(NodeVote(name, vote, str(detail) if isinstance(detail, str) else ""))
    return votes
