"""Waiters for a resource form a queue, and a release notifies only the first of them.

On each node the queue is a sorted set beside the key: the waiters, by the wall clock of their first
try. So they are in nearly the same order on all nodes; clocks matter for nothing else. A release
removes the first waiter whose process listens from the queue, and publishes to the channel of that
process (`scripts.RELEASE`). A waiter that a quorum of the nodes notifies tries, and no other waiter
is in its way. Exclusion does not depend on any of this: every try, after a notification or without
one, needs the votes of a quorum.

Every try is an ENQUEUE and an ACQUIRE, in this order on each connection. So if a holder is in the
way, it releases after we have joined the queue, and its release notifies us. A notification can
still be lost:

- The notified waiter has died: its process no longer listens, and the nodes skip it. If it dies
  after the notification, or is stopped or interrupted between, the others try by themselves after
  one to two seconds.
- More than 200 dead waiters are in front of it (`names.MAX_DEAD_WAITERS`): it tries by itself.
- It stops waiting just as it is notified: it notifies the next waiter itself (HAND_ON).
- It stops waiting just as a node is lost: its place is left on the next connection to that node
  (`pipeline.py`). Until then a release there notifies nobody. If another node notifies the next
  waiter, that costs it 50 ms at most; if all nodes are lost at this moment, one to two seconds.
- A newcomer takes the lock first: the notified waiter joins the queue again, in its old place,
  before the newcomer releases. A holder that releases the lock and wants it again joins the queue,
  and does not try before it is notified or finds the lock free (`STAND_BACK_S`).
- The nodes notify different waiters, because their queues differ for a moment, or because a node
  was restarted and has lost its queue: a waiter that fewer than a quorum notify tries as well, a
  little later, and that try puts it back in every queue.
- The holder dies and nobody releases: soon after a refused try, the waiter asks the nodes how long
  the holder's ttl lasts.
- Its process is subscribed to fewer than a quorum of nodes: it polls.

A waiter for several resources stands only in the queues of those that its last try found held. In
the other queues it would use up notifications of resources that it cannot take yet. If a try finds
another resource held, the waiter notifies the next waiter for the free ones (HAND_ON), and changes
the queue.
"""

from __future__ import annotations

import itertools
import random
import time
from time import monotonic
from typing import Any

from ..protocol.errors import NotAcquired, ResourceHeld

__all__ = ["FEW_NOTIFIED_S", "JITTER", "Waiter", "all_refused"]

JITTER = random.SystemRandom()
"""Source of random delays. Not `random` itself: the application may have seeded that."""

FEW_NOTIFIED_S = (0.02, 0.05)
"""Seconds until a waiter tries that fewer than a quorum have notified: most likely the other nodes'
notifications are on their way."""

_count = itertools.count(1)


class Waiter:
    """One waiter of this process, and the nodes that have notified it.

    Args:
        quorum: The number of nodes that must notify it.
        listening: The nodes whose notifications arrive; shared by all waiters of the process.
        process: The channel of its process.
        news: The event that wakes its thread, or its coroutine.

    Attributes:
        news: Set when the first node has notified it since `forget()`, and when a quorum has.
        name: Its name in notifications.
        member: Its process and name, as an entry of the queues.
        since: Time at which it first waited, in microseconds since 1970.
        closed: True if nothing will notify it any more.
        sure: True if all nodes that are counted have certainly notified it. A node that has just
            been connected is counted, but may not have.
        quorum: The number of nodes that must notify it.
    """

    def __init__(self, quorum: int, listening: set[int], process: str, news: Any) -> None:
        self.news = news
        self.name = str(next(_count))
        self.member = f"{process}:{self.name}"
        self.since = time.time_ns() // 1000
        self.closed = False
        self.quorum = quorum
        self._listening = listening
        self._notified_by: set[int] = set()
        self.sure = True
        self._joined = 0

    def add_notification(self, node: int, *, popped: bool = True) -> None:
        """Count a notification; `popped` is False if the node may not have sent one."""
        self.sure = self.sure and popped
        self._notified_by.add(node)
        if len(self._notified_by) in (1, self.quorum):
            self.news.set()

    @property
    def notifications(self) -> int:
        """Number of nodes that have notified it since `forget()`."""
        return len(self._notified_by)

    @property
    def is_subscribed(self) -> bool:
        """True if a quorum of nodes can notify it; otherwise the caller must poll."""
        return len(self._listening) >= self.quorum

    async def wait(self, seconds: float) -> bool:
        """Wait to be notified, for at most `seconds`; return True if we were."""
        until = monotonic() + seconds
        if not self._notified_by:
            await self.news.waited(seconds)
        few = min(until, monotonic() + JITTER.uniform(*FEW_NOTIFIED_S))
        while 0 < len(self._notified_by) < self.quorum and not self.closed:
            left = few - monotonic()
            if left <= 0:
                break
            await self.news.waited(left)
        return self.is_notified

    @property
    def is_notified(self) -> bool:
        """True if a node has notified it since `forget()`, or nothing will notify it any more."""
        return bool(self._notified_by) or self.closed

    def forget(self) -> None:
        """Count notifications from now on; call it right before joining the queue."""
        self.news.clear()  # first: being woken once too often does no harm
        self._notified_by.clear()
        self.sure = True
        self._joined += 1

    @property
    def left_by(self) -> set[int]:
        """The nodes that have certainly removed us from their queue: a notification removes us.

        Empty if we joined more than once: a late notification may be from before that. Only for a
        single resource.
        """
        return self._notified_by if self.sure and self._joined == 1 else set()


def all_refused(error: NotAcquired) -> bool:
    """Return True if all competing tries may have been refused: then nobody will release it."""
    holder = error.holder if isinstance(error, ResourceHeld) else None
    return holder is None or holder.nodes <= len(error.votes) - holder.quorum
