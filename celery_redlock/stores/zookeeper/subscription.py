"""The subscription of one process to a ZooKeeper ensemble."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from typing import Any

from kazoo.protocol.states import EventType

from ...protocol.errors import NodeError
from ...runtime.polling import SIZE
from ..subscription import Subscription
from .address import ZooKeeperAddress
from .store import ZooKeeperStore, call_path, calls_in

__all__ = ["ZooKeeperSubscription"]


class ZooKeeperSubscription(Subscription):
    """A watch, in a session of its own, of an ephemeral node that lists the latest notifications.

    A release writes into that node which waiter is notified; if it is missing, nobody listens.
    """

    reason = staticmethod(ZooKeeperStore.reason)

    def __init__(self, address: ZooKeeperAddress, channel: bytes) -> None:
        self._path = call_path(channel.decode("utf-8", "surrogatepass"))
        self._store = ZooKeeperStore(address)
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        self._names: deque[bytes] = deque()
        self._last = 0
        self._over = ""

    def connect(self) -> None:
        """Connect and watch; see `Subscription.connect`."""
        self._store.connect()
        self._store.listen(self._path)
        self._look()

    def fileno(self) -> int:
        return self._ours.fileno()

    def read(self) -> list[bytes]:
        """Return the names of the waiters that were notified since the last read."""
        self._ours.recv(SIZE)
        if self._over:
            raise NodeError(self._over)
        return [self._names.popleft() for _ in range(len(self._names))]

    def close(self) -> None:
        """Close the session. A thread waits for that."""
        threading.Thread(target=self._store.close, daemon=True).start()
        for end in (self._ours, self._theirs):
            end.close()

    # -- Called by threads of kazoo

    def _look(self, event: Any = None) -> None:
        """Read the notifications, and watch for the next."""
        if event is not None and event.type != EventType.CHANGED:
            self._news("its node is gone, or the connection is lost")
        else:
            self._store.watch(self._path, self._look, self._take)

    def _take(self, asked: Any) -> None:
        try:
            data, _stat = asked.get(block=False)
            for number, name in calls_in(data):
                if number > self._last:
                    self._last = number
                    self._names.append(name.encode("utf-8", "surrogatepass"))
        except Exception as error:
            self._news(self.reason(error))
        else:
            if self._names:
                self._news("")

    def _news(self, over: str) -> None:
        self._over = self._over or over
        with contextlib.suppress(OSError):  # it is closed, or full, and then it is read
            self._theirs.send(b".")
