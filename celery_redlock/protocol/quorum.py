"""Redlock itself: who is asked what, and what the answers mean.

Nothing here reads a clock, draws a random number or touches a socket. An operation is a generator
of *rounds*. It yields a round; its driver writes the request to every target, hands in the answers
as they arrive (`Round.answer`, `Round.silence`) and resumes the generator with the time once the
round is decided or its patience is over. The driver over real sockets (`driver.py`) and the
simulated world of the tests run this very code.

The page this implements: https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .claim import Claim
from .lease import FENCE_LIMIT
from .round import (
    Round,
    Steps,
    Verb,
)
from .values import Vote

__all__ = [
    "FENCE_AHEAD",
    "acquire",
    "extend",
    "free",
    "leave",
    "line_up",
    "look",
    "peek",
    "release",
    "survey",
    "undo",
]

FENCE_AHEAD = 86_400 * 1_000_000
"""Microseconds by which a fencing token may be ahead of the wall clock of who is granted it. A node
may answer any number, and the largest becomes known to all: one that lies would poison them. More
than a clock that shows local time for UTC is off; and less than a node remembers a number
(`commands.FENCE_LIFE`), or one that is forgotten might still be larger than the next."""


def look(node: int, now: float) -> Round:
    """What a node is asked about itself, ahead of a request."""
    round_ = Round(Verb.LOOK, [Claim("", "", 0.0, node + 1)], now, 0.0, (node,))
    round_.closed = True
    return round_


def acquire(
    claim: Claim,
    now: float,
    patience: float,
    proposal: int | None = None,
    wall: int | None = None,
) -> Steps[Round]:
    """Try once to acquire (Redis page, "The Redlock algorithm"). `claim.held` tells the outcome.

    Args:
        claim: A fresh claim, with a token that no earlier attempt used.
        now: Step 1, the time before anything is sent; seconds.
        patience: How long to wait for a quorum; small against the ttl; seconds.
        proposal: What its fencing token is to be at least, by a wall clock that was read *after*
            `now`; None for a lease without one. See `_fence`.
        wall: That clock, in microseconds since 1970; the proposal, if it is not given. Not the
            proposal itself, which follows the last token: a liar would raise it step by step.

    Returns:
        The round that decided: a FENCE if it came to one, else the ACQUIRE.
    """
    claim.proposal = proposal
    if proposal is not None:
        wall = proposal if wall is None else wall
        claim.ceiling = min(max(proposal, wall + FENCE_AHEAD), FENCE_LIMIT)
    # 2. Ask all nodes, at once, with the same key and token.
    asked = ballot = Round(Verb.ACQUIRE, [claim], now, patience)
    now = yield asked
    if proposal is not None and asked.yes >= asked.quorum and not _fence(asked):
        ballot = Round(Verb.FENCE, [claim], now, patience)
        now = yield ballot
    # 3. Granted if a quorum said yes, and 4. time is left of it.
    if ballot.yes >= ballot.quorum and claim.grant(now):
        return ballot
    # 5. Otherwise undo it everywhere, also where no answer came: the request may yet arrive.
    suspects = [node for node in asked.targets if asked.votes[node] is not Vote.NO]
    yield from undo(claim, now, suspects)
    return ballot


def _fence(ballot: Round) -> bool:
    """Give the claim of a won ACQUIRE its fencing token; whether a quorum knows it already.

    Every node that set our token has raised its own number, above all it ever had and to our
    proposal at least. The largest is ours. Before anybody sees it a quorum must know it, and have
    learnt it while our token held the key there; if they did not all answer the same, a FENCE round
    tells them. Then tokens strictly increase, grant by grant: any later quorum shares a node with
    this one, on which the later token was set after ours was told, and got a larger number. Written
    where our token no longer holds the key, the number might come after another's was handed out;
    and the largest of mere counters, told to nobody, is one that the next quorum may not know.

    A node that forgets forgets its numbers as well. Then, if it was the only one that two quorums
    shared, the larger number comes from the later proposal: from clocks that agree better than the
    time such a node has no vote. Extensions tell nobody: setting our number again on a node that
    has forgotten our key would help only while we hold it, and the clocks are needed all the same
    for one that forgets after our release.

    No node has a say in this that is more than `FENCE_AHEAD` of our clock: an honest one refuses to
    go there, and raises nothing; what another answers is no answer. So it is with the quorums above
    as if these nodes were down.
    """
    claim = ballot.claims[0]
    pairs = zip(ballot.votes, ballot.details, strict=True)
    tokens: list[int] = [detail for vote, detail in pairs if vote is Vote.YES]
    claim.fencing_token = token = max(tokens)
    return tokens.count(token) >= ballot.quorum


def line_up(
    place: Claim, now: float, verb: Verb = Verb.ENQUEUE, nodes: Iterable[int] | None = None
) -> Round:
    """Stand in line for what `place` names, or leave it. Nobody waits for the answers.

    Args:
        place: Whose token tells the nodes whom to call, and since when it waits.
        now: The time before anything is sent; seconds.
        verb: QUEUE, LEAVE or PASS.
        nodes: Whom to tell; all, if None.
    """
    return Round(verb, [place], now, 0.0, nodes)


def leave(place: Claim, now: float, verb: Verb, nodes: Iterable[int] | None = None) -> Steps[None]:
    """The same by itself."""
    yield line_up(place, now, verb, nodes)


def undo(claim: Claim, now: float, nodes: Iterable[int] | None = None) -> Steps[None]:
    """Delete our token from `nodes` (all, if None), behind whatever was written before."""
    claim.ended = True
    ballot = Round(Verb.UNDO, [claim], now, 0.0, nodes)
    if ballot.targets:
        yield ballot


def extend(
    claims: Sequence[Claim], now: float, patience: float, *, verb: Verb = Verb.EXTEND
) -> Steps[Round]:
    """Renew leases, many in one round ("Making the algorithm more reliable").

    `confirmed()` of the result are those renewed. The others need not be lost: their old deadline
    stands, and trying again is fine. A node that no longer has our token sets it again. That is
    safe, since its answer counts only if it is read before the old deadline (`Claim.acknowledged`):
    until then no other can have had a quorum.

    Args:
        claims: What to renew.
        now: The time before anything is sent; seconds.
        patience: How long to wait for the answers; seconds.
        verb: RENEW for a keeper, who extends what another process holds.
    """
    ballot = Round(verb, claims, now, patience)
    yield ballot
    return ballot


def release(claim: Claim, now: float, patience: float) -> Steps[bool]:
    """Give a lease back, everywhere. Whether it was held to this very end.

    Never fails: what cannot be told to a node is told by its ttl. May be run again if interrupted.
    """
    held = claim.held(now)
    claim.ended = True  # no extension may be written behind this
    ballot = Round(Verb.RELEASE, [claim], now, patience)
    yield ballot
    claim.called = ballot.details.count("called")
    return held and ballot.no <= len(ballot.votes) - ballot.quorum


def free(claim: Claim, now: float, patience: float) -> Steps[Round]:
    """Delete the token of another process, everywhere.

    Only for whoever has seen its holder die, or the message end that it was for. Nodes that are
    away are told when they are back.
    """
    claim.ended = True
    claim.written = [True] * len(claim.written)  # by the other; so it is owed
    ballot = Round(Verb.RELEASE, [claim], now, patience)
    yield ballot
    return ballot


def peek(claim: Claim, now: float, patience: float) -> Steps[Round]:
    """Ask all nodes who holds the resource. `details`: per node None or (token, seconds left)."""
    return survey([claim], now, patience)


def survey(claims: Sequence[Claim], now: float, patience: float) -> Steps[Round]:
    """Ask that for many. `details`: per node a list of such; for one claim as from `peek`."""
    ballot = Round(Verb.PEEK, claims, now, patience)
    yield ballot
    return ballot
