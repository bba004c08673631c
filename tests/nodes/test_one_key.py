"""Keys that other programs write on one node of five under our names, on real servers.

The faults of a liar or a forgetful node are in tests/promises/tasks/test_one_node.py, over fakes.
The tests here show the rest: scripts that meet keys of wrong types, and waiters that are woken in
real threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import redis

from celery_redlock import Redlock
from celery_redlock.locking import pauses
from celery_redlock.locking.start import Start
from celery_redlock.protocol.names import PAUSE_NAMES
from celery_redlock.protocol.rate import rate_of
from celery_redlock.server import LocalServer
from tests.support.machine import in_time
from tests.support.wait import wait_until

KINDS: dict[str, Callable[[redis.Redis, str], object]] = {
    "string": lambda client, key: client.set(key, "theirs"),
    "list": lambda client, key: client.rpush(key, "theirs"),
    "sorted set": lambda client, key: client.zadd(key, {f"theirs:{n}": n for n in range(1000)}),
}
Dumps = Callable[[], dict[str, bytes]]
NAMES = [
    *("r", "r#slot2", "r#slot3", "r#start", "r#start#slot2", "r#fence", "r#line", "r#reserved"),
    *("r#start#line", "the-id:0:0123456789abcdef#done", "#trusted", *PAUSE_NAMES),
]


@pytest.fixture
def redlock(servers: list[LocalServer], lock_over: Callable[..., Redlock]) -> Redlock:
    return lock_over(servers, ttl=20.0)


@pytest.fixture(params=KINDS)
def dumps(request: pytest.FixtureRequest, servers: list[LocalServer]) -> Iterator[Dumps]:
    """Write keys of one type on one node, under all our names.

    Return a function that dumps them.
    """
    with redis.Redis(port=servers[4].port) as client:
        for name in NAMES:
            KINDS[request.param](client, f"redlock:{name}")
        yield lambda: {name: client.dump(f"redlock:{name}") for name in NAMES}


def test_foreign_keys_on_one_node_under_all_our_names_change_nothing(
    redlock: Redlock, dumps: Dumps
) -> None:
    before = dumps()
    for options in ({}, {"fencing": True}, {"shared": True}):
        lease = redlock.extend(redlock.acquire("r", **options))
        assert redlock.release(lease) is True
    leases = [redlock.acquire("r", limit=3) for _ in range(3)]
    assert all(map(redlock.release, leases))
    for _ in range(2):
        start = Start(redlock, "r", rate_of("2/m"), wait=0.0, owner=None)
        start.acquire()
        start.release()
    pauses.begin(redlock, "other", 60.0, "me")
    assert [pause.who for pause in pauses.in_force(redlock)[0]] == ["me"]
    pauses.resume(redlock, "other")
    after = dumps()
    after["r#line"] = before["r#line"]  # a release calls the first of them, where it is a queue
    after["r#start#line"] = before["r#start#line"]
    assert after == before


def test_waiter_gets_a_freed_key_in_time_whatever_one_node_has_for_a_queue(
    redlock: Redlock, dumps: Dumps, servers: list[LocalServer]
) -> None:
    """A thousand others stand before it there, or there is no queue at all."""
    for shared in (False, True):
        lease = redlock.acquire("r")
        granted: list[float] = []

        def wait(shared: bool = shared, granted: list[float] = granted) -> None:
            ours = redlock.acquire("r", wait=30.0, shared=shared)
            granted.append(time.monotonic())
            redlock.release(ours)

        thread = threading.Thread(target=wait)
        thread.start()
        with redis.Redis(port=servers[0].port) as client:
            wait_until(lambda: client.zcard("redlock:r#line") == 1, 5.0, "it waits")
        freed = time.monotonic()
        redlock.release(lease)
        thread.join(30.0)
        in_time(freed, granted[0], 1.0, "until the waiter has it")
