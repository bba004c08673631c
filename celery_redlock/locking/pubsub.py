"""Wakes those who wait for a resource when a majority of the nodes announces its release.

Every release is published on the channel that is named as the key. A waiter subscribes *before* it
tries again, or the release between its try and its subscription would be missed; so the
confirmation of a subscription counts as news of that node, like an announcement. One node's news
does not make a majority free: a waiter is woken once a quorum of nodes had news since its last try.

One connection and one thread per node, made when somebody first waits.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeVar

from ..protocol.commands import LINE_SUFFIX
from ..protocol.errors import NodeError, NotAcquired, QuorumUnavailable, ResourceHeld
from ..protocol.values import quorum_of
from ..runtime.event import SafeEvent
from ..runtime.polling import WAITS, Poll
from ..stores.redis.address import Address
from ..stores.redis.resp import SIZE, Replies, reason
from .wait_queue import JITTER, POLL, POLL_MAX, QueueEntry, split

__all__ = ["ReleaseSubscriber", "Waiter"]

T = TypeVar("T")

logger = logging.getLogger("celery_redlock.wakeup")

RETRY = 1.0
"""Seconds, at most and at random, between attempts to connect; polling bridges the gap."""

STALLED = 1.0
"""Seconds for which a node may read nothing of what it is told, before it is given up."""
UNSENT = 4 * 2**20
"""Bytes that it may leave unread, though it goes on reading: of 8 000 long names."""
IDLE, SLICE = 1.0, 0.002
"""Seconds of waiting for a node at a time; and while it has not read all that it was told."""


class Waiter:
    """One who waits for a resource.

    Attributes:
        news: Rings when a quorum of nodes announced a release since `forget()`.
    """

    def __init__(self, quorum: int, channels: Mapping[str, bytes]) -> None:
        self.news = SafeEvent()
        self._channels = channels
        self._heeded: set[bytes] | None = None
        self.closed = False
        self._quorum = quorum
        self._heard: set[int] = set()
        self._listening: set[int] = set()

    def forget(self) -> None:
        """Count news from now on, of whichever resource: call it right before a try."""
        self._heeded = None
        self._heard.clear()
        self.news.clear()

    def only(self, resources: Iterable[str]) -> None:
        """Count from now on only news of some of the resources, until the next try."""
        self._heeded = {self._channels[resource] for resource in resources}

    def retry(self, attempt: Callable[[], T], wait: float, free_in: Callable[[], float]) -> T:
        """Make attempts until one succeeds.

        Args:
            attempt: Raises NotAcquired if it fails.
            wait: How long to go on trying, in seconds.
            free_in: Asks the nodes in how many seconds a quorum is free, should its holder have
                died without a word.

        Raises:
            NotAcquired: The last attempt's.
        """
        # Only who waits pays for this import.
        from tenacity import (
            RetryCallState,
            Retrying,
            retry_if_exception_type,
            stop_after_delay,
            wait_random_exponential,
        )

        until = monotonic() + wait
        jitter = wait_random_exponential(multiplier=POLL, max=POLL_MAX)

        def pause(state: RetryCallState) -> float:
            # After a split vote, or where no release can be announced to us: full jitter, soon.
            seconds = jitter(state)
            error = state.outcome.exception() if state.outcome else None
            if isinstance(error, QuorumUnavailable) and error.retry_after is not None:
                seconds = max(seconds, error.retry_after)
            if self.informed and isinstance(error, ResourceHeld) and not split(error):
                with contextlib.suppress(QuorumUnavailable):  # its release will be announced
                    seconds = max(seconds, free_in())
            return max(0.0, min(seconds, until - monotonic()))

        return Retrying(
            retry=retry_if_exception_type(NotAcquired),
            stop=lambda state: self.closed or stop_after_delay(wait)(state),
            wait=pause,
            sleep=self._sleep,
            reraise=True,
        )(attempt)

    def _sleep(self, seconds: float) -> None:
        self.news.wait(seconds)

    @property
    def informed(self) -> bool:
        """Whether a quorum of nodes will tell us of a release; else poll."""
        return len(self._listening) >= self._quorum

    def _hear(self, node: int, channel: bytes) -> None:
        self._listening.add(node)
        heeded = self._heeded
        if heeded is not None and channel not in heeded:
            return
        self._heard.add(node)
        if len(self._heard) >= self._quorum:
            self.news.set()

    def _disconnected(self, node: int) -> None:
        self._listening.discard(node)


class ReleaseSubscriber:
    """The subscriptions of one process. Not to be used after a fork."""

    def __init__(self, addresses: Sequence[Address], prefix: str) -> None:
        self._prefix = prefix
        self._quorum = quorum_of(len(addresses))
        # A signal handler or a finalizer may wait for a lock while its thread is just in here; and
        # be done with it before that goes on.
        self._lock = threading.RLock()
        self._waiters: dict[bytes, list[Waiter]] = {}
        self._ears = [
            NodeSubscription(self, index, address) for index, address in enumerate(addresses)
        ]
        self._started = False
        self._places: dict[bytes, QueueEntry] = {}
        self._attentive: set[int] = set()
        self._process = f"{prefix}{LINE_SUFFIX}:{secrets.token_hex(8)}"
        self.channel = self._process.encode("utf-8", "surrogatepass")

    @contextmanager
    def waiting(self, *resources: str) -> Iterator[Waiter]:
        """A waiter for news of any of `resources`, as long as the block runs."""
        names = {r: (self._prefix + r).encode("utf-8", "surrogatepass") for r in resources}
        waiter = Waiter(self._quorum, names)
        channels = list(names.values())
        with self._lock:
            self._start()
            for channel in channels:
                self._waiters.setdefault(channel, []).append(waiter)
            for ear in self._ears:
                # Asked again where somebody listens already: the confirmation is this one's news.
                ear.tell(b"SUBSCRIBE", *channels)
        try:
            yield waiter
        finally:
            with self._lock:
                for channel in channels:
                    self._waiters[channel].remove(waiter)
                    if not self._waiters[channel]:
                        self._waiters.pop(channel, None)
                        for ear in self._ears:
                            ear.tell(b"UNSUBSCRIBE", channel)

    @contextmanager
    def in_line(self) -> Iterator[QueueEntry]:
        """A place in the line for a resource, as long as the block runs."""
        place = QueueEntry(self._quorum, self._attentive, self._process)
        name = place.name.encode()
        with self._lock:
            self._start()
            self._places[name] = place
        try:
            yield place
        finally:
            self._places.pop(name, None)

    def _start(self) -> None:
        if not self._started:
            self._started = True
            for ear in self._ears:
                ear.start()

    def close(self) -> None:
        """Stop listening, and wake everybody: there is nothing to wait for any more."""
        with self._lock:
            for ear in self._ears:
                ear.close()
            for waiters in list(self._waiters.values()):
                for waiter in waiters:
                    waiter.closed = True
                    waiter.news.set()
            for place in list(self._places.values()):
                place.closed = True
                place.news.set()

    def _subscribe_all(self, ear: NodeSubscription, connection: Any) -> None:
        with self._lock:
            ear.connected(connection)
            ear.tell(b"SUBSCRIBE", self.channel)
            for channel in list(self._waiters):
                ear.tell(b"SUBSCRIBE", channel)

    def _hear(self, node: int, channel: bytes, called: bytes) -> None:
        with self._lock:
            if channel == self.channel:
                place = self._places.get(called)
                if place is not None:
                    place.hear(node)
                return
            for waiter in tuple(self._waiters.get(channel, ())):
                waiter._hear(node, channel)

    def _attend(self, node: int) -> None:
        """From now on we hear whom a node calls; it may have called some of us before."""
        with self._lock:
            self._attentive.add(node)
            for place in list(self._places.values()):
                place.hear(node, popped=False)

    def _disconnected(self, ear: NodeSubscription) -> None:
        with self._lock:
            ear.connection = None
            self._attentive.discard(ear.node)
            for waiters in list(self._waiters.values()):
                for waiter in waiters:
                    waiter._disconnected(ear.node)


class NodeSubscription:
    """Listens to one node, in a thread of its own.

    Anybody writes, and none ever waits for the node: all is done with the lock held, on a socket
    that does not block. What it does not take at once is sent by the thread.
    """

    def __init__(self, wakeup: ReleaseSubscriber, node: int, address: Address) -> None:
        self.node = node
        self.connection: Any = None
        self._socket: Any = None
        self._wakeup = wakeup
        self._address = address
        self._closing = threading.Event()
        self._unconfirmed = 0
        self._unsent = bytearray()
        self._clogged: float | None = None
        self._sending = False

    def start(self) -> None:
        name = f"celery_redlock listen {self._address.name}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def connected(self, connection: Any) -> None:
        self.connection = connection
        # redis-py forgets its socket as soon as a read fails, in the reader's thread, at any time.
        self._socket = connection._sock
        self._socket.setblocking(False)
        self._unconfirmed = 0
        self._unsent.clear()
        self._clogged = None
        if self._closing.is_set():
            self._hang_up()

    def tell(self, command: bytes, *channels: bytes) -> None:
        if self.connection is None:
            return
        self._unconfirmed += len(channels)
        for piece in self.connection.pack_command(command, *channels):
            self._unsent += piece
        self._send()

    def _send(self) -> None:
        """Write as much as the socket takes."""
        if self._sending:
            return  # a signal handler's, in the midst of another: that one goes on with it
        self._sending = True
        try:
            while self._unsent and self.connection is not None:
                del self._unsent[: self._socket.send(bytes(self._unsent[:SIZE]))]
                self._clogged = None
        except WAITS:
            now = monotonic()
            self._clogged = now if self._clogged is None else self._clogged
            if now - self._clogged > STALLED or len(self._unsent) > UNSENT:
                self._hang_up()
        except BaseException as error:
            # A time limit may strike between the socket and the buffer, with any exception: no
            # system call raises without a number.
            self._hang_up()
            if not isinstance(error, OSError) or error.errno is None:
                raise
        finally:
            self._sending = False

    def close(self) -> None:
        self._closing.set()
        if self.connection is not None:
            self._hang_up()

    def _hang_up(self) -> None:
        """End the reader's wait. It alone closes the connection: it may be in the midst of it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.connection = None

    def _run(self) -> None:
        while not self._closing.is_set():
            connection = self._address.connection()
            try:
                connection.connect()
                if connection.can_read():
                    raise NodeError("it sent what nobody asked for")
                self._wakeup._subscribe_all(self, connection)
                self._listen(self._socket)
            except Exception as error:  # also a credential provider's
                # Waiters poll meanwhile; the node itself complains where it matters.
                logger.debug("not listening to %s: %s", self._address.name, reason(error))
            finally:
                self._wakeup._disconnected(self)
                connection.disconnect()
            self._closing.wait(JITTER.uniform(0, RETRY))

    def _listen(self, stream: Any) -> None:
        """Hand on what is announced, until the connection ends."""
        replies, poll = Replies(), Poll()
        poll.watch(self.node, stream.fileno())
        channel = self._wakeup.channel
        call = b"*3\r\n$7\r\nmessage\r\n$%d\r\n%b\r\n$" % (len(channel), channel)
        while True:
            readable = poll.wait(SLICE if self._unsent else IDLE)
            with self._wakeup._lock:
                if self._unsent:
                    self._send()
                if self.connection is None:
                    raise NodeError("given up: it does not read, or we are closing")
                try:
                    data = stream.recv(SIZE) if readable else None
                except WAITS:
                    continue
            if data is None:
                continue
            if not data:
                raise NodeError("connection closed by the server")
            if data.startswith(call) and data.count(b"\r\n") == 7 and not replies.partial:
                # A shortcut: a waiter waits for this.
                self._wakeup._hear(self.node, channel, data.split(b"\r\n")[6])
                continue
            for reply in replies.feed(data, monotonic()):
                if isinstance(reply, Exception):
                    raise reply
                self._told(*reply)

    def _told(self, kind: bytes, channel: bytes, what: Any) -> None:
        """Hand on one announcement, or one confirmation."""
        if kind == b"message":
            self._wakeup._hear(self.node, channel, what)
            return
        with self._wakeup._lock:
            self._unconfirmed -= 1
            if self._unconfirmed < 0 or kind not in (b"subscribe", b"unsubscribe"):
                # It would be written to without end, if these were believed.
                raise NodeError("it confirms what nobody asked for")
        if kind == b"unsubscribe":
            return
        if channel == self._wakeup.channel:
            self._wakeup._attend(self.node)
        else:
            self._wakeup._hear(self.node, channel, what)
