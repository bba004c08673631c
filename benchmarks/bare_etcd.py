"""The bare limit of etcd: the fewest requests that are a lease, over one socket to its gateway.

One transaction to put a key where there is none, one to delete it where it is ours; a waiter
watches, and tries at each deletion. The lease that keys are bound to is granted ahead, and shared
for a sixteenth of its time, as ours is. What a lock library is for is left out, as in `bare.py`.
"""

from __future__ import annotations

import json
import os
import socket
from base64 import b64encode
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

BATCH = 60
"""Locks that are extended in one transaction, two operations each; a server takes 128."""


class Gateway:
    """A connection to a member."""

    def __init__(self, url: str) -> None:
        at = urlsplit(url.partition(",")[0])
        self.socket = socket.create_connection((at.hostname, at.port), 30.0)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self.socket.makefile("rb")

    def tell(self, *requests: tuple[str, Any]) -> None:
        said = b""
        for path, body in requests:
            raw = json.dumps(body).encode()
            head = f"POST /v3/{path} HTTP/1.1\r\nHost: etcd\r\nContent-Length: {len(raw)}\r\n\r\n"
            said += head.encode() + raw
        self.socket.sendall(said)

    def head(self) -> int | None:
        """Read the head of an answer; return how long it is, None if that is told in parts."""
        length, line = None, b""
        while (line := self._file.readline()) != b"\r\n":
            if line.lower().startswith(b"content-length:"):
                length = int(line[15:])
        return length

    def part(self) -> bytes:
        """Read a part of an answer; empty at its end."""
        part = self._file.read(int(self._file.readline(), 16) + 2)
        return part[:-2]

    def ask(self, *requests: tuple[str, Any]) -> list[Any]:
        """Return the answers to requests that are written at once."""
        self.tell(*requests)
        answers = []
        for _ in requests:
            length = self.head()
            body = b"".join(iter(self.part, b"")) if length is None else self._file.read(length)
            answers.append(json.loads(body))
        return answers


class BareEtcd:
    """A lease in the cluster at `url`."""

    def __init__(self, url: str, ttl: float = 10.0) -> None:
        self._url, self._ttl = url, ttl
        self._gateway = Gateway(url)
        self._tokens = os.urandom(12).hex()
        self._count = 0
        self._lease, self._until = "", 0.0

    def close(self) -> None:
        self._gateway.socket.close()

    def acquire(self, resource: str) -> str | None:
        """Return the token of a lock on `resource`, or None without one."""
        self._count += 1
        token, key = f"{self._tokens}{self._count:08x}", _text(resource)
        free = {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        asked = self._granted()
        put = {"requestPut": {"key": key, "value": _text(token), "lease": self._lease}}
        asked.append(("kv/txn", {"compare": [free], "success": [put]}))
        return token if self._gateway.ask(*asked)[-1].get("succeeded") else None

    def release(self, resource: str, token: str) -> bool:
        """Delete the lock if it is ours; return whether it was."""
        gone = {"requestDeleteRange": {"key": _text(resource)}}
        txn = {"compare": [_is(resource, token)], "success": [gone]}
        return bool(self._gateway.ask(("kv/txn", txn))[0].get("succeeded"))

    give = release

    def wait(self, resource: str, seconds: float) -> str | None:
        """Return the token of a lock on `resource`, or None if it is not free within `seconds`."""
        watcher = Gateway(self._url)
        watcher.tell(("watch", {"create_request": {"key": _text(resource), "filters": ["NOPUT"]}}))
        watcher.head()
        end = monotonic() + seconds
        watcher.part()  # it watches
        while (token := self.acquire(resource)) is None and (left := end - monotonic()) > 0:
            watcher.socket.settimeout(left)
            watcher.part()
        watcher.socket.close()
        return token

    def extend(self, held: dict[str, str]) -> int:
        """Extend many, resources and their tokens, by one new lease; return how many."""
        names, self._until = list(held), 0.0
        asked = self._granted()
        for at in range(0, len(names), BATCH):
            each = []
            for name in names[at : at + BATCH]:
                put = {"key": _text(name), "value": _text(held[name]), "lease": self._lease}
                txn = {"compare": [_is(name, held[name])], "success": [{"requestPut": put}]}
                each.append({"requestTxn": txn})
            asked.append(("kv/txn", {"success": each}))
        answers = self._gateway.ask(*asked)[1:]
        parts = [part["response_txn"] for said in answers for part in said["responses"]]
        return sum(part.get("succeeded", False) for part in parts)

    def _granted(self) -> list[tuple[str, Any]]:
        """What must be asked first, so that there is a lease that lasts."""
        now, shared = monotonic(), self._ttl / 16
        if now < self._until:
            return []
        self._lease, self._until = str(int.from_bytes(os.urandom(7), "big") + 1), now + shared
        return [("lease/grant", {"ID": self._lease, "TTL": str(round(self._ttl + shared + 0.5))})]


def _is(resource: str, token: str) -> dict[str, str]:
    return {"key": _text(resource), "target": "VALUE", "result": "EQUAL", "value": _text(token)}


def _text(text: str) -> str:
    return b64encode(text.encode()).decode()
