"""The wait queue: the order in which waiters are served, and lost notifications."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from celery_redlock import Lease, Redlock, ResourceHeld
from celery_redlock.locking import acquisition
from celery_redlock.protocol.round import Round, Verb
from celery_redlock.server import LocalServer
from celery_redlock.stores.etcd.wire import Keys, above, text
from celery_redlock.stores.kinds import parse_nodes, subscribe
from celery_redlock.stores.node import Node
from celery_redlock.testing.etcd import LocalEtcd
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import etcd, postgres, stores
from tests.support.beside import Beside
from tests.support.machine import in_time
from tests.support.nodes import all_connected
from tests.support.stores import Servers
from tests.support.wait import wait_until

WAITER = """
import sys
from celery_redlock import Redlock
from tests.support.machine import end_with_parent
end_with_parent()
redlock = Redlock(sys.argv[2:], ttl=20.0, restart_guard="off")
lease = redlock.acquire(sys.argv[1], wait=60.0)
print("granted", flush=True)
redlock.release(lease)
"""


LINE = Keys("redlock:").line("r")


@pytest.fixture(scope="module", params=["redis", "postgresql", "etcd"])
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    with stores.start(request.param) as started:
        yield started


@pytest.fixture
def make(servers: Servers, lock_over: Callable[..., Redlock]) -> Callable[[], Redlock]:
    return lambda: lock_over(servers, ttl=60.0, node_timeout=5.0)


class Waiting:
    """A waiter in a thread of this process; it is in the queue once it is made."""

    def __init__(self, redlock: Redlock, servers: Servers, wait: float = 30.0) -> None:
        self.lease: Lease | None = None
        self.granted = 0.0
        self.error: Exception | None = None
        self._how = (redlock, wait)
        hearing(redlock, servers)
        before = in_line(servers)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        wait_until(lambda: in_line(servers) == [n + 1 for n in before], 10, "it stands in line")

    def _run(self) -> None:
        redlock, wait = self._how
        try:
            self.lease = redlock.acquire("r", wait=wait)
            self.granted = time.monotonic()
        except ResourceHeld as error:
            self.error = error


def hearing(redlock: Redlock, servers: Servers) -> None:
    """Wait until the process listens to all nodes.

    It would otherwise try once more when it starts to listen, and might be quicker than a waiter
    that is notified. It must be connected to all nodes, too: it would not join the queue of a node
    that comes later.
    """
    all_connected(redlock)
    with redlock.client.wakeup.waiter():
        wait_until(lambda: len(redlock.client.wakeup._listening) == len(servers), 10, "it hears")


def in_line(servers: Servers) -> list[int]:
    """Return the number of waiters in the queue, per node."""
    lengths = []
    for server in servers:
        if isinstance(server, LocalPostgres):
            ((length,),) = postgres.sql(server, "SELECT count(*) FROM redlock_waiter")
            lengths.append(length)
            continue
        if isinstance(server, LocalEtcd):
            said = etcd.ask(server, "kv/range", key=text(LINE), range_end=above(LINE))
            lengths.append(int(said.get("count", 0)))
            continue
        with redis.Redis(port=server.port) as client:
            lengths.append(client.zcard("redlock:r#line"))
    return lengths


def put_in_line(server: LocalServer | LocalPostgres | LocalEtcd, who: str) -> None:
    """Put a waiter at the head of the queue."""
    if isinstance(server, LocalEtcd):
        etcd.ask(server, "kv/put", key=text(LINE + who.encode()), value=text(b"%020d" % 1))
        return
    if isinstance(server, LocalPostgres):
        row = "INSERT INTO redlock_waiter VALUES ('redlock:r', %s, 1, now() + interval '1 h')"
        postgres.sql(server, row, who)
        return
    with redis.Redis(port=server.port) as client:
        client.zadd("redlock:r#line", {who: 1})


def written_by(redlock: Redlock, monkeypatch: pytest.MonkeyPatch) -> list[Verb]:
    """Return the verbs of the requests that a lock writes to its nodes from now on."""
    nodes, written = redlock.client.driver.nodes, list[Verb]()
    ask = Node.ask

    def noted(self: Node, round_: Round, *rest: Any) -> None:
        if self in nodes:
            written.append(round_.verb)
        ask(self, round_, *rest)

    monkeypatch.setattr(Node, "ask", noted)
    return written


def at_once(holder: Redlock, lease: Lease, waiting: Waiting, seconds: float = 1.0) -> None:
    """Check that the waiter is granted the lock right after its release."""
    released = time.monotonic()
    holder.release(lease)
    waiting.thread.join(10)
    assert waiting.lease is not None
    in_time(released, waiting.granted, seconds, "from the release to the grant")


@pytest.mark.usefixtures("never_by_itself")
def test_waiters_are_served_in_order_and_the_queue_is_empty_afterwards(
    make: Callable[[], Redlock], servers: Servers
) -> None:
    holder = make()
    lease = holder.acquire("r")
    crowd = [(redlock := make(), Waiting(redlock, servers)) for _ in range(4)]
    for number, (redlock, waiting) in enumerate(crowd):
        assert [one.lease is not None for _, one in crowd] == [n < number for n in range(4)]
        holder.release(lease)
        waiting.thread.join(10)
        assert waiting.lease is not None
        holder, lease = redlock, waiting.lease
    holder.release(lease)
    wait_until(lambda: not any(in_line(servers)), 5, "nobody stands in line")


@pytest.mark.parametrize(("stands_back", "looks_after"), [(0.3, 0.0), (0.05, 0.4)])
def test_releaser_that_locks_again_stands_back_for_the_notified_waiter(
    make: Callable[[], Redlock],
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
    stands_back: float,
    looks_after: float,
) -> None:
    """Here the waiter listens, and never comes: who released it finds the lock free by a look."""
    monkeypatch.setattr(acquisition, "STAND_BACK_S", (stands_back, stands_back))
    if looks_after:
        monkeypatch.setattr(acquisition, "LOOK_AFTER_S", (looks_after, looks_after))
    redlock = make()
    hearing(redlock, servers)
    with contextlib.ExitStack() as stack:
        for server in servers:
            (address,) = parse_nodes([server.url])
            listener = stack.enter_context(
                contextlib.closing(subscribe(address, b"redlock:#line:slow"))
            )
            listener.connect()
        lease = redlock.acquire("r")
        for server in servers:
            put_in_line(server, "redlock:#line:slow:1")
        redlock.release(lease)
        asked = time.monotonic()
        lease = redlock.acquire("r", wait=30.0)
        assert time.monotonic() - asked >= max(stands_back, looks_after)
        redlock.release(lease)


@pytest.mark.usefixtures("never_by_itself")
def test_killed_waiter_is_passed_over(make: Callable[[], Redlock], servers: Servers) -> None:
    holder = make()
    lease = holder.acquire("r")
    (server,) = servers[:1]

    def backends() -> set[Any]:
        sql = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'"
        return set(postgres.sql(server, sql)) if isinstance(server, LocalPostgres) else set()

    before = backends()
    with Beside("-c", WAITER, "r", *(s.url for s in servers)):
        wait_until(lambda: in_line(servers) == [1] * len(servers), 20, "it stands in line")
        of_it = backends() - before
        second = Waiting(make(), servers)
    wait_until(lambda: backends().isdisjoint(of_it), 20, "its sessions have ended")
    if isinstance(server, LocalEtcd):  # it learns of a death from a missing sign of life
        start = b"redlock:#line:"
        every = {"key": text(start), "range_end": above(start)}
        wait_until(lambda: etcd.ask(server, "kv/range", **every)["count"] == "1", 20, "it is dead")
    at_once(holder, lease, second)


def test_waiter_whose_wait_is_over_leaves_the_queue(
    make: Callable[[], Redlock], servers: Servers
) -> None:
    holder = make()
    lease = holder.acquire("r")
    waiting = Waiting(make(), servers, wait=0.5)
    waiting.thread.join(10)
    assert waiting.error is not None
    wait_until(lambda: not any(in_line(servers)), 5, "nobody stands in line")
    holder.release(lease)


def test_stopped_waiter_delays_the_others_by_two_seconds_at_most(
    make: Callable[[], Redlock], servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, waiter = make(), make()
    lease = holder.acquire("r")
    looked = threading.Event()
    peek = waiter.client.peek

    async def look(*what: Any, **more: Any) -> Round:
        found = await peek(*what, **more)
        looked.set()
        return found

    monkeypatch.setattr(waiter.client, "peek", look)
    with Beside("-c", WAITER, "r", *(s.url for s in servers)) as stopped:
        wait_until(lambda: in_line(servers) == [1] * len(servers), 20, "it stands in line")
        second = Waiting(waiter, servers)
        assert looked.wait(10)  # and knows that the holder's ttl lasts for long
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            at_once(holder, lease, second, 2.5)
            assert second.lease is not None
            second._how[0].release(second.lease)
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        assert stopped.line() == "granted"


@pytest.mark.usefixtures("never_by_itself")
@pytest.mark.parametrize("forgetful", [1, 2])  # a minority; so that fewer than a quorum call
def test_node_that_forgot_its_queue_delays_no_waiter(
    make: Callable[[], Redlock], servers: Servers, forgetful: int
) -> None:
    if len(servers) == 1:
        pytest.skip("of a single node nobody else calls: who waits looks every second or two")
    holder = make()
    lease = holder.acquire("r")
    waiting = Waiting(make(), servers)
    for server in servers[:forgetful]:
        with redis.Redis(port=server.port) as client:
            client.delete("redlock:r#line")
    at_once(holder, lease, waiting)


def test_waiter_joins_the_queue_before_every_try_but_the_first(
    make: Callable[[], Redlock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a release between an attempt and the queue would notify no waiter."""
    written: list[Verb] = []
    ask = Node.ask

    def noted(self: Node, round_: Round, *rest: Any) -> None:
        if self.index == 0 and round_.claims[0].resources == ("r",):
            written.append(round_.verb)
        ask(self, round_, *rest)

    holder, waiter = make(), make()
    lease = holder.acquire("r")
    monkeypatch.setattr(Node, "ask", noted)
    monkeypatch.setattr(acquisition, "RETRY_AFTER_S", (0.02, 0.02))
    with pytest.raises(ResourceHeld):
        waiter.acquire("r", wait=0.5)
    tries = [verb for verb in written if verb in (Verb.ACQUIRE, Verb.ENQUEUE)]
    assert tries == [Verb.ACQUIRE, *[Verb.ENQUEUE, Verb.ACQUIRE] * (len(tries) // 2)]
    assert len(tries) > 4
    assert written[-1] is Verb.HAND_ON
    holder.release(lease)


@pytest.mark.usefixtures("never_by_itself")
def test_notified_waiter_tries_in_one_round_and_stands_in_no_queue_afterwards(
    make: Callable[[], Redlock], servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, redlock = make(), make()
    lease = holder.acquire("r")
    waiting = Waiting(redlock, servers)
    written = written_by(redlock, monkeypatch)
    at_once(holder, lease, waiting)
    assert written == [Verb.ACQUIRE] * len(servers)
    assert waiting.lease is not None
    redlock.release(waiting.lease)
    wait_until(lambda: not any(in_line(servers)), 5, "nobody stands in line")
