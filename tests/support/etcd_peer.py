"""An etcd cluster in the test's own process: its keys are a dictionary, its members are scripts."""

from __future__ import annotations

import json
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.support.peer import Line, Peer

__all__ = ["EtcdPeer", "MemoryEtcd", "Post", "coded", "http"]

MAX_OPS = 128
"""Operations of one transaction that a server takes, as by default."""


class MemoryEtcd:
    """The keys and leases of one cluster, and what it answers to a request.

    Attributes:
        cluster: Its id.
        elapsed: Seconds since all leases were granted.
        leases: For how many seconds each lease was granted, by its id.
        asked: Every request that it has answered: the path and the body.
    """

    def __init__(self, cluster: str = "77") -> None:
        self.cluster = cluster
        self.elapsed = 0
        self.leases: dict[str, int] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._revision = 1
        self._kvs: dict[bytes, dict[str, str]] = {}
        self._lock = threading.Lock()

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one request."""
        with self._lock:
            self.asked.append((path, body))
            answers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
                "kv/txn": self._txn,
                "kv/range": self._range,
                "lease/grant": self._grant,
                "lease/timetolive": self._timetolive,
                "maintenance/status": lambda _body: {"version": "3.5.21", "leader": "1"},
                "auth/authenticate": lambda _body: {"token": "a token"},
            }
            return {"header": {"cluster_id": self.cluster}, **answers[path](body)}

    def put(self, key: bytes, value: bytes, lease: str = "") -> None:
        """Put a key, as another program does."""
        with self._lock:
            self._put({"key": coded(key), "value": coded(value), "lease": lease})

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key, or None."""
        kv = self._kvs.get(key)
        return b64decode(kv["value"]) if kv else None

    def lease_of(self, key: bytes) -> str:
        """Return the lease that a key was put with."""
        return self._kvs[key]["lease"]

    @property
    def keys(self) -> list[bytes]:
        return sorted(self._kvs)

    def _txn(self, body: dict[str, Any]) -> dict[str, Any]:
        good = all(map(self._holds, body.get("compare", ())))
        ops = body.get("success" if good else "failure", ())
        if _size(body) > MAX_OPS:
            return {"code": 3, "error": "etcdserver: too many operations in txn request"}
        done = [self._operation(*next(iter(op.items()))) for op in ops]
        return {**({"succeeded": True} if good else {}), **({"responses": done} if done else {})}

    def _operation(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if name == "requestTxn":
            return {"response_txn": self._txn(body)}
        if name == "requestRange":
            return {"response_range": self._range(body)}
        if name == "requestPut":
            return {"response_put": self._put(body)}
        found = self._found(body)
        for key in found:
            del self._kvs[key]
        return {"response_delete_range": {"deleted": str(len(found))} if found else {}}

    def _holds(self, compare: dict[str, str]) -> bool:
        kv = self._kvs.get(b64decode(compare["key"]))
        if compare["target"] == "VALUE":
            return kv is not None and kv["value"] == compare["value"]
        field = {"CREATE": "create_revision", "LEASE": "lease"}[compare["target"]]
        there, other = int((kv or {}).get(field) or 0), int(compare[field])
        result = compare["result"]
        return {"EQUAL": there == other, "GREATER": there > other, "LESS": there < other}[result]

    def _put(self, body: dict[str, Any]) -> dict[str, Any]:
        key, self._revision = b64decode(body["key"]), self._revision + 1
        before = self._kvs.get(key, {})
        lease = before.get("lease", "") if body.get("ignore_lease") else body.get("lease", "")
        created = before.get("create_revision", str(self._revision))
        self._kvs[key] = {
            **{"key": body["key"], "value": body.get("value", "")},
            **{"create_revision": created, "lease": lease},
        }
        return {}

    def _found(self, body: dict[str, Any]) -> list[bytes]:
        start = b64decode(body["key"])
        if "range_end" not in body:
            return [start] if start in self._kvs else []
        end = b64decode(body["range_end"])
        return [key for key in sorted(self._kvs) if start <= key < end]

    def _range(self, body: dict[str, Any]) -> dict[str, Any]:
        found = [self._kvs[key] for key in self._found(body)]
        if body.get("sort_target") == "VALUE":
            found.sort(key=lambda kv: b64decode(kv["value"]))
        if body.get("count_only") or not found:
            return {"count": str(len(found))}
        limit = int(body.get("limit", len(found)))
        kvs = [{name: it for name, it in kv.items() if it} for kv in found[:limit]]
        if body.get("keys_only"):
            kvs = [{name: it for name, it in kv.items() if name != "value"} for kv in kvs]
        more = {"more": True} if len(found) > limit else {}
        return {"kvs": kvs, "count": str(len(found)), **more}

    def _grant(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["ID"] in self.leases:
            return {"code": 9, "error": "etcdserver: lease already exists"}
        self.leases[body["ID"]] = int(body["TTL"])
        return {"ID": body["ID"], "TTL": body["TTL"]}

    def _timetolive(self, body: dict[str, Any]) -> dict[str, Any]:
        granted = self.leases.get(body["ID"])
        if granted is None or granted < self.elapsed:
            return {"ID": body["ID"], "TTL": "-1"}
        return {"ID": body["ID"], "TTL": str(granted - self.elapsed), "grantedTTL": str(granted)}


class Post(NamedTuple):
    """A request as a member reads it."""

    path: str
    body: dict[str, Any]
    head: dict[str, str]


class EtcdPeer(Peer):
    """A member of a cluster.

    Attributes:
        etcd: Its cluster.
        chunked: Whether its answers are sent in chunks, of so many bytes.
        greeted: The requests of handshakes.
        said: What it answers to a path of the handshake instead.
    """

    def __init__(
        self,
        script: Callable[[Line], object] | None = None,
        etcd: MemoryEtcd | None = None,
        *,
        chunked: int = 0,
    ) -> None:
        self.etcd = etcd or MemoryEtcd()
        self.chunked = chunked
        self.greeted: list[Post] = []
        self.said: dict[str, dict[str, Any]] = {}
        super().__init__(script)

    @property
    def url(self) -> str:
        return f"etcd://127.0.0.1:{self.port}"

    def read(self, file: Any) -> Post | None:
        first = file.readline()
        if not first.endswith(b"\r\n"):
            return None
        head = {}
        while (field := file.readline()) not in (b"\r\n", b""):
            name, _, value = field.decode().partition(":")
            head[name.lower()] = value.strip()
        body = file.read(int(head.get("content-length", 0)))
        path = first.split()[1].decode().removeprefix("/v3/")
        return Post(path, json.loads(body or b"{}"), head)

    def greeting(self, asked: Post) -> bytes | None:
        own = ("maintenance/status", "auth/authenticate")
        if asked.path not in own and not asked.body.get("count_only"):
            return None
        self.greeted.append(asked)
        return self.http(self.said.get(asked.path) or self.etcd.ask(asked.path, asked.body))

    def answer(self, asked: Post) -> bytes:
        return self.http(self.etcd.ask(asked.path, asked.body))

    def http(self, said: dict[str, Any]) -> bytes:
        """Return an answer as this member writes it."""
        return http(said, chunked=self.chunked)


def http(said: Any, *, chunked: int = 0) -> bytes:
    """Return an answer as a member's gateway writes it."""
    body = json.dumps(said).encode()
    status = 400 if isinstance(said, dict) and "code" in said else 200
    head = b"HTTP/1.1 %d OK\r\nContent-Type: application/json\r\n" % status
    if not chunked:
        return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
    parts = [body[at : at + chunked] for at in range(0, len(body), chunked)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"%bTransfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % (head, chunks)


def coded(raw: bytes) -> str:
    """Return bytes as they stand in a body."""
    return b64encode(raw).decode()


def _size(body: dict[str, Any]) -> int:
    """Return how many operations a transaction has, with those that are in one another."""
    each = [*body.get("success", ()), *body.get("failure", ())]
    inner = [_size(op["requestTxn"]) for op in each if "requestTxn" in op]
    return max(len(body.get("success", ())), len(body.get("failure", ()))) + max(inner, default=0)
