"""Read the locks of one etcd cluster, over a connection of its own.

Names and values are those that a Redis node would have: the last fencing token of a resource, and
its wait queue, have its name with a suffix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from time import monotonic
from typing import Any

from ...protocol.names import FENCE_SUFFIX, LINE_SUFFIX
from ..reading import MAX_TIMEOUTS, QUEUE, KeyValue, NodeReader, to_bytes, to_text
from .address import Connection, EtcdAddress, reason
from .questions import MAX_OPS, seconds_left
from .wire import END, Keys, above, number, text, value_of

__all__ = ["EtcdReader"]

MAX_REPLY_BYTES = 4 * 2**20
"""The longest answer: a page of the longest keys is three quarters of it."""
MAX_NODE_BYTES = 64 * 2**20
"""Bytes read from one cluster at most. The JSON of one answer at a time takes up to 24 times as
much memory."""
PAGE = 1000
"""Keys per answer."""
_SUFFIXED = re.compile(rb"#[a-z]+\d*\Z")


class EtcdReader(NodeReader):
    """Reader of one cluster; `keys` makes the keys under the prefix."""

    connection: Connection
    store = "etcd"

    def __init__(self, address: EtcdAddress, prefix: str, timeout: float) -> None:
        super().__init__(address, prefix, timeout)
        self.keys = Keys(prefix)

    def connect(self) -> None:
        """Connect to a member of the cluster.

        Raises:
            NodeError: None can be reached, or it refuses us.
        """
        # Each member may take the timeout: the cluster is not silent while one of them hangs.
        self.heard = monotonic() + self._timeout * (len(self._address.members) - 1)
        self.connection = self._address.connect(
            timeout=self._timeout,
            life=MAX_TIMEOUTS * self._timeout,
            largest=MAX_REPLY_BYTES,
            budget=MAX_NODE_BYTES,
        )
        self.heard = monotonic()

    def why(self, error: Exception) -> str:
        """Return the reason of a failed read, in one line without secrets; empty if too slow."""
        return "" if isinstance(error, TimeoutError) else reason(error)

    def _ping(self) -> object:
        return self.ask("maintenance/status")

    @property
    def peer(self) -> str:
        """The IP address at the other end."""
        return self.connection.peer

    def scan(self, head: str) -> dict[str, bytes]:
        """Return the keys that begin with prefix and `head`, by their names without the prefix."""
        keys, begin = self.keys, to_bytes(head)
        names = [key[len(keys.locks) :] for key, _ in self._range(keys.locks + begin, only=True)]
        lines = {
            key[len(keys.lines) :].rpartition(END)[0]
            for key, _ in self._range(keys.lines + begin, only=True)
        }
        # Only locks have a fencing token, not names with a suffix of ours.
        names += [n + to_bytes(FENCE_SUFFIX) for n in names if not _SUFFIXED.search(n)]
        names += [line + to_bytes(LINE_SUFFIX) for line in sorted(lines)]
        return {to_text(name): to_bytes(self.prefix) + name for name in names}

    def values(self, keys: Mapping[str, bytes]) -> dict[str, KeyValue]:
        """Return the values of some keys, by their names, without those that do not exist."""
        lines = {name: key for name, key in keys.items() if name.endswith(LINE_SUFFIX)}
        names = {n: self._name(key) for n, key in keys.items() if n not in lines}
        bases = list({name.removesuffix(FENCE_SUFFIX) for name in names.values()})
        kept: dict[str, dict[str, Any]] = {}
        for at in range(0, len(bases), MAX_OPS):
            batch = bases[at : at + MAX_OPS]
            gets = [{"requestRange": {"key": self.keys.lock(base)}} for base in batch]
            said = self.ask("kv/txn", success=gets)
            for base, part in zip(batch, said.get("responses", ()), strict=True):
                kept.update((base, kv) for kv in part["response_range"].get("kvs", ()))
        left = self._left({kv.get("lease", "") for kv in kept.values()})
        found = {}
        for n, name in names.items():
            if kv := kept.get(name.removesuffix(FENCE_SUFFIX)):
                fence = name.endswith(FENCE_SUFFIX)
                revision = b"%d" % number(kv.get("create_revision", 0))
                value = revision if fence else value_of(kv.get("value", ""))
                found[n] = KeyValue(value, left[kv.get("lease", "")])
        return {n: one for n, one in found.items() if one.left >= 0} | self.queues(lines, 1)

    def queues(self, keys: Mapping[str, bytes], members: int) -> dict[str, KeyValue]:
        """Return the wait queues under some keys, by their names, with their first `members`."""
        found = {}
        for name, key in keys.items():
            line = self.keys.line(self._name(key).removesuffix(LINE_SUFFIX))
            waiting = sorted(
                (number(value_of(kv["value"]).decode()), one[len(line) :], kv.get("lease", ""))
                for one, kv in self._range(line)
            )
            if waiting:
                left = self._left({waiting[-1][2]})[waiting[-1][2]]
                first = tuple((waiter, float(since)) for since, waiter, _ in waiting[:members])
                found[name] = KeyValue(QUEUE, max(0.0, left), len(waiting), first)
        return found

    def members(self) -> tuple[dict[str, str], frozenset[str]]:
        """Query each member alone; return by its name why it cannot be asked (empty if it can), and
        the ids of the members' clusters."""
        whys, clusters = {}, set()
        for host, port in self._address.members:
            name = f"{host}:{port}"
            one = replace(self._address, members=((host, port),))
            try:
                connection = one.connect(timeout=self._timeout)
                connection.close()
                clusters.add(connection.cluster)
                whys[name] = "" if connection.leads else "it has no leader"
            except Exception as error:
                whys[name] = reason(error)
            self.heard = monotonic()  # the cluster is not silent while a member is asked
        return whys, frozenset(clusters)

    def _name(self, key: bytes) -> str:
        return to_text(key[len(to_bytes(self.prefix)) :])

    def _range(self, start: bytes, *, only: bool = False) -> list[tuple[bytes, dict[str, Any]]]:
        """Return the keys that begin with `start`, with their values unless `only` is set."""
        end, found = above(start), []
        while True:
            asked = {"range_end": end, "limit": str(PAGE), "keys_only": only}
            said = self.ask("kv/range", key=text(start), **asked)
            found += [(value_of(kv["key"]), kv) for kv in said.get("kvs", ())]
            if not said.get("more"):
                return found
            start = found[-1][0] + b"\0"

    def _left(self, leases: set[str]) -> dict[str, float]:
        """Return the seconds that leases last: negative if they are over, infinite for no lease."""
        left = {"": math.inf}
        for lease in leases - {""}:
            left[lease] = seconds_left(self.ask("lease/timetolive", ID=str(number(lease))))
        return left

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """Send one request, and wait for the answer."""
        said = self.connection.ask(path, body)
        self.heard = monotonic()
        return said
