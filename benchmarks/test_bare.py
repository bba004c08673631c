"""The bare limit is a lock: who is faster than a wrong one has shown nothing."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
import redis

from benchmarks.bare import BareLock
from benchmarks.bare_waiter import BareWaiter
from celery_redlock.server import LocalServer, start_servers
from tests.support.wait import wait_until


@pytest.fixture
def nodes() -> Iterator[list[LocalServer]]:
    with start_servers(5) as nodes:
        yield nodes


def test_a_late_answer_is_no_vote_and_a_failed_attempt_is_undone(nodes: list[LocalServer]) -> None:
    urls = [node.url for node in nodes]
    with closing(BareLock(urls)) as lock, closing(BareLock(urls)) as other:
        _late(nodes, lock, other)
    for url in urls:
        with redis.Redis.from_url(url) as client:
            assert client.keys() == []


def _late(nodes: list[LocalServer], lock: BareLock, other: BareLock) -> None:
    kept = other.acquire(b"kept")
    assert kept
    with ExitStack() as stack:
        for node in nodes[:2]:
            node.pause()
            stack.callback(node.resume)
        tokens = [lock.acquire(b"%d" % number) for number in range(20)]
        assert all(tokens)
        assert lock.acquire(b"kept") is None  # three refuse, two owe 21 answers
        nodes[2].pause()
        stack.callback(nodes[2].resume)
        assert lock.acquire(b"split") is None
    # The YES of three nodes to what is asked no more arrive only now, the last to an undoing.
    owing = [sock for fd, sock in lock.sockets.items() if lock._answered[fd] < lock._sent]
    assert len(owing) >= 3
    for sock in owing:
        assert select.select([sock], [], [], 5.0)[0]
    assert not lock.release(b"kept", b"0" * 32)  # which is another's
    assert lock.acquire(b"kept") is None
    assert lock.refused
    assert all(lock.release(b"%d" % number, token) for number, token in enumerate(tokens))
    assert other.release(b"kept", kept)
    lock.settle()
    other.settle()


def test_those_who_wait_are_never_two(nodes: list[LocalServer]) -> None:
    inside, most, wins = 0, 0, [0] * 6
    start = threading.Barrier(len(wins))

    def work(number: int) -> None:
        nonlocal inside, most
        with closing(BareWaiter([node.url for node in nodes])) as waiter:
            start.wait(30.0)
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                token = waiter.wait(b"one", 30.0)
                assert token
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1
                wins[number] += 1
                waiter.give(b"one", token)

    with ThreadPoolExecutor(len(wins)) as threads:
        list(threads.map(work, range(len(wins))))
    assert most == 1
    assert min(wins) > max(wins) / 3  # in turns


def test_who_is_refused_keeps_no_node_that_answers_later(nodes: list[LocalServer]) -> None:
    """Two that each kept some would wait for one another."""
    urls = [node.url for node in nodes]
    with closing(BareWaiter(urls)) as holder, closing(BareWaiter(urls)) as waiter:
        token = holder.wait(b"one", 1.0)
        assert token
        holder.settle()
        with ThreadPoolExecutor(1) as thread, redis.Redis.from_url(urls[4]) as last:
            last.delete("one")
            nodes[4].pause()  # the other four refuse before it is asked
            waits = thread.submit(waiter.wait, b"one", 60.0)
            with redis.Redis.from_url(urls[0]) as first:
                wait_until(lambda: first.exists("q:one"), 10.0, "it has been refused")
            nodes[4].resume()
            wait_until(lambda: last.exists("q:one"), 10.0, "it has asked the last")
            wait_until(lambda: not last.exists("one"), 5.0, "and keeps it not")
            holder.give(b"one", token)
            assert waits.result()
