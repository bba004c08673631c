"""A round: one request to all nodes, and the outcome of their answers; and the table of verbs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from . import replies
from .claim import Claim, acknowledged
from .replies import Held
from .values import Vote, quorum_of

__all__ = ["REFUSED", "RENEWED", "SET_AGAIN", "VERBS", "Held", "Round", "Steps", "Verb"]

T = TypeVar("T")
Steps = Generator["Round", float, T]

# A node's answer to an extension has one of these characters per claim.
RENEWED, SET_AGAIN, REFUSED = "1", "2", "0"


class Round:
    """One request to many nodes, and their votes.

    Attributes:
        verb: The kind of request.
        claims: The claims that it asks for; or a `QueueEntry`, if it joins or leaves a wait queue;
            or the queries of a PEEK, LOOK or MARK. Only extensions and a PEEK have more than one.
        sent: The time before the first byte was sent, from which leases are counted; seconds.
        until: The time from which nodes that have not answered count as silent; seconds.
        targets: The indexes of the nodes to ask.
        votes: Per node, its vote so far; None while it is open.
        details: Per node: the holder's token (ACQUIRE, NO), its fencing token (ACQUIRE, YES), why
            it is silent, what it holds (PEEK; a list if there are many queries), its answer for
            each claim (EXTEND, RENEW).
        closed: True if nobody waits for it any more. Late answers still count for the lease.
        amnesiac: Claims whose token a node has lost too early. The code that reads the node's
            answers logs them and empties the list.
    """

    __slots__ = (
        *("_confirmed", "_complete", "_missing", "amnesiac", "claims", "closed", "details", "no"),
        *("quorum", "sent", "silent", "targets", "until", "verb", "votes", "yes"),
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
        self.amnesiac: list[Any] = []
        self._confirmed = [0] * len(claims)
        self._complete = False
        self._missing: list[tuple[Claim, int, float]] = []

    def begin(self) -> None:
        """Remove the claims that have ended. The driver calls it right before it writes.

        An extension that is written after the release of its lease would set the token again.
        """
        if self.verb.extends:
            self.claims = [claim for claim in self.claims if not claim.ended]
            self._confirmed = [0] * len(self.claims)
            if not self.claims:
                self.targets = ()

    def answer(self, node: int, reply: Any, now: float, doubt: str = "") -> None:
        """Count the answer of a node.

        Args:
            node: Its index.
            reply: The answer as decoded by `replies.decode`.
            now: When it was read; seconds.
            doubt: Why the node may have forgotten locks; empty if it has not. The answer "it is
                free" then counts as silence. So does "it is held" for an ACQUIRE, because the
                holder may be another attempt that is undone in a moment. "Yours is extended" counts
                (`restart_guard.py`).
        """
        self.verb.count(self, node, reply, now, doubt)

    def silence(self, node: int, reason: str) -> None:
        """Count a node as silent: it will not answer, or its answer is useless."""
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
        """True if the outcome is certain, so that nobody has to wait for further answers."""
        if self.yes + self.no + self.silent == len(self.targets) or not self.waits:
            return True
        return self.verb.decided(self)

    @property
    def quorum_answered(self) -> bool:
        """True if a quorum has answered, YES or NO."""
        return self.yes + self.no >= self.quorum

    @property
    def denied(self) -> bool:
        """True if so many said no that a quorum can no longer say yes, whatever others answer."""
        return self.no > self._spare

    @property
    def _spare(self) -> int:
        """The number of nodes that a quorum can do without."""
        return len(self.votes) - self.quorum

    @property
    def waits(self) -> bool:
        """True if somebody waits for the answers."""
        return self.until > self.sent

    def close(self, reason: str = "") -> list[int]:
        """Count the nodes that have not answered as silent; return their indexes.

        Args:
            reason: Why they are silent; empty if they have not answered in time.
        """
        late: list[int] = []
        if not self.decided:
            late = [node for node in self.targets if self.votes[node] is None]
        for node in late:
            self.silence(node, reason or f"no answer within {self.until - self.sent:.3f} s")
        self.closed = True
        for claim, node, now in self._missing:
            self._missing_at(claim, node, now)
        return late

    def confirmed(self) -> list[Claim]:
        """Return the claims that a quorum confirmed in this round."""
        counted = zip(self.claims, self._confirmed, strict=True)
        return [claim for claim, count in counted if count >= self.quorum]

    def refused(self) -> list[Claim]:
        """Return the claims of an EXTEND or a RENEW that a quorum does not hold."""
        answers = [
            detail
            for vote, detail in zip(self.votes, self.details, strict=True)
            if vote is Vote.YES or vote is Vote.NO
        ]
        counts = (each.count(REFUSED) for each in zip(*answers, strict=True))
        return [
            claim for claim, count in zip(self.claims, counts, strict=False) if count >= self.quorum
        ]

    # -- Counting the answer to each verb

    def _acquired(self, node: int, reply: Any, now: float, doubt: str) -> None:
        # None: the key was free and is ours. Our own token: an earlier SET of this attempt won, but
        # its answer was lost. A number, if we asked for a fencing token: either of these. Anything
        # else is another's token.
        claim = self.claims[0]
        fenced = claim.proposal is not None
        if doubt:
            self.silence(node, doubt)
        elif not (type(reply) is int if fenced else (reply is None or reply == claim.token)):
            self._vote(node, Vote.NO, reply)
        else:
            if not claim.ended:  # the deadline of an ended claim does not matter any more
                claim.acknowledged(node, self.sent, now)
            self._vote(node, Vote.YES, reply if fenced else None)

    def _extended(self, node: int, outcomes: str, now: float, _doubt: str) -> None:
        renewed = self.claims
        if outcomes == RENEWED * len(renewed):  # the short way, taken nearly always
            self._confirmed = [count + 1 for count in self._confirmed]
        else:
            renewed = []
            for position, (claim, outcome) in enumerate(zip(self.claims, outcomes, strict=True)):
                if outcome != RENEWED and self._missing_at(claim, node, now):
                    self.amnesiac.append(claim)
                if outcome != REFUSED:
                    renewed.append(claim)
                    self._confirmed[position] += 1
        acknowledged(renewed, node, self.sent, now)
        self._complete = min(self._confirmed) >= self.quorum
        self._vote(node, Vote.NO if REFUSED in outcomes else Vote.YES, outcomes)

    def _missing_at(self, claim: Claim, node: int, now: float) -> bool:
        """Note that a node does not hold a claim; return True if it should."""
        if self.verb is Verb.RENEW and not self.closed:
            # Count the other answers first (`close`): a supervisor may not have the answers of all
            # nodes that hold a claim, and would declare it lost because of one that does not.
            self._missing.append((claim, node, now))
            # A claim that was released meanwhile, over another connection, is rightly missing.
            return claim.expiries[node] > now and not claim.ended
        return claim.forgotten(node, now)

    def _fenced(self, node: int, ours: bool, now: float, doubt: str) -> None:
        if not ours and self.claims[0].forgotten(node, now):
            self.amnesiac.append(self.claims[0])
        # A node that may have forgotten a vote for another of a moment ago must not confirm ours.
        if ours and doubt:
            self.silence(node, doubt)
        else:
            self._vote(node, Vote.YES if ours else Vote.NO)

    def _peeked(self, node: int, seen: Any, _now: float, doubt: str) -> None:
        if doubt and (seen is None or (len(self.claims) > 1 and None in seen)):
            self.silence(node, doubt)
        else:
            self._vote(node, Vote.YES, seen)

    def _done(self, node: int, reply: Any, _now: float, _doubt: str) -> None:
        # 1: done. A release adds 2 if a waiter was notified.
        done = int(reply or 0)
        self._vote(node, Vote.YES if done & 1 else Vote.NO, "called" if done & 2 else None)

    # -- Deciding a verb before all nodes have answered

    def _won_or_lost(self) -> bool:
        if self.yes >= self.quorum or self.silent > self._spare:
            return True
        # It is lost already, but the error must give the reason: another holder, or no quorum.
        return self.no + self.silent > self._spare and self.quorum_answered

    def _is_certain(self) -> bool:
        return self.yes >= self.quorum or self.no + self.silent > self._spare


@dataclass(frozen=True, eq=False)
class Verb:
    """A kind of request to a node: a row of the table below.

    Attributes:
        word: Its name in logs and errors.
        decode: Function that decodes a reply for `count`, or raises.
        count: Function that counts a node's answer; it takes the arguments of `Round.answer`.
        decided: Function that returns True if the outcome is certain before all have answered.
        wrote: Function that returns True if an answer proves that the node can write.
        sets: True if it may set our token, so that an undoing must follow a failure.
        frees: True if it deletes our token, so that it is owed to a node that cannot be asked now.
        extends: True if it carries many claims, and none that has ended.
        needs_memory: True if the answer "it is free" does harm if the node has forgotten a lock.
        can_wait: True if it may be sent later, because nobody needs the answer.
        notifies: True if it may notify a waiter.
        leaves: True if it leaves a wait queue, so that it is owed for a while to a node that cannot
            be asked now.
    """

    word: str
    decode: Callable[[Sequence[Any], Any], Any] = replies.done
    count: Callable[[Round, int, Any, float, str], None] = Round._done
    decided: Callable[[Round], bool] = lambda round_: False
    wrote: Callable[[Any], bool] = bool
    sets: bool = False
    frees: bool = False
    extends: bool = False
    needs_memory: bool = False
    can_wait: bool = False
    notifies: bool = False
    leaves: bool = False

    # Only for type checkers: hypothesis prints annotated fields, each row with all others in it.
    if TYPE_CHECKING:
        ACQUIRE: ClassVar[Verb]
        EXTEND: ClassVar[Verb]
        RENEW: ClassVar[Verb]
        RELEASE: ClassVar[Verb]
        UNDO: ClassVar[Verb]
        FENCE: ClassVar[Verb]
        PEEK: ClassVar[Verb]
        ENQUEUE: ClassVar[Verb]
        DEQUEUE: ClassVar[Verb]
        HAND_ON: ClassVar[Verb]
        LOOK: ClassVar[Verb]
        MARK: ClassVar[Verb]


# Set our token where no other is set (Redis page, step 2).
Verb.ACQUIRE = Verb(
    "acquire",
    decode=replies.acquired,
    count=Round._acquired,
    decided=Round._won_or_lost,
    wrote=lambda answer: not isinstance(answer, str),
    sets=True,
    needs_memory=True,
)
# Renew our token where it is set; set it again where none is.
Verb.EXTEND = Verb(
    "extend",
    decode=replies.extended,
    count=Round._extended,
    decided=lambda round_: round_._complete,
    wrote=lambda outcomes: outcomes.strip(REFUSED) != "",
    sets=True,
    extends=True,
)
# Renew our token where it is set, and never set it again. This is for a supervisor: its connection
# is not the holder's, so its request may arrive after the release. It waits for all answers,
# because it must at least learn in time on which nodes the token is missing.
Verb.RENEW = Verb(
    "renew",
    decode=replies.extended,
    count=Round._extended,
    wrote=Verb.EXTEND.wrote,
    extends=True,
)
# Delete our token, and no other, and wake the first waiter. The token was there if a quorum says
# so, and was not if so many deny it that there can be no such quorum. The first node to answer is
# not enough: it may have forgotten the token, or lie.
Verb.RELEASE = Verb(
    "release",
    decode=replies.released,
    decided=lambda round_: round_.quorum_answered and round_._is_certain(),
    frees=True,
    can_wait=True,
    notifies=True,
)
# Delete our token, and no other, and wake nobody: a failed attempt frees nothing.
Verb.UNDO = Verb("undo", frees=True, can_wait=True)
# Raise the fencing token to ours, only where our token still holds the key (`quorum._fence`).
Verb.FENCE = Verb(
    "fence",
    count=Round._fenced,
    decided=Round._is_certain,
    needs_memory=True,
)
# Report the holder, and the seconds left. For several names: the first holder, and the seconds
# until all of them are free.
Verb.PEEK = Verb(
    "peek",
    decode=replies.peeked,
    count=Round._peeked,
    wrote=lambda _seen: False,
    needs_memory=True,
)
# Join the wait queue, with the time since when we wait: a release wakes the first waiter.
Verb.ENQUEUE = Verb("queue")
# Leave the queue because we hold the lock.
Verb.DEQUEUE = Verb("leave", can_wait=True, leaves=True)
# Leave the queue without the lock; if a release woke us, or nobody holds it, wake the next one.
Verb.HAND_ON = Verb("pass", can_wait=True, notifies=True, leaves=True)
# Report if the node still is a master. Only the request behind it waits for the answer.
Verb.LOOK = Verb("tell its role", decode=replies.looked)
# Write into the node's own data that it has earned its vote (`restart_guard.py`).
Verb.MARK = Verb("mark")

VERBS = tuple(row for row in vars(Verb).values() if isinstance(row, Verb))
