"""The unanswered requests of one node, and the releases that it has not confirmed.

The answers on a connection come in the order of the requests, so a queue is enough to match them.
And a node executes the requests of one connection in order, so a release that is written *behind*
the request it undoes can never be overtaken by it. From this follow the rules kept here:

- A connection that merely times out is kept: the late SET and the release behind it travel on.
  (Closing it orphaned 5,310 locks in 12,000 simulated schedules, keeping it none.)
- When a connection does break, the releases that it had not acknowledged are *owed*: they are
  written first on the next one, until the ttl has made them pointless. (On a node whose ttls start
  over after it was down, it never does.)
- A release that the node refused with an error (it cannot write, it is busy) is owed as well, and
  tried again once the node has executed another request.
- A place in a wait queue that a node has not confirmed to be left is owed as well, for a while. A
  release would notify the waiter that has gone, and no other waiter.
- A node that is down is silent at once; nobody waits for a connection attempt that has failed.
  Rounds are held back for a node only during the first attempt after a break: a server that closes
  idle connections causes such a break, and is back in a millisecond.
- A node that does not answer gets no new requests, because they would pile up in front of it.
  Neither does a node that does not read its requests, whatever it answers.

Pure: the simulated world of the tests drives this very code.
"""

from __future__ import annotations

import math
from collections import deque

from .claim import Claim
from .round import Round, Verb

__all__ = ["LEAVES_FOR_S", "MAX_OWED", "MAX_RETRIED", "STALLED_S", "Pipeline"]

LEAVES_FOR_S = 30.0
"""Seconds for which a place in a wait queue that was not left for sure is left once more. Later, a
release has most likely removed it: it costs the next waiter one or two seconds, once."""
STALLED_S = 1.0
"""Seconds after which a node that does not answer gets no new requests: far more than a slow
network takes, and less than most ttls."""
MAX_OWED = 1000
"""Maximum number of releases that are owed to a node; beyond that the oldest are left to their
ttl."""
MAX_RETRIED = 16
"""Maximum number of refused releases retried after a successful release (after other requests:
one)."""


class Pipeline:
    """The queue of requests to one node.

    Args:
        node: The node's index.
        ends_on_time: True if a key is gone after its ttl, however long the node was down.

    Attributes:
        node: The node's index.
        up: True if there is a connection to write to.
        down: The reason why there is no connection and none is expected soon; else None.
        unanswered: The rounds written and not answered, oldest first.
        waiting: The rounds that are held back for a connection that is being made.
        clogged: The time since when the connection has accepted no bytes, although some remain to
            be written; None if none remain.
        owed: Releases that the node has not confirmed, and places that were not left, by token;
            they are sent as soon as it can be asked.
    """

    def __init__(self, node: int, *, ends_on_time: bool = True) -> None:
        self.node, self._ends_on_time = node, ends_on_time
        self.up = False
        self.down: str | None = None
        self.unanswered: deque[Round] = deque()
        self.clogged: float | None = None
        self._asked = -math.inf  # since when an answer can be missing
        self.waiting: list[Round] = []
        self.owed: dict[str, Round] = {}

    def ask(self, round_: Round, now: float) -> bool:
        """Take up a round; return True if it must be written to the connection now, in order."""
        if self.up:
            if self.stalled(now) and not self._pending_release(round_):
                self.owe(round_)
                why = "it does not read its requests"
                if self.unanswered:
                    why = f"no answer for {now - self.unanswered[0].sent:.1f} s"
                round_.silence(self.node, why)
                return False
            if not self.unanswered:
                self._asked = now
            self._written(round_)
            return True
        self.owe(round_)
        if self.down is not None or not round_.waits or round_.verb.frees:
            round_.silence(self.node, self.down or "connecting")
        else:
            self.waiting.append(round_)
        return False

    def stalled(self, now: float, after: float = STALLED_S) -> bool:
        """Return True if it has not answered or not read for longer than `after`; seconds.

        No request should follow then.
        """
        if self.clogged is not None and now - self.clogged > after:
            return True
        # A round may be older than its request: it may be owed from before this connection, and a
        # busy process may have made it long before it got to write it.
        unanswered = self.unanswered
        return bool(unanswered) and now - max(unanswered[0].sent, self._asked) > after

    def connected(self, now: float) -> list[Round]:
        """Note a new connection; return the rounds to write to it first, in this order."""
        owed = [r for r in self.owed.values() if self._matters(r, now)]
        # A closed round has no waiter any more: do not send a request that must then be undone.
        waiting = [r for r in self.waiting if not r.closed]
        for round_ in [r for r in waiting if any(claim.ended for claim in r.claims)]:
            # If it were written behind an owed release, it would set the released token again.
            round_.silence(self.node, "connection lost")
            waiting.remove(round_)
        self.owed.clear()
        self.waiting.clear()
        self.up, self.down, self._asked, self.clogged = True, None, now, None
        for round_ in (*owed, *waiting):
            self._written(round_)
        return [*owed, *waiting]

    def owe(self, round_: Round) -> None:
        """Keep a release that could not be sent, or was refused with an error, to send it later.

        So is kept a round that leaves a wait queue. Any other round is ignored, and so is a release
        for which no token was ever written here.
        """
        if self._pending_release(round_) or round_.verb.leaves:
            self.owed[round_.claims[0].token] = round_
            if len(self.owed) > MAX_OWED:
                del self.owed[next(iter(self.owed))]

    def unconfirmed(self, now: float) -> list[Claim]:
        """Return the claims whose release is unanswered or owed here, and lacks a quorum."""
        return [
            round_.claims[0]
            for round_ in (*self.unanswered, *self.owed.values())
            if self._pending_release(round_)
            and not round_.quorum_answered
            and self._matters(round_, now)
        ]

    def leaving(self, now: float) -> bool:
        """Return True if a place in a wait queue may still have to be left here."""
        return any(
            round_.verb.leaves and self._matters(round_, now)
            for round_ in (*self.unanswered, *self.owed.values())
        )

    def due(self, done: Verb, now: float) -> list[Round]:
        """Return owed releases to write now, because the node has just executed a `done`."""
        tokens = list(self.owed)[: MAX_RETRIED if done.frees else 1]
        rounds = [self.owed.pop(token) for token in tokens]
        rounds = [r for r in rounds if self._matters(r, now)]
        for round_ in rounds:
            self._written(round_)
        return rounds

    def dropped(self) -> None:
        """Note that the connection broke. The next attempt to connect is under way.

        If an exception interrupts this call, call it again: it continues where it stopped.
        """
        while self.unanswered:
            round_ = self.unanswered[0]
            self.owe(round_)
            if round_.verb.frees:
                round_.silence(self.node, "connection lost")
            elif not round_.closed and round_ not in self.waiting:
                self.waiting.append(round_)
            self.unanswered.popleft()
        self.up, self.down = False, None

    def unreachable(self, reason: str) -> None:
        """Note that the attempt to connect failed."""
        self.down = reason
        for round_ in self.waiting:
            round_.silence(self.node, reason)
        self.waiting.clear()

    def _written(self, round_: Round) -> None:
        self.unanswered.append(round_)
        if round_.verb.sets:
            for claim in round_.claims:
                claim.written |= 1 << self.node
        elif round_.verb is Verb.ENQUEUE and self.owed:
            self.owed.pop(round_.claims[0].token, None)  # it stands there again

    def _matters(self, round_: Round, now: float) -> bool:
        """Return True if the key that a release deletes, or a place, may still be there."""
        if round_.verb.leaves:
            return now < round_.sent + LEAVES_FOR_S
        return not self._ends_on_time or now < round_.sent + round_.claims[0].ttl

    def _pending_release(self, round_: Round) -> bool:
        """Return True if this round releases a token that an earlier request may have set here."""
        return round_.verb.frees and bool(round_.claims[0].written >> self.node & 1)
