"""Hear which waiters of this process the nodes call.

A release calls the first waiter in a node's queue on the channel of that waiter's process
(`wait_queue.py`). So a process subscribes once to each node, to one channel, for all that it waits
for: with one connection and one thread per node, made when somebody first waits.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..protocol.names import LINE_SUFFIX
from ..protocol.values import SHARED, quorum_of
from ..stores.kinds import Address, Subscription, subscribe
from .wait_queue import JITTER, Waiter

__all__ = ["ReleaseSubscriber"]

logger = logging.getLogger("celery_redlock.wakeup")

RECONNECT_S = 1.0
"""Seconds, at most and at random, between attempts to connect; polling bridges the gap."""


class ReleaseSubscriber:
    """The subscriptions of one process. Do not use it after a fork."""

    def __init__(self, addresses: Sequence[Address], prefix: str) -> None:
        self._quorum = quorum_of(len(addresses))
        # A signal handler or a finalizer may wait for a lock while its thread is in here, and be
        # done with it before that goes on.
        self._lock = threading.RLock()
        self._waiters: dict[bytes, Waiter] = {}
        self._listening: set[int] = set()
        self._process = f"{prefix}{LINE_SUFFIX}:{secrets.token_hex(8)}"
        self.channel = self._process.encode("utf-8", "surrogatepass")
        self._subscriptions = [NodeSubscription(self, *node) for node in enumerate(addresses)]
        self._started = False

    @contextmanager
    def waiter(self) -> Iterator[Waiter]:
        """Make a waiter that can be called as long as the block runs."""
        waiter = Waiter(self._quorum, self._listening, self._process)
        name = waiter.name.encode()
        with self._lock:
            if not self._started:
                self._started = True
                for subscription in self._subscriptions:
                    subscription.start()
            self._waiters[name] = waiter
        try:
            yield waiter
        finally:
            self._waiters.pop(name, None)

    def close(self) -> None:
        """Stop listening, and wake all waiters: there is nothing to wait for any more."""
        with self._lock:
            for subscription in self._subscriptions:
                subscription.close()
            for waiter in list(self._waiters.values()):
                waiter.closed = True
                waiter.news.set()

    def called(self, node: int, name: bytes) -> None:
        """Pass on the call of a node; a reader is called by its name with `SHARED` behind."""
        with self._lock:
            waiter = self._waiters.get(name.removesuffix(SHARED.encode()))
            if waiter is not None:
                waiter.hear(node)

    def subscribed(self, node: int) -> None:
        """Note that a node's calls are heard from now on; it may have called waiters before."""
        with self._lock:
            self._listening.add(node)
            for waiter in list(self._waiters.values()):
                waiter.hear(node, popped=False)

    def disconnected(self, node: int) -> None:
        """Note that a node's calls are no longer heard."""
        with self._lock:
            self._listening.discard(node)


class NodeSubscription:
    """Listens to one node, in its own thread."""

    def __init__(self, subscriber: ReleaseSubscriber, node: int, address: Address) -> None:
        self.node = node
        self._subscriber = subscriber
        self._address = address
        self._closing = threading.Event()
        self._subscription: Subscription | None = None

    def start(self) -> None:
        name = f"celery_redlock listen {self._address.name}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def close(self) -> None:
        """End the thread. It alone closes the connection, which it may just be reading from."""
        self._closing.set()
        if self._subscription is not None:
            self._subscription.interrupt()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._subscription = subscription = subscribe(self._address, self._subscriber.channel)
            try:
                for name in subscription.calls():
                    if self._closing.is_set():
                        break
                    if name is None:
                        self._subscriber.subscribed(self.node)
                    else:
                        self._subscriber.called(self.node, name)
            except Exception as error:  # also a credential provider's
                # Waiters poll meanwhile; the node itself complains where it matters.
                why = subscription.reason(error)
                logger.debug("not listening to %s: %s", self._address.name, why)
            finally:
                self._subscription = None
                self._subscriber.disconnected(self.node)
                subscription.close()
            self._closing.wait(JITTER.uniform(0, RECONNECT_S))
