"""Those who wait for one resource stand in line, and a release calls the first of the line only.

On each node the line is a sorted set beside the key: who waits, by the wall clock of its first try,
which it keeps. So all nodes have them in nearly one order; clocks matter for nothing but that. A
release takes the first from the line whose process listens and publishes to its own channel
(`commands.RELEASE`). Who was called by a quorum of the nodes tries, and no other is in its way.
Exclusion does not rest on any of this: whoever tries, called or not, is granted the lock by a
quorum, or is not.

Every try is a QUEUE and an ACQUIRE, in this order on each connection: so whoever is in the way
releases after we have stood in line, and calls us. A call can be lost all the same:

- Who was called dies: its process listens no more, and the nodes pass it over. Died after the call,
  was stopped, or struck between: the others try by themselves after one to two seconds.
- It gives up as it is called: it calls the next itself (PASS).
- Another comes by and takes the lock first: who was called stands in line again, in its old place,
  since before the other's release. Whoever releases and wants it again lets those pass who were
  called (`STAND_BACK`).
- The nodes call different waiters, as their lines differ for a moment, or a node was restarted and
  has forgotten its line: who is called by fewer than a quorum tries as well, a little later, and
  that try puts it back in every line.
- The holder dies and nobody releases: the nodes are asked how long its ttl lasts, soon after a try
  that was refused.
- Its process does not hear a quorum of nodes: it polls.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

from ..protocol.errors import NotAcquired, QuorumUnavailable, ResourceHeld
from ..runtime.event import SafeEvent

__all__ = ["JITTER", "POLL", "POLL_MAX", "STAND_BACK", "QueueEntry", "split"]

T = TypeVar("T")

JITTER = random.SystemRandom()
"""Not the module's own generator: that one is the application's, which may have seeded it."""

POLL, POLL_MAX = 0.004, 0.5
"""Seconds between tries, full jitter, where nobody will call us."""
SPLIT_MAX = 0.064
"""Seconds at most between tries after a split vote."""
LOOK = (0.1, 0.2)
"""Seconds until the nodes are asked how long the holder's ttl lasts: most release before."""
AGAIN = (1.0, 2.0)
"""Seconds until a try of one that was not called."""
FEW = (0.002, 0.01)
"""Seconds until a try of one that fewer than a quorum have called."""
STAND_BACK = (0.02, 0.06)
"""Seconds for which one who has just released lets the one pass who was called."""

_count = itertools.count(1)


class QueueEntry:
    """The place of one who waits, in the line for a resource.

    Args:
        quorum: How many nodes must call it.
        attentive: The nodes whose calls are heard.
        process: The channel of its process.

    Attributes:
        news: Rings when the first node has called since `forget()`, and when a quorum has.
        name: What it is called by.
        member: Its process and name, as it stands in the line.
        since: When it was first there, in microseconds since 1970.
        closed: There is nothing to wait for any more.
        quorum: How many nodes must call it.
    """

    def __init__(self, quorum: int, attentive: set[int], process: str) -> None:
        self.news = SafeEvent()
        self.name = str(next(_count))
        self.member = f"{process}:{self.name}"
        self.since = time.time_ns() // 1000
        self.closed = False
        self.quorum = quorum
        self._attentive = attentive
        self._heard: set[int] = set()
        self._sure = True
        self._stood = 0

    def hear(self, node: int, *, popped: bool = True) -> None:
        """A node calls; or, if it was not us who were taken from its line, it may have before."""
        self._sure = self._sure and popped
        self._heard.add(node)
        if len(self._heard) in (1, self.quorum):
            self.news.set()

    @property
    def calls(self) -> int:
        """How many nodes have called since `forget()`."""
        return len(self._heard)

    @property
    def sure(self) -> bool:
        """Whether all of these have; a node that was just connected to only may have."""
        return self._sure

    @property
    def informed(self) -> bool:
        """Whether a quorum of nodes can call; else poll."""
        return len(self._attentive) >= self.quorum

    def wait(self, seconds: float) -> bool:
        """Wait to be called, for some seconds at most; whether we were."""
        until = monotonic() + seconds
        if not self._heard:
            self.news.wait(seconds)
        few = min(until, monotonic() + JITTER.uniform(*FEW))
        while 0 < len(self._heard) < self.quorum and not self.closed:
            if not self.news.wait(few - monotonic()):
                break
        return bool(self._heard) or self.closed

    def forget(self) -> None:
        """Count calls from now on: call it right before standing in line."""
        self.news.clear()  # first: a ring too many does no harm
        self._heard.clear()
        self._sure = True
        self._stood += 1

    @property
    def left_by(self) -> tuple[int, ...]:
        """The nodes in whose lines we surely are no more.

        Those that have called, if we stood in line once. Else a call may be a late one, from before
        we last did.
        """
        return tuple(self._heard) if self._sure and self._stood == 1 else ()

    def retry(self, attempt: Callable[[bool], T], wait: float, free_in: Callable[[], float]) -> T:
        """Make attempts until one succeeds.

        Args:
            attempt: Tries, and stands in line before if it is told to; raises NotAcquired if it
                fails.
            wait: How long to go on trying, in seconds.
            free_in: Asks the nodes in how many seconds a quorum is free, should its holder have
                died without a word.

        Raises:
            NotAcquired: The last attempt's.
        """
        until = monotonic() + wait
        in_vain, called = 0, True
        while True:
            # Who was called is likely to be granted it, and need not stand in line again.
            first = called and self._sure and len(self._heard) >= self.quorum
            if not first:
                self.forget()
            try:
                return attempt(not first)
            except NotAcquired as error:
                if first and not self.closed and monotonic() < until:
                    self._sure = False
                    continue
                if self.closed or monotonic() >= until:
                    raise
                held = self.informed and isinstance(error, ResourceHeld) and not split(error)
                most = SPLIT_MAX if self.informed and isinstance(error, ResourceHeld) else POLL_MAX
            in_vain = 0 if held else in_vain + 1
            if not held:
                # After a split vote, or where we cannot be called: full jitter, soon.
                seconds = JITTER.uniform(0, min(most, POLL * 2.0 ** min(in_vain, 16)))
                self.wait(min(seconds, until - monotonic()))
                continue
            if called and (called := self.wait(min(JITTER.uniform(*LOOK), until - monotonic()))):
                continue
            seconds = JITTER.uniform(*AGAIN)
            with contextlib.suppress(QuorumUnavailable):
                seconds = min(seconds, max(JITTER.uniform(0, POLL), free_in()))
            called = self.wait(min(seconds, until - monotonic()))


def split(error: ResourceHeld) -> bool:
    """Whether nobody has it who will release it: those who tried have all been refused."""
    holder = error.holder
    return holder is None or holder.nodes <= len(error.votes) - holder.quorum
