"""A round: one request to all nodes, and the outcome of their answers."""

from __future__ import annotations

import enum
from collections.abc import Generator, Iterable, Sequence
from typing import Any, TypeVar

from .claim import Claim
from .values import Vote, quorum_of

__all__ = ["EXTENDING", "LINING", "VOTING", "Held", "Round", "Steps", "Verb", "wrote"]

T = TypeVar("T")
Steps = Generator["Round", float, T]


class Verb(enum.Enum):
    """What a node can be asked."""

    ACQUIRE = "acquire"
    """Set our token where no other is set (Redis page, step 2)."""
    EXTEND = "extend"
    """Renew our token where it is set; set it again where none is."""
    RENEW = "renew"
    """Renew our token where it is set, and never set it again. For a supervisor: its connection is
    not the holder's, so its request may arrive after the release. It waits for all answers, because
    it must at least learn in time where the token is missing."""
    RELEASE = "release"
    """Delete our token, and no other, and wake the first waiter."""
    UNDO = "undo"
    """Delete our token, and no other, and wake nobody: a failed attempt frees nothing."""
    FENCE = "fence"
    """Raise the fencing token to ours, only where our token still holds the key (`_fence`)."""
    PEEK = "peek"
    """Tell who holds it, and for how long. Of several names: the first holder, and how long until
    all of them are free."""
    ENQUEUE = "queue"
    """Join its wait queue, with the time since when we wait: a release wakes the first."""
    DEQUEUE = "leave"
    """Leave the queue because we hold the lock."""
    HAND_ON = "pass"
    """Leave the queue without the lock; if a release woke us, or nobody holds it, wake the next."""
    LOOK = "tell its role"
    """Tell whether it still is a master. Only the request behind it waits for the answer."""


class Held(str):
    """The token of another holder of one of several names, with that name.

    Attributes:
        name: The first name under which the token was found.
    """

    name: str

    def __new__(cls, token: str, name: str) -> Held:
        """Make a token that remembers a name."""
        held = super().__new__(cls, token)
        held.name = name
        return held


EXTENDING = (Verb.EXTEND, Verb.RENEW)
LINING = (Verb.ENQUEUE, Verb.DEQUEUE, Verb.HAND_ON)
VOTING = (Verb.ACQUIRE, Verb.FENCE, Verb.PEEK)
"""Requests for which "it is free" does harm if the node has forgotten a lock."""

# How a node answers these: one character per claim.
RENEWED, SET_AGAIN, REFUSED = "1", "2", "0"


class Round:
    """One request to many nodes, and their votes.

    Attributes:
        verb: What is asked.
        claims: What it is about: claims, or a `QueueEntry` where it is of the wait queue, or each
            `Query` of a PEEK. Only extensions and a PEEK carry more than one.
        sent: The time before the first byte was sent, from which leases are counted; seconds.
        until: When nodes that have not answered count as silent; seconds.
        targets: Node indexes that are asked.
        votes: Per node, its vote so far, None while it is open.
        details: Per node: the holder's token (ACQUIRE, NO), its fencing token (ACQUIRE, YES), why
            it is silent, what it holds (PEEK; of many claims a list).
        closed: Whether nobody waits for it any more. Late answers still count for the lease.
        amnesiac: Nodes that lost a token before its time.
    """

    __slots__ = (
        "_confirmed",
        "_full",
        "_missing",
        "amnesiac",
        "claims",
        "closed",
        "details",
        "no",
        "quorum",
        "sent",
        "silent",
        "targets",
        "until",
        "verb",
        "votes",
        "yes",
    )

    def __init__(
        self,
        verb: Verb,
        claims: Sequence[Any],
        now: float,
        patience: float,
        targets: Iterable[int] | None = None,
    ) -> None:
        count = claims[0].nodes
        self.verb = verb
        self.claims: Sequence[Any] = claims
        self.sent = now
        self.until = now + patience
        self.targets = range(count) if targets is None else tuple(targets)
        self.votes: list[Vote | None] = [None] * count
        self.details: list[Any] = [None] * count
        self.quorum = quorum_of(count)
        self.yes = self.no = self.silent = 0
        self.closed = False
        self.amnesiac: list[int] = []
        self._confirmed = [0] * len(claims)
        self._full = 0
        self._missing: list[tuple[Claim, int, float]] = []

    def begin(self) -> None:
        """Drop the claims that have ended. Called by the driver right before it writes.

        An extension that is written after the release of its lease would set the token again.
        """
        if self.verb in EXTENDING:
            self.claims = [claim for claim in self.claims if not claim.ended]
            self._confirmed = [0] * len(self.claims)
            if not self.claims:
                self.targets = ()

    def answer(self, node: int, reply: Any, now: float, doubt: str = "") -> None:
        """Count the answer of a node.

        Args:
            node: Its index.
            reply: What `commands.decode` made of the answer.
            now: When it was read; seconds.
            doubt: Why the node may have forgotten locks, or empty. "It is free" then counts as
                silence. So does "it is held" for an ACQUIRE, because the holder may be another
                attempt that is undone in a moment. "Yours is extended" counts
                (`restart_guard.py`).
        """
        if self.verb is Verb.ACQUIRE:
            # None: it was free and is ours. Our own token: an earlier SET of this attempt won and
            # its answer was lost. A number, where we want one: either of these. Else: another's.
            claim = self.claims[0]
            fenced = claim.proposal is not None
            if doubt:
                self.silence(node, doubt)
            elif not (type(reply) is int if fenced else (reply is None or reply == claim.token)):
                self._vote(node, Vote.NO, reply)
            else:
                claim.acknowledged(node, self.sent, now)
                self._vote(node, Vote.YES, reply if fenced else None)
        elif self.verb in EXTENDING:
            self._extended(node, reply, now)
        elif self.verb is Verb.FENCE:
            if not reply and self.claims[0].forgotten(node, now):
                self.amnesiac.append(node)
            # A node that has forgotten another's vote of a moment ago does not answer for him.
            if reply and doubt:
                self.silence(node, doubt)
            else:
                self._vote(node, Vote.YES if reply else Vote.NO)
        elif self.verb is Verb.PEEK:
            if doubt and (reply is None or (len(self.claims) > 1 and None in reply)):
                self.silence(node, doubt)
            else:
                self._vote(node, Vote.YES, reply)
        elif self.verb is Verb.RELEASE:
            freed = int(reply or 0)
            self._vote(node, Vote.YES if freed & 1 else Vote.NO, "called" if freed & 2 else None)
        else:
            self._vote(node, Vote.YES if reply else Vote.NO)

    def _extended(self, node: int, outcomes: str, now: float) -> None:
        for position, (claim, outcome) in enumerate(zip(self.claims, outcomes, strict=True)):
            if outcome != RENEWED and self._missing_at(claim, node, now):
                self.amnesiac.append(node)
            if outcome == REFUSED:
                continue
            claim.acknowledged(node, self.sent, now)
            self._confirmed[position] += 1
            if self._confirmed[position] == self.quorum:
                self._full += 1
        self._vote(node, Vote.NO if REFUSED in outcomes else Vote.YES)

    def _missing_at(self, claim: Claim, node: int, now: float) -> bool:
        """Note that a node does not hold a claim; return whether it should."""
        if self.verb is Verb.RENEW and not self.closed:
            # The others' answers first: who renews in another's stead may not know yet of all the
            # nodes that hold it, and would give it up for one that does not.
            self._missing.append((claim, node, now))
            # One that was released meanwhile, over another connection, is rightly missing.
            return claim.expiries[node] > now and not claim.ended
        return claim.forgotten(node, now)

    def silence(self, node: int, reason: str) -> None:
        """Count a node as silent: it will not answer, or its answer is of no use."""
        self._vote(node, Vote.SILENT, reason)

    def _vote(self, node: int, vote: Vote, detail: Any = None) -> None:
        if self.votes[node] is not None or self.closed:
            return
        self.votes[node] = vote
        self.details[node] = detail
        if vote is Vote.YES:
            self.yes += 1
        elif vote is Vote.NO:
            self.no += 1
        else:
            self.silent += 1

    @property
    def decided(self) -> bool:
        """Whether the outcome is certain, so that nobody has to wait for further answers."""
        answered = self.yes + self.no
        if answered + self.silent == len(self.targets) or not self.waits:
            return True
        if self.verb is Verb.ACQUIRE:
            spare = len(self.votes) - self.quorum
            if self.yes >= self.quorum or self.silent > spare:
                return True
            # Lost already; but say which way only when it is certain: held, or no quorum.
            return self.no + self.silent > spare and answered >= self.quorum
        if self.verb is Verb.EXTEND:
            return self._full == len(self.claims)
        if self.verb is Verb.RELEASE:
            return answered >= self.quorum
        if self.verb is Verb.FENCE:
            lacking = self.no + self.silent
            return self.yes >= self.quorum or lacking > len(self.votes) - self.quorum
        return False

    @property
    def waits(self) -> bool:
        """Whether anybody waits for the answers."""
        return self.until > self.sent

    def close(self, reason: str) -> list[int]:
        """Count the nodes that have not answered as silent; return which they are."""
        late = [node for node in self.targets if self.votes[node] is None]
        if not self.decided:
            for node in late:
                self.silence(node, reason)
        else:
            late = []
        self.closed = True
        for claim, node, now in self._missing:
            self._missing_at(claim, node, now)
        return late

    def confirmed(self) -> list[Claim]:
        """Return the claims that a quorum confirmed in this round."""
        counted = zip(self.claims, self._confirmed, strict=True)
        return [claim for claim, count in counted if count >= self.quorum]


def wrote(verb: Verb, answer: Any) -> bool:
    """Return whether this answer proves that the node can write."""
    if verb is Verb.PEEK:
        return False
    if verb is Verb.ACQUIRE:
        return not isinstance(answer, str)
    return answer.strip("0") != "" if verb in EXTENDING else bool(answer)
