"""Notice that Sentinels have named another master, although the old one still answers.

After `SENTINEL FAILOVER`, or if it only hung, the old master goes on granting locks for ten seconds
and more before a Sentinel makes it a replica. So we subscribe to all Sentinels, and leave the old
master with the next request after one of them has announced another. That costs no thread: the
kernel buffers an announcement until we read it, before each request to the master.
"""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from ...protocol.errors import NodeError
from ...runtime.clock import monotonic
from ...runtime.polling import SIZE, WAITS
from ..secrecy import is_among
from .address import SentinelAddress
from .handshake import ask
from .requests import request
from .resp import Replies

__all__ = ["MasterWatch"]

SWITCHED = b"+switch-master"
"""The channel on which a Sentinel announces new masters, of all services."""
LOOK_S = 0.1
"""Seconds between two reads of the Sentinels' announcements."""
SEEK_S = 1.0
"""Seconds between two attempts to subscribe to a Sentinel without a subscription. A Sentinel that
does not allow one is asked for the master that often instead."""
REST_S = 0.25
"""Seconds to wait for the other Sentinels once one has answered."""
POLL_S = 0.01
"""Seconds between two checks for answers of Sentinels."""


class MasterReport(NamedTuple):
    """The answer of a Sentinel.

    Attributes:
        epoch: The version of its configuration; the highest is right.
        host, port: The address of the master.
    """

    epoch: int
    host: str
    port: int


class MasterWatch:
    """The Sentinels' answers about the master of one service.

    Args:
        address: The service.
    """

    def __init__(self, address: SentinelAddress) -> None:
        self._address = address
        self._lock = threading.RLock()
        self._links: dict[int, tuple[Any, Replies]] = {}  # our subscription to each Sentinel
        self._reports: dict[int, MasterReport] = {}
        self._opening: dict[int, threading.Thread] = {}
        self._master: tuple[str, int] | None = None
        self._looked = self._sought = 0.0

    def master(self) -> dict[str, Any]:
        """Ask all Sentinels; return the master's address as arguments of a connection.

        It blocks. The result is empty if none answers, or none permits the question.

        Raises:
            NodeError: All of them name hosts that the node's URL does not list.
        """
        with self._lock:
            self.close()
            self._seek()
        until = math.inf
        while (opening := self._alive()) and monotonic() < until:
            opening[0].join(POLL_S)
            if self._reports:
                until = min(until, monotonic() + REST_S)
        with self._lock:
            places = self._newest()
            self._master = places[0] if places else None
        return self._address.at(*places[0]) if places else {}

    def moved(self, now: float) -> bool:
        """Return True if the Sentinels have named another master since. Does not block."""
        if now < self._looked + LOOK_S:
            return False
        self._looked = now
        with self._lock:
            announced = any([self._announced(index, now) for index in list(self._links)])
            if announced:
                return True  # then `master` asks them all
            if len(self._links) < len(self._address.sentinels) and now > self._sought + SEEK_S:
                self._sought = now
                self._seek()
            places = self._newest()
        return bool(self._master and places and self._master not in places)

    def close(self) -> None:
        """Close the connections to the Sentinels."""
        with self._lock:
            for index in list(self._links):
                self._unlink(index)
            self._reports.clear()

    def _newest(self) -> list[tuple[str, int]]:
        """Return the master's address by the newest configuration: usually one address, or none.

        An answer that names a host that is not allowed counts only if there is no other.
        """
        reports = list(self._reports.values())
        reports = [
            report for report in reports if is_among(report.host, self._address.masters)
        ] or reports
        epoch = max((report.epoch for report in reports), default=0)
        return [(report.host, report.port) for report in reports if report.epoch == epoch]

    def _announced(self, index: int, now: float) -> bool:
        """Read a Sentinel's announcements; return True if one is about our service.

        That ends the connection. The next one reads the Sentinel's new configuration.
        """
        connection, replies = self._links[index]
        try:
            data = connection._sock.recv(SIZE)
            service = self._address.service.encode() + b" "
            announced = [reply[2].startswith(service) for reply in replies.feed(data, now)]
        except WAITS:
            return False
        except Exception:
            self._unlink(index)
            return False
        except BaseException:
            self._unlink(index)  # interrupted, perhaps in the middle of an announcement
            raise
        if not data or any(announced):
            self._unlink(index)
        return any(announced)

    def _unlink(self, index: int) -> None:
        self._links.pop(index)[0].disconnect()

    # -- In short-lived threads

    def _alive(self) -> list[threading.Thread]:
        return [thread for thread in list(self._opening.values()) if thread.is_alive()]

    def _seek(self) -> None:
        """Begin to ask the Sentinels without a subscription."""
        for index, sentinel in enumerate(self._address.sentinels):
            running = self._opening.get(index)
            if index in self._links or (running is not None and running.is_alive()):
                continue
            name = f"celery_redlock sentinel {sentinel.name}"
            thread = threading.Thread(target=self._open, args=(index,), name=name, daemon=True)
            self._opening[index] = thread
            thread.start()

    def _open(self, index: int) -> None:
        sentinel = self._address.sentinels[index]
        try:
            connection, (report, subscribed) = sentinel.connect(self._greet, client_name=None)
        except NodeError:
            with self._lock:
                self._reports.pop(index, None)
            return
        with self._lock:
            self._reports[index] = report
            if subscribed:
                self._links[index] = connection, Replies()
        if not subscribed:
            connection.disconnect()

    def _greet(self, connection: Any) -> tuple[MasterReport, bool]:
        service = self._address.service.encode()
        # Sent at once, so that the Sentinel executes nothing else in between.
        state, place, subscribed = ask(
            connection,
            [
                request(b"SENTINEL", b"MASTER", service),
                request(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", service),
                request(b"SUBSCRIBE", SWITCHED),
            ],
        )
        for reply in (state, place):
            if isinstance(reply, ResponseError):
                raise reply
        said = dict(zip(state[::2], state[1::2], strict=True))
        if int(said[b"num-other-sentinels"]) < self._address.sentinel.min_other_sentinels:
            raise NodeError("it knows too few other Sentinels")
        report = MasterReport(int(said[b"config-epoch"]), place[0].decode(), int(place[1]))
        return report, not isinstance(subscribed, ResponseError)
