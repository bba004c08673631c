"""Stores of a campaign's locks.

Five Redis nodes, an etcd cluster of three, or one PostgreSQL database. That one keeps over a crash
all that it has acknowledged; "forgetful" acknowledges commits before they are on the disk
(`synchronous_commit`), and loses some.
"""

from __future__ import annotations

from typing import Any

from celery_redlock.server import LocalServer
from celery_redlock.stores.etcd.questions import granted_for
from celery_redlock.testing.etcd import LocalEtcd
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import etcd, postgres
from tests.support.eyes import Server

STORES = ("redis", "postgresql", "forgetful", "etcd")
NODES = 5
LASTING = ("--appendonly", "yes", "--appendfsync", "always")
DEBUG = ("--enable-debug-command", "local")
POSTGRES = {"fsync": "on", "full_page_writes": "on"}
FORGETFUL = {"synchronous_commit": "off", "wal_writer_delay": "10s", "fsync": "on"}


def make_nodes(store: str) -> list[Any]:
    """Return the servers of a store, not started."""
    if store == "redis":
        return [LocalServer(config=(*DEBUG, *(LASTING if n < 2 else ()))) for n in range(NODES)]
    if store == "etcd":
        assert not etcd.missing(), etcd.missing()
        return [LocalEtcd(3)]
    assert not postgres.missing(), postgres.missing()
    return [LocalPostgres(**(FORGETFUL if store == "forgetful" else POSTGRES))]


def prepare(node: Server) -> None:
    """Make what locks are kept in, on a server that has just been started."""
    if isinstance(node, LocalPostgres):
        postgres.sql(node, postgres.SCHEMA)


def url_at(node: Server, port: int) -> str:
    """Return a node's URL, through a link; for a cluster that of its first member."""
    if isinstance(node, LocalEtcd):
        return node.url.replace(f":{node.port},", f":{port},")
    return node.url.replace(f":{node.port}/", f":{port}/")


def lasting(store: str, ttl: float) -> float:
    """Return for how long a key that is put for a ttl may live in a store; seconds.

    Leases of etcd are shared, for whole seconds, and start over with a new leader.
    """
    return 2 * granted_for(ttl) + 1.0 if store == "etcd" else ttl
