"""etcd clusters for tests: one a module, emptied before each test."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from celery_redlock.stores.etcd.address import parse
from celery_redlock.stores.etcd.wire import above, text
from celery_redlock.testing.etcd import LocalEtcd, find_etcd
from tests.support import wanting

__all__ = ["above", "as_new", "ask", "missing", "require", "start_etcd", "text"]


missing = functools.partial(wanting.missing, find_etcd)
require = functools.partial(wanting.require, find_etcd)


@contextlib.contextmanager
def start_etcd(members: int = 1, *options: str) -> Iterator[LocalEtcd]:
    """A cluster."""
    require()
    with LocalEtcd(members, *options) as server:
        yield server


def as_new(server: LocalEtcd) -> None:
    """Resume it, start it, empty it: whatever the last test did."""
    server.resume()
    server.start()
    ask(server, "kv/deleterange", key=text(b"\0"), range_end=text(b"\0"))


def ask(server: LocalEtcd, path: str, **body: Any) -> dict[str, Any]:
    """Ask one thing, over a connection of its own."""
    connection = parse(server.url, "nodes[0]").connect(timeout=10.0)
    try:
        return connection.ask(path, body)
    finally:
        connection.disconnect()
