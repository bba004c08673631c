"""What one node has been asked and has not answered yet.

A connection answers in order, so a queue tells which answer belongs to which request; and a node
executes in order what came on one connection, so a release that is written *behind* the request it
undoes can never be overtaken by it. From this follow the rules kept here:

- A connection that merely times out is kept: the late SET and the release behind it travel on.
  (Closing it orphaned 5,310 locks in 12,000 simulated schedules, keeping it none.)
- When a connection does break, the releases it had not acknowledged are *owed*: they are written
  first on the next one, until the ttl has made them pointless (which it never does on a node whose
  ttls start over after it was down).
- A release that the node refused with an error (it cannot write, it is busy) is owed as well, and
  tried again once the node has done something else that was asked of it.
- A node that is down is silent at once; nobody waits for a connection attempt that has failed.
  Only while the first attempt after a break is under way (a server that closes idle connections
  breaks one that way, and is back in a millisecond) are rounds held back for it.
- A node that answers nothing is asked nothing new, lest requests pile up in front of it; nor is one
  that does not read what it is asked, whatever it answers.

Pure: the simulated world of the tests drives this very code.
"""

from __future__ import annotations

import math
from collections import deque

from .claim import Claim
from .round import Round, Verb

__all__ = ["MAX_OWED", "MAX_RETRIED", "STALLED_S", "Pipeline"]

STALLED_S = 1.0
"""How long a node may answer nothing before it is asked nothing new: far more than a slow network
takes, and less than most ttls."""
MAX_OWED = 1000
"""Releases that are owed to a node; of more the oldest are left to their ttl."""
MAX_RETRIED = 16
"""Refused releases that are tried again after one has succeeded; after anything else it is one."""


class Pipeline:
    """The queue of requests to one node.

    Args:
        node: The node's index.
        lapses: Whether a key is over there after its ttl, however long the node was down.

    Attributes:
        node: The node's index.
        up: Whether there is a connection to write to.
        down: Why there is none and none to be expected soon, or None.
        unanswered: The rounds written and not answered, oldest first.
        waiting: The rounds that are held back for a connection that is being made.
        clogged: Since when its connection has taken nothing of what is to be written; None if it
            has taken all.
        owed: Releases that it has not confirmed, by token: it is told of them once it can be.
    """

    def __init__(self, node: int, *, lapses: bool = True) -> None:
        self.node, self._lapses = node, lapses
        self.up = False
        self.down: str | None = None
        self.unanswered: deque[Round] = deque()
        self.clogged: float | None = None
        self._opened = -math.inf
        self.waiting: list[Round] = []
        self.owed: dict[str, Round] = {}

    def ask(self, round_: Round, now: float) -> bool:
        """Take up a round; return whether to write it to the connection now, in this order."""
        if self.up:
            if self.stalled(now) and not self._pending_release(round_):
                why = "it does not read what it is asked"
                if self.unanswered:
                    why = f"no answer for {now - self.unanswered[0].sent:.1f} s"
                round_.silence(self.node, why)
                return False
            self._written(round_)
            return True
        self.owe(round_)
        if self.down is not None or not round_.waits or round_.verb.frees:
            round_.silence(self.node, self.down or "connecting")
        else:
            self.waiting.append(round_)
        return False

    def stalled(self, now: float, after: float = STALLED_S) -> bool:
        """Whether it has not answered or not read for so long that no request should follow."""
        if self.clogged is not None and now - self.clogged > after:
            return True
        # A release that was owed is older than the connection: the node is late by neither.
        unanswered = self.unanswered
        return bool(unanswered) and now - max(unanswered[0].sent, self._opened) > after

    def connected(self, now: float) -> list[Round]:
        """Note a new connection; return the rounds to write to it first, in this order."""
        owed = [r for r in self.owed.values() if self._matters(r, now)]
        # A round that nobody waits for any more is not worth a request that must be undone.
        waiting = [r for r in self.waiting if not r.closed]
        for round_ in [r for r in waiting if any(claim.ended for claim in r.claims)]:
            # Written behind an owed release, it would set the released token again.
            round_.silence(self.node, "connection lost")
            waiting.remove(round_)
        self.owed.clear()
        self.waiting.clear()
        self.up, self.down, self._opened, self.clogged = True, None, now, None
        for round_ in (*owed, *waiting):
            self._written(round_)
        return [*owed, *waiting]

    def owe(self, round_: Round) -> None:
        """Keep what could not be asked, or was refused with an error, if it must still be freed."""
        if self._pending_release(round_):
            self.owed[round_.claims[0].token] = round_
            if len(self.owed) > MAX_OWED:
                del self.owed[next(iter(self.owed))]

    def unfreed(self, now: float) -> list[Claim]:
        """Return what is released, under way or owed here, and too few nodes have confirmed."""
        return [
            round_.claims[0]
            for round_ in (*self.unanswered, *self.owed.values())
            if self._pending_release(round_)
            and not round_.quorum_answered
            and self._matters(round_, now)
        ]

    def due(self, done: Verb, now: float) -> list[Round]:
        """Return what is owed to a node that has just written, for `done`: ask it again now."""
        tokens = list(self.owed)[: MAX_RETRIED if done.frees else 1]
        rounds = [self.owed.pop(token) for token in tokens]
        rounds = [r for r in rounds if self._matters(r, now)]
        for round_ in rounds:
            self._written(round_)
        return rounds

    def dropped(self) -> None:
        """The connection broke. Another attempt is under way.

        If an exception interrupts it, it can be called again: it goes on where it was.
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
        """The attempt to connect failed."""
        self.down = reason
        for round_ in self.waiting:
            round_.silence(self.node, reason)
        self.waiting.clear()

    def _written(self, round_: Round) -> None:
        self.unanswered.append(round_)
        if round_.verb.sets:
            for claim in round_.claims:
                claim.written |= 1 << self.node

    def _matters(self, round_: Round, now: float) -> bool:
        """Whether what a release is to free may still be there."""
        return not self._lapses or now < round_.sent + round_.claims[0].ttl

    def _pending_release(self, round_: Round) -> bool:
        """Whether this round frees what an earlier request may have set here."""
        return round_.verb.frees and bool(round_.claims[0].written >> self.node & 1)
