"""Redlock itself: which nodes are asked what, and what the answers mean.

Nothing here reads a clock, draws a random number or touches a socket. An operation is a generator
of *rounds* (`round.py`). It yields a round; its driver writes the request to every target, hands in
the answers as they arrive (`Round.answer`, `Round.silence`), and resumes the generator with the
time once the round is decided or its patience is over. The driver over real sockets (`driver.py`)
and the simulated world of the tests run this very code. A round whose votes are counted is called a
*ballot*.

The page this implements: https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/
docs/algorithm.md lists the rules, why each is there, and which lines keep it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .claim import Claim
from .lease import FENCE_LIMIT
from .names import TRUSTED_KEY
from .rate import Rate
from .round import Round, Steps, Verb
from .values import Mark, Query, QueueEntry, Vote

__all__ = [
    "FENCE_AHEAD",
    "Released",
    "acquire",
    "extend",
    "free",
    "look",
    "mark",
    "peek",
    "queue",
    "queue_round",
    "release",
    "start",
    "undo",
]

FENCE_AHEAD = 86_400 * 1_000_000
"""Microseconds by which a fencing token may be ahead of the wall clock of its holder. A node may
answer any number, and the largest one spreads to all nodes, so a node that lies would poison them.
It is more than the error of a clock that shows local time instead of UTC. It is less than the time
for which a node remembers a number (`names.FENCE_LIFE_S`); otherwise a number that was forgotten
might be larger than the next."""


def acquire(
    claim: Claim,
    now: float,
    patience: float,
    proposal: int | None = None,
    wall: int | None = None,
) -> Steps[Round]:
    """Try once to acquire a claim (Redis page, "The Redlock algorithm").

    `claim.held` tells the outcome. The numbers in the comments are the steps of that page.

    Args:
        claim: A fresh claim, with a token that no earlier attempt used.
        now: Step 1, the time before anything is sent; seconds.
        patience: How long to wait for a quorum; small against the ttl; seconds.
        proposal: The least fencing token, from a wall clock that was read *after* `now`; None for a
            lease without a fencing token. See `_fence`.
        wall: That clock, in microseconds since 1970; None takes the proposal. The two differ where
            the proposal follows the last token: a node that lies could raise it step by step.

    Returns:
        The round that decided: the FENCE if there was one, else the ACQUIRE.
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
    # 5. Otherwise undo it everywhere, also where no answer came: the request may yet arrive. There
    # is nothing to undo where none was written: the node is down, or was silent for too long.
    suspects = [
        node
        for node in asked.targets
        if asked.votes[node] is not Vote.NO and claim.written >> node & 1
    ]
    yield from undo(claim, now, suspects)
    return ballot


def start(claim: Claim, now: float, patience: float, rate: Rate) -> Steps[Round]:
    """Try once to take one of the starts that a rate allows (`rate.py`).

    A start is a claim that nobody extends or gives back, and it must outlast the rate's window,
    counted from the moment when this returns. `claim.held` tells the outcome. If the claim would
    end too soon, because nodes are far away or we were paused, it is renewed once, for longer. Half
    of the slack is left for what comes between this and the body's first line.

    Args:
        claim: As for `acquire`, of one slot, with the rate's ttl.
        now: The time before anything is sent; seconds.
        patience: How long to wait for a quorum; seconds.
        rate: How often bodies may start.
    """
    least = rate.window + rate.slack / 2
    claim.recall = rate.longest(patience)
    asked = yield from acquire(claim, now, patience)
    if claim.granted_at is not None and claim.deadline - claim.granted_at < least:
        claim.ttl = rate.longest(patience)
        now = yield Round(Verb.EXTEND, [claim], claim.granted_at, patience)
        if not claim.held(now) or claim.deadline - now < least:
            claim.granted_at = None
            yield from undo(claim, now)
    return asked


def _fence(ballot: Round) -> bool:
    """Give the claim of a won ACQUIRE its fencing token; return whether a quorum knows it already.

    Every node that set our token has raised its own number: above all that it had before, and at
    least to our proposal. The largest of these numbers is our fencing token. Before anybody sees
    it, a quorum must know it, and must have learnt it while our token held the key there. If the
    nodes did not all answer the same number, a FENCE round tells them. Then tokens increase
    strictly with every grant: a later quorum shares a node with ours, and on that node the later
    token was set after ours was known, so it got a larger number. If the number were written where
    our token no longer holds the key, it might arrive after another holder got its own. And if the
    largest number were told to nobody, the next quorum might not know it.

    A node that forgets its locks forgets its numbers, too. If it was the only node that two quorums
    shared, the larger number comes from the later proposal, that is, from clocks that differ by
    less than the time for which such a node has no vote. Extensions do not repeat the number: that
    would help only while we hold the lock, and the clocks are needed anyway for a node that forgets
    after our release.

    A number that is more than `FENCE_AHEAD` ahead of our clock does not count. An honest node never
    goes there, and the quorums above treat a node that answers one as if it were down.
    """
    claim = ballot.claims[0]
    pairs = zip(ballot.votes, ballot.details, strict=True)
    tokens: list[int] = [detail for vote, detail in pairs if vote is Vote.YES]
    claim.fencing_token = token = max(tokens)
    return tokens.count(token) >= ballot.quorum


def queue_round(
    entry: QueueEntry, now: float, verb: Verb = Verb.ENQUEUE, nodes: Iterable[int] | None = None
) -> Round:
    """Make the round that joins the wait queues of what `entry` names, or leaves them.

    Nobody waits for the answers.

    Args:
        entry: Who waits, and for what.
        now: The time before anything is sent; seconds.
        verb: ENQUEUE, DEQUEUE or HAND_ON.
        nodes: On which nodes; None for all.
    """
    return Round(verb, [entry], now, 0.0, nodes)


def queue(
    entry: QueueEntry, now: float, verb: Verb, nodes: Iterable[int] | None = None
) -> Steps[None]:
    """Join wait queues or leave them, as a separate operation; see `queue_round`."""
    yield queue_round(entry, now, verb, nodes)


def undo(claim: Claim, now: float, nodes: Iterable[int] | None = None) -> Steps[None]:
    """Delete our token from `nodes` (None: from all), after whatever was written before."""
    claim.ended = True
    ballot = Round(Verb.UNDO, [claim], now, 0.0, nodes)
    if ballot.targets:
        yield ballot


def extend(
    claims: Sequence[Claim],
    now: float,
    patience: float,
    *,
    verb: Verb = Verb.EXTEND,
    nodes: Iterable[int] | None = None,
) -> Steps[Round]:
    """Renew leases, many in one round ("Making the algorithm more reliable").

    `confirmed()` of the result returns those that were renewed. The others are not lost yet: their
    old deadline stands, and they can be tried again. A node that no longer has our token sets it
    again. That is safe, because its answer counts only if it is read before the old deadline
    (`Claim.acknowledged`), and until then no other can have had a quorum.

    Args:
        claims: What to renew.
        now: The time before anything is sent; seconds.
        patience: How long to wait for the answers; seconds.
        verb: RENEW for a supervisor, which extends what another process holds.
        nodes: On which nodes; None for all.
    """
    ballot = Round(verb, claims, now, patience, nodes)
    yield ballot
    return ballot


class Released(NamedTuple):
    """What a release came to.

    Attributes:
        held: Whether the lease was held until then.
        called: Whether a node called a waiter.
        confirmed: Whether a quorum has answered, so that the lock keeps nobody out any more.
    """

    held: bool
    called: bool
    confirmed: bool


def release(claim: Claim, now: float, patience: float) -> Steps[Released]:
    """Give a lease back on all nodes.

    Never fails: where a node cannot be reached, the ttl ends the lock. May be run again if it was
    interrupted.
    """
    held = claim.held(now)
    claim.ended = True  # no extension may be written behind this
    ballot = Round(Verb.RELEASE, [claim], now, patience)
    yield ballot
    held = held and not ballot.denied  # denied: too few nodes still had our token
    return Released(held, "called" in ballot.details, ballot.quorum_answered)


def free(claim: Claim, now: float, patience: float) -> Steps[Round]:
    """Delete the token of another process from all nodes.

    Only call it after its holder was seen to die, or after the message that it was for has ended.
    Nodes that are away are told when they are back.
    """
    claim.ended = True
    claim.written = (1 << claim.nodes) - 1  # the other may have asked every node: all are told
    ballot = Round(Verb.RELEASE, [claim], now, patience)
    yield ballot
    return ballot


def peek(
    queries: Sequence[Query | Claim],
    now: float,
    patience: float,
    nodes: Iterable[int] | None = None,
) -> Steps[Round]:
    """Ask `nodes` (None: all) who holds some resources.

    `details`: per node None or (token, seconds left); for more than one query a list of such.
    """
    ballot = Round(Verb.PEEK, queries, now, patience, nodes)
    yield ballot
    return ballot


def look(node: int, now: float) -> Round:
    """Make the round that asks one node about itself, ahead of a request."""
    return _aside(Verb.LOOK, Query((), node + 1), node, now)


def mark(node: int, now: float, text: str) -> Round:
    """Make the round that writes into one node's data that the node has earned its vote."""
    return _aside(Verb.MARK, Mark((TRUSTED_KEY,), node + 1, text), node, now)


def _aside(verb: Verb, query: Query, node: int, now: float) -> Round:
    """Make a round for one node, in which nobody counts votes or waits for an answer.

    The others are not in it: `query` is for so many nodes that this one has its index.
    """
    round_ = Round(verb, [query], now, 0.0, (node,))
    round_.closed = True
    return round_
