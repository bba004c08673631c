"""Servers of each kind of store, for tests that are the same over all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from celery_redlock.server import LocalServer, start_servers
from celery_redlock.testing.etcd import LocalEtcd
from celery_redlock.testing.postgresql import LocalPostgres
from tests import conftest
from tests.support import etcd, postgres

__all__ = ["Servers", "as_new", "start"]

Servers = list[LocalServer] | list[LocalPostgres] | list[LocalEtcd]


@contextlib.contextmanager
def start(kind: str, count: int = 3, **options: Any) -> Iterator[Servers]:
    """Some Redis servers, or the one of another kind; with options, as each kind has them."""
    if kind == "redis":
        with start_servers(count, **options) as started:
            yield started
    elif kind == "etcd":
        with etcd.start_etcd() as cluster:
            yield [cluster]
    else:
        with postgres.start_postgres(**options) as server:
            yield [server]


def as_new(servers: Servers) -> None:
    """Resume them, start them, empty them: whatever the last test did."""
    for server in servers:
        if isinstance(server, LocalPostgres):
            postgres.as_new(server)
        elif isinstance(server, LocalEtcd):
            etcd.as_new(server)
        else:
            conftest.as_new([server])
