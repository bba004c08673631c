"""Waiters of one resource form a queue, and a release calls only the first of them.

On each node the queue is a sorted set beside the key: the waiters, by the wall clock of their first
try. So all nodes have them in nearly the same order; clocks matter for nothing else. A release
takes the first waiter whose process listens from the queue, and publishes to the channel of that
process (`scripts.RELEASE`). The waiter that a quorum of the nodes calls tries, and no other is in
its way. Exclusion does not rest on any of this: a try, called or not, is granted the lock by a
quorum, or is not.

Every try is an ENQUEUE and an ACQUIRE, in this order on each connection. So the holder that is in
the way releases after we have joined the queue, and that calls us. A call can be lost all the same:

- The waiter that was called has died: its process no longer listens, and the nodes pass it over. If
  it dies after the call, is stopped, or is interrupted between: the others try by themselves after
  one to two seconds.
- More than 200 that died are in front of it (`names.MAX_DEAF`): it tries by itself.
- It gives up as it is called: it calls the next waiter itself (HAND_ON).
- Another comes by and takes the lock first: the waiter that was called joins the queue again, in
  its old place, before the other releases. A holder that releases and wants it again joins the
  queue, and does not try before it is called or finds the lock free (`STAND_BACK_S`).
- The nodes call different waiters, because their queues differ for a moment, or a node was
  restarted and has forgotten its queue: a waiter that fewer than a quorum call tries as well, a
  little later, and that try puts it back in every queue.
- The holder dies and nobody releases: the nodes are asked how long its ttl lasts, soon after a try
  that was refused.
- Its process does not hear a quorum of nodes: it polls.

A waiter for several resources stands in the queues of those that its last try found held, and in no
other: there it would use up the calls of a resource that it cannot take yet. Where a try finds
another one held, it calls the next waiter of what is free (HAND_ON), and changes the queue.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from time import monotonic
from typing import Any

from ..protocol.errors import NotAcquired, ResourceHeld
from ..runtime.event import SafeEvent

__all__ = ["FEW_CALLED_S", "JITTER", "Waiter", "all_refused"]

JITTER = random.SystemRandom()
"""Not the module's own generator: that one is the application's, which may have seeded it."""

FEW_CALLED_S = (0.02, 0.05)
"""Seconds until a waiter tries that fewer than a quorum have called: most likely the other nodes'
calls are under way."""

_count = itertools.count(1)


class Waiter:
    """One waiter of this process, and the nodes that have called it.

    Args:
        quorum: How many nodes must call it.
        listening: The nodes whose calls are heard.
        process: The channel of its process.
        news: The event that wakes its thread, or what else waits.

    Attributes:
        news: Set when the first node has called since `forget()`, and when a quorum has.
        name: What the nodes call it by.
        member: Its process and name, as it stands in the queues.
        since: When it first waited, in microseconds since 1970.
        closed: There is nothing to wait for any more.
        sure: Whether all nodes that are counted have surely called: one that was connected just
            now may or may not have.
        quorum: How many nodes must call it.
    """

    def __init__(self, quorum: int, listening: set[int], process: str, news: Any = None) -> None:
        self.news = SafeEvent() if news is None else news
        self.name = str(next(_count))
        self.member = f"{process}:{self.name}"
        self.since = time.time_ns() // 1000
        self.closed = False
        self.quorum = quorum
        self._listening = listening
        self._heard: set[int] = set()
        self.sure = True
        self._joined = 0

    def hear(self, node: int, *, popped: bool = True) -> None:
        """Count the call of a node; without `popped` it is not certain that the node has called."""
        self.sure = self.sure and popped
        self._heard.add(node)
        if len(self._heard) in (1, self.quorum):
            self.news.set()

    @property
    def calls(self) -> int:
        """How many nodes have called since `forget()`."""
        return len(self._heard)

    @property
    def informed(self) -> bool:
        """Whether a quorum of nodes can call; else poll."""
        return len(self._listening) >= self.quorum

    def wait(self, seconds: float) -> bool:
        """Wait to be called, for some seconds at most; return whether we were."""
        for nap in self.naps(seconds):
            self.news.wait(nap)
        return self.called

    def naps(self, seconds: float) -> Iterator[float]:
        """Yield how long to wait for news, until there is nothing more to wait for."""
        until = monotonic() + seconds
        if not self._heard:
            yield seconds
        few = min(until, monotonic() + JITTER.uniform(*FEW_CALLED_S))
        while 0 < len(self._heard) < self.quorum and not self.closed:
            left = few - monotonic()
            if left <= 0:
                break
            yield left

    @property
    def called(self) -> bool:
        """Whether a node has called since `forget()`, or there is nothing to wait for any more."""
        return bool(self._heard) or self.closed

    def forget(self) -> None:
        """Count calls from now on: call it right before joining the queue."""
        self.news.clear()  # first: being woken once too often does no harm
        self._heard.clear()
        self.sure = True
        self._joined += 1

    @property
    def left_by(self) -> set[int]:
        """The nodes that surely took us out of the queue of one resource: those that have called.

        No node, if we joined it more than once: a call may be a late one, from before that.
        """
        return self._heard if self.sure and self._joined == 1 else set()


def all_refused(error: NotAcquired) -> bool:
    """Whether all that tried at once may have been refused: then nobody will release it."""
    holder = error.holder if isinstance(error, ResourceHeld) else None
    return holder is None or holder.nodes <= len(error.votes) - holder.quorum
