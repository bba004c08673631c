"""Helpers for tests of every kind, besides fixtures."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_redlock import Redlock
from celery_redlock.keepalive.shared_table import SharedLeaseTable
from celery_redlock.protocol.names import TRUSTED_KEY
from celery_redlock.protocol.node_info import NodeInfo
from celery_redlock.server import LocalServer
from celery_redlock.testing.etcd import LocalEtcd
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support.wait import wait_until

T = TypeVar("T")

_ACL = Path(__file__).parents[2] / "docs" / "acl.md"
_RULE = re.search(r"^ACL SETUSER redlock (on .*)$", _ACL.read_text("utf-8"), re.M)
assert _RULE, "docs/acl.md has no ACL rule"
ACL_RULE = _RULE[1].split()
"""The rule in the docs, as the worker tests' nodes have it: see `with_acl_user`."""
_MORE = re.search(r"needs `(\+[^`]+)`", _ACL.with_name("shared.md").read_text("utf-8"))
assert _MORE, "docs/shared.md has no ACL words"
SHARED_RULE = _MORE[1].split()
"""Rights that shared locks need in addition."""


GUARDED_TTL = 2.0
"""Seconds: of locks whose restart guard is on, where a test waits until a node votes again."""
TOKEN = re.compile(r"\|\d+\|[^|\s]*\|\d+\|[0-9a-f]{32}")
"""The end of a lease's token, nonce and all: what no log, error or event may show."""


def with_acl_user(*more: str) -> list[str]:
    """The `config` of a server that knows the user of the docs' ACL rule, with more words."""
    return ["--user", "redlock", *ACL_RULE, *more]


def make_known(servers: Iterable[LocalServer]) -> None:
    """Let servers that were just started vote, as if they had been up and known for long."""
    for server in servers:
        with admin(server, text=True) as client:
            make_known_to(client)


def make_known_to(client: redis.Redis, seconds: float = 1e6) -> None:
    """The same of one server, by a client that reads text and may do everything."""
    if client.info("replication")["master_replid2"] == 0:  # it is read as a number
        client.replicaof("127.0.0.1", 1)
        client.replicaof("NO", "ONE")
    said = client.info()
    facts = NodeInfo(
        said["run_id"], replication=said["master_replid"], history=said["master_replid2"]
    )
    client.set(f"redlock:{TRUSTED_KEY}", f"{seconds:.3f} {facts.memory}")


def lock_url(server: LocalServer | LocalPostgres | LocalEtcd, database: int = 0) -> str:
    """A server's URL for a lock: as that user, where it knows it."""
    if isinstance(server, (LocalPostgres, LocalEtcd)) or "--user" not in server._config:
        return server.url
    return f"redis://redlock:SECRET@127.0.0.1:{server.port}/{database}"


def all_connected(redlock: Redlock) -> Redlock:
    """Wait until all nodes are connected, not only a quorum: later locks are on all of them."""
    redlock.connect()
    nodes = redlock.client.driver.nodes
    wait_until(lambda: all(node.channel.up for node in nodes), 30.0, "all nodes are connected")
    return redlock


def supervised_table(nodes: int) -> SharedLeaseTable:
    """Return a table of leases as the child of a supervisor has it: it writes what it holds."""
    table = SharedLeaseTable(nodes)
    table.read = True
    return table


def tokens(servers: Iterable[LocalServer], resource: str) -> int:
    """Return the number of nodes that have a key of this resource."""
    count = 0
    for server in servers:
        with redis.Redis(port=server.port) as client:
            count += int(client.exists(f"redlock:{resource}"))
    return count


def told_all(redlock: Redlock) -> None:
    """Wait until all nodes have done what they were asked: a lock is granted when a quorum has."""
    nodes = redlock.client.driver.nodes

    def answered() -> bool:
        redlock.holder("nothing")  # behind all that was asked before
        return not any(node.channel.unanswered for node in nodes)

    wait_until(answered, 30.0, "all nodes have done it")


@contextlib.contextmanager
def hung(servers: Iterable[LocalServer]) -> Iterator[float]:
    """Let the servers hang during the block; yield when it began."""
    for server in servers:
        server.pause()
    try:
        yield time.monotonic()
    finally:
        for server in servers:
            server.resume()


def use(redlock: Redlock, other: Redlock) -> None:
    """Acquire, extend, refuse, release, also from several threads; and wait for the other."""
    lease = redlock.acquire("r")
    assert redlock.try_acquire("r") is None
    assert redlock.extend(lease).remaining() > 0
    assert redlock.release(lease) is True

    def work(number: int) -> None:
        for turn in range(20):
            assert redlock.release(redlock.acquire(f"{number}:{turn}")) is True

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    lease = other.acquire("w")
    threading.Timer(0.1, other.release, (lease,)).start()
    assert redlock.release(redlock.acquire("w", wait=10.0)) is True


def refused_by(node: LocalServer) -> set[str]:
    """Return the requests that its ACL has refused since the server started."""
    with contextlib.suppress(redis.ConnectionError), redis.Redis.from_url(node.url) as client:
        return {f"{entry['reason']} {entry['object']}" for entry in client.acl_log()}
    return set()  # it is down


def admin(server: LocalServer, *, text: bool = False) -> redis.Redis:
    """A client that may do everything, tries once, and reads bytes, or text."""
    retry = Retry(NoBackoff(), 0)
    return redis.Redis.from_url(server.url, socket_timeout=5, retry=retry, decode_responses=text)
