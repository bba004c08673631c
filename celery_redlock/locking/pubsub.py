"""Receive the notifications that the nodes publish for the waiters of this process.

A release notifies the first waiter in a node's queue, on the channel of that waiter's process
(`wait_queue.py`). A process subscribes to one channel on each node, for all its waiters, with one
connection per node that is made at the first wait. It has no thread for this: one of the waiting
threads polls these connections for all of them, and reads.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..protocol.names import LINE_SUFFIX
from ..protocol.values import SHARED, quorum_of
from ..runtime.polling import WAITS, SharedPoll
from ..runtime.thread import Threads
from ..stores.kinds import Address, named, subscribe
from ..stores.subscription import RECONNECT_S, Subscription
from .wait_queue import JITTER, Waiter

__all__ = ["ReleaseSubscriber"]

logger = logging.getLogger("celery_redlock.wakeup")

READER = SHARED.encode()
"""Suffix of a reader's name."""


class ReleaseSubscriber:
    """The subscriptions of one process, or of one event loop. Do not use it after a fork.

    Args:
        addresses: The nodes.
        prefix: The prefix of keys.
        poll: Class that polls the connections, with the arguments of `SharedPoll`.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        prefix: str,
        poll: Callable[..., SharedPoll] = SharedPoll,
    ) -> None:
        self._addresses = addresses
        self._quorum = quorum_of(len(addresses))
        # Reentrant: a signal handler or a finalizer may interrupt a thread in here, and wait for a
        # lock itself, from begin to end.
        self._lock = threading.RLock()
        self._poll = poll(self._lock, self._read)
        self._waiters: dict[bytes, Waiter] = {}
        self._listening: set[int] = set()
        self._process = f"{prefix}{LINE_SUFFIX}:{secrets.token_hex(8)}"
        self.channel = self._process.encode("utf-8", "surrogatepass")
        self._subscriptions: dict[int, Subscription] = {}
        self._connecting = Threads[int]()
        self._closing = threading.Event()
        self._every = math.inf  # seconds between two reads, at most
        self._notifies = named(addresses[0].store).can.queues

    def event(self) -> Any:
        """Return an event; a thread that waits for it reads the notifications meanwhile."""
        return self._poll.event()

    @contextmanager
    def waiter(self) -> Iterator[Waiter]:
        """Make a waiter that can be notified as long as the block runs."""
        waiter = Waiter(self._quorum, self._listening, self._process, self.event())
        name = waiter.name.encode()
        self.catch_up()  # a node may have closed its connection while nobody waited
        with self._lock:
            self._connect_missing()
            self._waiters[name] = waiter
            waiter.closed = self._closing.is_set()
        try:
            yield waiter
        finally:
            self._waiters.pop(name, None)

    def catch_up(self) -> None:
        """Read the notifications that have arrived, unless another thread is reading them."""
        if self._subscriptions:
            try:
                self._poll.turn(lambda: self._poll.poller is not None, 0.0)
            finally:
                self._poll.leave()

    def close(self) -> None:
        """Close all subscriptions, and wake all waiters, because nothing will notify them."""
        with self._lock:
            self._closing.set()
            for node in list(self._subscriptions):
                self._drop(node, "closed")
            for waiter in list(self._waiters.values()):
                waiter.closed = True
                waiter.news.set()
            self._poll.close()

    # -- What the nodes publish

    def notified(self, node: int, name: bytes) -> None:
        """Pass a notification on to its waiter. The name of a reader ends with `SHARED`."""
        with self._lock:
            waiter = self._waiters.get(name.removesuffix(READER))
            if waiter is not None:
                waiter.add_notification(node)

    def subscribed(self, node: int) -> None:
        """Note that a node's notifications arrive from now on; earlier ones may be lost."""
        with self._lock:
            self._listening.add(node)
            for waiter in list(self._waiters.values()):
                waiter.add_notification(node, popped=False)

    def disconnected(self, node: int) -> None:
        """Note that a node's notifications do not arrive any more."""
        with self._lock:
            self._listening.discard(node)

    # -- The connections

    def _read(self, ready: Sequence[int]) -> None:
        for node in list(self._subscriptions) if self._every < math.inf else ready:
            self._receive(node)
            if self._poll.is_over():
                break  # the waiter that was notified tries first, and the rest is read later
        if self._every < math.inf and self._subscriptions:
            self._poll.read_in(self._every)

    def _receive(self, node: int) -> None:
        """Read the notifications that have arrived from a node."""
        subscription = self._subscriptions.get(node)
        if subscription is None:
            self._poll.forget(node)  # an exception has interrupted `_drop`
            return
        try:
            for name in subscription.read():
                self.notified(node, name)
        except WAITS:
            return
        except subscription.broken as error:
            self._broke(node, subscription, error)
        except BaseException:
            self._drop(node, "interrupted")  # a notification may be lost: all waiters look again
            raise

    def _broke(self, node: int, subscription: Subscription, error: Exception) -> None:
        self._drop(node, subscription.reason(error))
        if isinstance(error, OSError) and error.errno is None and not isinstance(error, WAITS):
            raise error  # a signal handler has raised it, not a system call

    def _drop(self, node: int, why: str) -> None:
        """Close a subscription, and make a new one in the background."""
        self.disconnected(node)
        subscription = self._subscriptions.pop(node, None)
        self._poll.forget(node)
        if subscription is not None:
            subscription.close()
        self._connect_missing(why)

    def _connect_missing(self, why: str = "") -> None:
        """Subscribe in the background to the nodes without a subscription."""
        for node in range(len(self._addresses)) if self._notifies else ():
            if node not in self._subscriptions and not self._closing.is_set():
                name = f"celery_redlock subscribe {self._addresses[node].name}"
                self._connecting.begin(node, name, self._connect, node, why)

    def _connect(self, node: int, why: str) -> None:
        """Subscribe to a node, and try again until it succeeds; runs in a separate thread."""
        address, retry = self._addresses[node], (0.0, RECONNECT_S)
        while not self._closing.is_set():
            if why:
                # Only a debug line: waiters poll meanwhile, and the node's own connection reports
                # the failures that matter.
                logger.debug("node %s sends no notifications: %s", address.name, why)
                if self._closing.wait(JITTER.uniform(*retry)):
                    return
            subscription = subscribe(address, self.channel)
            try:
                subscription.connect()
            except Exception as error:  # also an error of a credential provider
                why, retry = subscription.reason(error), subscription.retry
                subscription.close()
                continue
            with self._lock:
                self._connected(node, subscription)
            return

    def _connected(self, node: int, subscription: Subscription) -> None:
        # Two threads connect to one node if a time limit struck while one of them was started.
        if node in self._subscriptions or self._closing.is_set():
            subscription.close()
            return
        self._subscriptions[node] = subscription
        self._connecting.pop(node, None)
        self._poll.watch(node, subscription.fileno())
        self._every = subscription.every
        if self._every < math.inf:
            self._poll.read_in(self._every)
        self.subscribed(node)
