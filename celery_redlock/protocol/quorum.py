"""Redlock itself: the requests of each operation, and the meaning of their answers.

Nothing here reads a clock, draws a random number or touches a socket. An operation is a generator
of *rounds* (`round.py`). It yields a round; its driver writes the request to every target, hands in
the answers as they arrive (`Round.answer`, `Round.silence`), and resumes the generator with the
time once the round is decided or its patience is over. The driver over real sockets (`driver.py`)
and the simulated world of the tests run this very code. A round whose votes are counted is called a
*ballot*.

The *Redis page*, which this module implements, is
https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/.
docs/algorithm.md lists the rules, the reason for each, and the lines that keep it.
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
"""Microseconds by which a fencing token may be ahead of the wall clock of its holder. A limit is
needed because a node may answer any number, and the largest one spreads to all nodes: one lying
node would poison them. The limit is more than the error of a clock that shows local time instead of
UTC. It is less than the time for which a node remembers a number (`names.FENCE_LIFE_S`); otherwise
a forgotten number might be larger than the next one."""


def acquire(
    claim: Claim,
    now: float,
    patience: float,
    proposal: int | None = None,
    wall: int | None = None,
) -> Steps[Round]:
    """Try once to acquire a claim (Redis page, "The Redlock algorithm").

    The outcome is in `claim.held`. The numbers in the comments are the steps of that page.

    Args:
        claim: A fresh claim, with a token that no earlier attempt used.
        now: Step 1, the time before anything is sent; seconds.
        patience: How long to wait for a quorum; small compared to the ttl; seconds.
        proposal: The least fencing token, from a wall clock that was read *after* `now`; None for a
            lease without a fencing token. See `_fence`.
        wall: The reading of that clock, in microseconds since 1970; None means the proposal. The
            two differ if the proposal follows the last token. Then the clock limits the token,
            because a lying node could raise the proposal step by step.

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
    # 3. Granted if a quorum said yes, and 4. time is left of the ttl.
    if ballot.yes >= ballot.quorum and claim.grant(now):
        return ballot
    # 5. Otherwise undo it everywhere, also on nodes that did not answer: the request may yet
    # arrive. Leave out nodes that no request was written to (they are down, or were silent for too
    # long): there is nothing to undo.
    suspects = [
        node
        for node in asked.targets
        if asked.votes[node] is not Vote.NO and claim.written >> node & 1
    ]
    yield from undo(claim, now, suspects)
    return ballot


def start(claim: Claim, now: float, patience: float, rate: Rate) -> Steps[Round]:
    """Try once to take one of the starts that a rate allows (`rate.py`).

    A start is a claim that nobody extends or releases, and it must outlast the rate's window,
    counted from the moment when this returns. The outcome is in `claim.held`. If the claim would
    end too soon, because nodes are far away or we were paused, it is renewed once, for longer. Half
    of the slack remains for the time between this and the body's first line.

    Args:
        claim: As for `acquire`, of one slot, with the rate's ttl.
        now: The time before anything is sent; seconds.
        patience: How long to wait for a quorum; seconds.
        rate: The rate at which bodies may start.
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
    """Set the fencing token of a won ACQUIRE; return True if a quorum of nodes has it already.

    Every node that set our token has raised its own number: above all numbers it had before, and at
    least to our proposal. The largest of these numbers is our fencing token. Before anybody sees
    it, a quorum must have stored it, and must have done so while our token held the key there. If
    the answers differ, and less than a quorum gave the largest number, a FENCE round writes it.
    Then tokens increase strictly with every grant: a later quorum shares a node with ours, and on
    that node the later token was set after ours was stored, so it got a larger number. If the
    number were written where our token no longer holds the key, it might arrive after another
    holder got its own. And if no FENCE wrote it, the next quorum might not include a node that has
    it.

    A node that forgets its locks forgets its numbers, too. If it was the only node that two quorums
    shared, the larger number comes from the later proposal, that is, from clocks that differ by
    less than the time for which such a node has no vote. Extensions do not repeat the number: that
    would help only while we hold the lock, and the clocks are needed anyway for a node that forgets
    after our release.

    A number that is more than `FENCE_AHEAD` ahead of our clock does not count. An honest node never
    answers such a number, and a node that does counts in these quorums as if it were down.
    """
    claim = ballot.claims[0]
    pairs = zip(ballot.votes, ballot.details, strict=True)
    tokens: list[int] = [detail for vote, detail in pairs if vote is Vote.YES]
    claim.fencing_token = token = max(tokens)
    return tokens.count(token) >= ballot.quorum


def queue_round(
    entry: QueueEntry, now: float, verb: Verb = Verb.ENQUEUE, nodes: Iterable[int] | None = None
) -> Round:
    """Make the round that joins or leaves the wait queues of the resources of `entry`.

    Nobody waits for the answers.

    Args:
        entry: The waiter, and the resources that it waits for.
        now: The time before anything is sent; seconds.
        verb: ENQUEUE, DEQUEUE or HAND_ON.
        nodes: The nodes to ask; None for all.
    """
    return Round(verb, [entry], now, 0.0, nodes)


def queue(
    entry: QueueEntry, now: float, verb: Verb, nodes: Iterable[int] | None = None
) -> Steps[None]:
    """Join wait queues or leave them, as a separate operation; see `queue_round`."""
    yield queue_round(entry, now, verb, nodes)


def undo(claim: Claim, now: float, nodes: Iterable[int] | None = None) -> Steps[None]:
    """Delete our token from `nodes` (None: from all), behind all earlier requests."""
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

    `confirmed()` of the result returns the claims that were renewed. The others are not lost yet:
    their old deadline stands, and they can be tried again. A node that no longer has our token sets
    it again. That is safe, because its answer counts only if it is read before the old deadline
    (`Claim.acknowledged`), and until then no other can have had a quorum.

    Args:
        claims: The claims to renew.
        now: The time before anything is sent; seconds.
        patience: How long to wait for the answers; seconds.
        verb: EXTEND for the holder; RENEW for a supervisor, which extends leases of another
            process.
        nodes: The nodes to ask; None for all.
    """
    ballot = Round(verb, claims, now, patience, nodes)
    yield ballot
    return ballot


class Released(NamedTuple):
    """The result of a release.

    Attributes:
        held: True if the lease was held until then.
        notified: True if a node has notified a waiter.
        confirmed: True if a quorum has answered, so that the lock keeps nobody out any more.
    """

    held: bool
    notified: bool
    confirmed: bool


def release(claim: Claim, now: float, patience: float) -> Steps[Released]:
    """Release a lease on all nodes.

    It never fails: on a node that cannot be reached, the ttl ends the lock. It may be run again if
    it was interrupted.
    """
    held = claim.held(now)
    claim.ended = True  # no extension may be written behind this
    ballot = Round(Verb.RELEASE, [claim], now, patience)
    yield ballot
    held = held and not ballot.denied  # denied: too few nodes still had our token
    return Released(held, "called" in ballot.details, ballot.quorum_answered)


def free(claim: Claim, now: float, patience: float) -> Steps[Round]:
    """Delete the token of another process from all nodes.

    Call it only after the holder was seen to die, or after the message has ended for which the
    token was set. Nodes that are down get the request when they are back.
    """
    claim.ended = True
    claim.written = (1 << claim.nodes) - 1  # the other process may have asked every node
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

    In the `details` of the round each node has None or (token, seconds left); with more than one
    query it has a list of these.
    """
    ballot = Round(Verb.PEEK, queries, now, patience, nodes)
    yield ballot
    return ballot


def look(node: int, now: float) -> Round:
    """Make the round that asks one node for its role, ahead of another request."""
    return _aside(Verb.LOOK, Query((), node + 1), node, now)


def mark(node: int, now: float, text: str) -> Round:
    """Make the round that writes into one node's data that the node has earned its vote."""
    return _aside(Verb.MARK, Mark((TRUSTED_KEY,), node + 1, text), node, now)


def _aside(verb: Verb, query: Query, node: int, now: float) -> Round:
    """Make a round for one node, in which nobody counts votes or waits for an answer.

    Other nodes have no part in it, so `query.nodes` need only be large enough for the index `node`.
    """
    round_ = Round(verb, [query], now, 0.0, (node,))
    round_.closed = True
    return round_
