"""Requests about locks that an etcd cluster receives, with the process of each, from a proxy."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

from celery_redlock.stores.etcd.wire import Keys, value_of
from celery_redlock.testing.etcd import LocalEtcd
from tests.support.cluster import Cluster
from tests.support.monitor import VerbMonitor
from tests.support.proxy import Proxy

_LENGTH = re.compile(rb"content-length: *(\d+)", re.I)


class Tap(Proxy):
    """A proxy that reports the requests of each client before the server receives them."""

    def __init__(self, port: int, comes: Callable[[str], None], asks: Callable[..., None]) -> None:
        self._comes, self._asks = comes, asks
        super().__init__(port)

    def _take(self, client: socket.socket) -> None:
        # Beside: to find out whose it is takes longer than some may wait for an answer.
        port = str(client.getpeername()[1])
        threading.Thread(target=self._comes, args=(port,), daemon=True).start()
        super()._take(client)

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        unread, port = b"", str(client.getpeername()[1])
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                unread += data
                while (end := unread.find(b"\r\n\r\n") + 4) > 3:
                    length = _LENGTH.search(unread[:end])
                    until = end + int(length[1] if length else 0)
                    if len(unread) < until:
                        break
                    self._asks(port, json.loads(unread[end:until] or b"{}"))
                    unread = unread[until:]
                server.sendall(data)
        server.close()


class EtcdMonitor(VerbMonitor):
    """The same as of a Redis node. Workers that are started from now on ask through it."""

    longer = 2.0
    """Seconds beyond a ttl of one second: leases last two at least, and end at half seconds."""

    def __init__(self, cluster: Cluster) -> None:
        (node,) = cluster.nodes
        assert isinstance(node, LocalEtcd)
        self._seen: list[tuple[str, str]] = []
        self._pids: dict[str, int] = {}
        self._locks = Keys("redlock:").locks
        self._tap = Tap(node.port, self._find, self._hear)
        self._node = f"0100007F:{self._tap.port:04X}"
        cluster.conf["redlock_nodes"] = [f"etcd://127.0.0.1:{self._tap.port}"]

    def __enter__(self) -> EtcdMonitor:
        return self

    def __exit__(self, *error: Any) -> None:
        self._tap.__exit__(*error)

    def _caught_up(self) -> None:
        """Do nothing: the request of each client was seen before its answer."""

    def _hear(self, port: str, asked: dict[str, Any]) -> None:
        """Note what a transaction would do, and those that are in it."""
        compared = asked.get("compare", ())
        token = next((value_of(one["value"]) for one in compared if "value" in one), b"")
        for part in asked.get("success", ()):
            if "requestTxn" in part:
                self._hear(port, part["requestTxn"])
            elif put := part.get("requestPut"):
                verb = "extend" if token else "acquire"
                self._note(port, verb, put["key"], value_of(put["value"]))
            elif (gone := part.get("requestDeleteRange")) and token:
                verb = "undo" if len(asked["success"]) == 1 else "release"  # it calls no one
                self._note(port, verb, gone["key"], token)

    def _note(self, port: str, verb: str, key: str, token: bytes) -> None:
        name = value_of(key)
        if name.startswith(self._locks):
            name = b"redlock:" + name[len(self._locks) :]
            self._seen.append((port, f"{verb} {name.decode()} {token.decode()}"))
