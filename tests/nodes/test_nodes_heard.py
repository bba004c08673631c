"""The state of nodes as listeners receive it: real servers that answer, hang, die or forget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from celery_redlock import QuorumUnavailable, Redlock
from celery_redlock.events import (
    NODE_FAILURES,
    Listener,
    subscribe,
    unsubscribe,
)
from celery_redlock.server import start_servers
from tests.support.names import Locks, Servers
from tests.support.wait import wait_until

LONG = 30.0


class Ears(Listener):
    def __init__(self) -> None:
        self.answers: list[tuple[str, float]] = []
        self.failures: Counter[tuple[str, str]] = Counter()

    def node_answered(self, node: str, seconds: float) -> None:
        self.answers.append((node, seconds))

    def node_failed(self, node: str, kind: str) -> None:
        self.failures[node, kind] += 1

    def wait_for(self, node: str, kind: str) -> None:
        wait_until(lambda: self.failures[node, kind], LONG, f"{node} is said to fail: {kind}")


@pytest.fixture
def ears() -> Iterator[Ears]:
    ears = Ears()
    subscribe(ears)
    yield ears
    unsubscribe(ears)
    assert {kind for _node, kind in ears.failures} <= set(NODE_FAILURES)


@pytest.fixture
def lock(servers: Servers, lock_over: Locks) -> Locks:
    def make(*nodes: Any, **options: float) -> Redlock:
        made = lock_over(nodes or servers[:3], **options)
        made.connect(LONG)
        return made

    return make


def use(redlock: Redlock) -> None:
    lease = redlock.try_acquire("r")
    assert lease is not None
    redlock.release(lease)


def test_listener_receives_each_answer_that_was_waited_for(lock: Locks, ears: Ears) -> None:
    redlock = lock(ttl=3.0)

    def all_heard() -> bool:
        use(redlock)
        return {node for node, _seconds in ears.answers} == set(redlock.nodes)

    wait_until(all_heard, LONG, "each node was once among the first")
    assert all(0 < seconds <= 3.0 for _node, seconds in ears.answers)
    assert not ears.failures


def test_listener_receives_no_time_for_a_late_answer(
    lock: Locks, ears: Ears, servers: Servers
) -> None:
    redlock = lock()
    slow = redlock.nodes[0]
    servers[0].pause()
    use(redlock)
    servers[0].resume()
    # What it answers first now, it answers to rounds that are over; to these, somebody waits.
    looks = 0
    while redlock.client.driver.nodes[0].channel.unanswered or not looks:
        redlock.holder("r")
        looks += 1
        assert looks < 1000
    assert len([node for node, _seconds in ears.answers if node == slow]) <= looks


def test_listener_receives_disconnected_and_unreachable_for_a_dead_node(
    lock: Locks, ears: Ears, servers: Servers
) -> None:
    redlock = lock()
    use(redlock)
    servers[0].kill()
    redlock.holder("r")
    ears.wait_for(redlock.nodes[0], "unreachable")
    assert ears.failures[redlock.nodes[0], "disconnected"] == 1
    assert {node for node, _kind in ears.failures} == {redlock.nodes[0]}


def test_listener_receives_refused_for_a_wrong_password(
    lock: Locks, ears: Ears, servers: Servers
) -> None:
    with start_servers(1, password="SESAME") as (guarded,):
        wrong = f"redis://:WRONG@127.0.0.1:{guarded.port}/0"
        redlock = lock(wrong, *servers[:2])
        ears.wait_for(redlock.nodes[0], "refused")
        assert "WRONG" not in str(ears.failures)


def test_listener_receives_refused_for_an_error_reply(lock: Locks, ears: Ears) -> None:
    with start_servers(1) as (full,):
        redlock = lock(full)
        with redis.Redis(port=full.port) as client:
            client.config_set("maxmemory", "1")
        with pytest.raises(QuorumUnavailable):
            redlock.acquire("r")
        assert ears.failures[redlock.nodes[0], "refused"] == 1


def test_listener_receives_unsuitable_for_a_replica(lock_over: Locks, ears: Ears) -> None:
    with start_servers(2) as (master, replica):
        with redis.Redis(port=replica.port) as client:
            client.replicaof("127.0.0.1", master.port)
        redlock = lock_over([replica])
        redlock.client.driver.strict = False
        redlock.connect()
        ears.wait_for(redlock.nodes[0], "unsuitable")


def test_listener_receives_data_loss_for_a_node_that_forgot(
    lock: Locks, ears: Ears, admins: list[redis.Redis]
) -> None:
    redlock = lock()
    lease = redlock.acquire("r")
    node = redlock.client.driver.nodes[0]
    wait_until(lambda: (redlock.holder("q"), not node.channel.unanswered)[1], LONG, "all have it")
    admins[0].flushall()

    def told() -> bool:
        redlock.extend(lease)
        return ears.failures[redlock.nodes[0], "data_loss"] > 0

    wait_until(told, LONG, "it is told")
