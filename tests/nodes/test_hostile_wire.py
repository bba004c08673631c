"""A node that sends without end: it costs a process neither memory nor time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
import redis

from celery_redlock import Redlock
from celery_redlock.locking.pubsub import ReleaseSubscriber
from celery_redlock.stores.redis import reader
from celery_redlock.stores.redis.address import parse_nodes
from celery_redlock.survey import snapshot
from tests.support.impostor import Impostor, Reply
from tests.support.machine import brief
from tests.support.names import Locks, Patch, Servers
from tests.support.wait import wait_until

BUFFERED = 20 * 2**20
"""Bytes that the system may hold between both ends: they are sent, and never read."""
FLOOD = 200 * 2**20


@contextmanager
def beside(servers: Servers, reply: Reply, *to: bytes) -> Iterator[tuple[Redlock, Impostor]]:
    """A lock over an impostor, that answers such requests so, and two sound nodes."""
    with ExitStack() as stack:
        impostor = stack.enter_context(Impostor(servers[0].port, reply, to))
        redlock = Redlock([impostor.url, servers[1].url, servers[2].url], ttl=2.0)
        stack.callback(redlock.close)
        yield redlock, impostor


LONG_TTL = b"*2\r\n$1\r\na\r\n:1" + b"0" * 400 + b"\r\n"


def test_ttl_of_401_digits_is_the_silence_of_its_node_and_ends_no_waiter(
    servers: Servers, admins: list[redis.Redis], lock_over: Locks
) -> None:
    """Once it ended the thread of each waiter with an OverflowError."""
    with Impostor(servers[0].port, LONG_TTL, (b"local seen = {}",)) as impostor:
        ours, others = (lock_over([impostor, *servers[1:3]], ttl=5.0) for _ in range(2))
        lease = others.acquire("r")
        waiting = threading.Thread(target=others.release, args=(lease,))
        timer = threading.Timer(0.8, waiting.start)
        timer.start()
        begin = time.monotonic()
        mine = ours.acquire("r", wait=10.0)  # it asks, meanwhile, for how long the other has it
        brief(time.monotonic() - begin, 2.0, "waiting for the release", since=begin)
        assert impostor.asked > 0

        def as_many_as_have_it() -> bool:  # one may have been asked before the other's release
            holder = ours.holder("r")
            honest = sum(admin.exists("redlock:r") for admin in admins[1:3])
            return holder is not None and holder.nodes == honest

        wait_until(as_many_as_have_it, 5.0, "the impostor's word does not count")
        assert ours.release(mine)
        timer.join()
        waiting.join()


def flood(header: bytes) -> Callable[[bytes], Iterator[bytes]]:
    def reply(_request: bytes) -> Iterator[bytes]:
        yield header
        for _ in range(FLOOD // 65536):
            yield b"x" * 65536

    return reply


FLOODS = [b"$1500000000\r\n", b"*100000000\r\n", b"-ERR ", b"+", b":"]


@pytest.mark.parametrize("header", FLOODS)
def test_handshake_without_an_end_is_given_up(header: bytes, servers: Servers) -> None:
    """An INFO of 1.5 GB took each client from 31 to 1 432 MiB."""
    with beside(servers, flood(header), b"\r\nINFO\r\n") as (redlock, impostor):
        redlock.release(redlock.acquire("r"))
        wait_until(lambda: impostor.connections > 2, 10, "it was hung up on, twice")
        assert impostor.sent / (impostor.connections - 1) < BUFFERED


def test_handshake_with_a_surplus_reply_makes_no_connection(servers: Servers) -> None:
    """The surplus reply would be taken for the answer to the first lock."""
    answers = b"$0\r\n\r\n" * 5 + b":1\r\n" * 2  # to INFO, and to both kinds of scripts
    with beside(servers, answers, b"\r\nINFO\r\n") as (redlock, impostor):
        channel = redlock.client.driver.nodes[0].channel
        redlock.connect()
        wait_until(lambda: channel.up, 5, "it is a node")
        impostor.reply = answers + b"$-1\r\n"
        impostor.reset()

        def refused() -> bool:
            redlock.release(redlock.acquire("r"))
            return "a reply without a request" in (channel.down or "")

        wait_until(refused, 5, "it is none")


def test_subscription_reply_without_an_end_is_given_up(servers: Servers) -> None:
    with Impostor(servers[0].port, flood(b"*3\r\n$7\r\n"), (b"SUBSCRIBE\r\n",)) as impostor:
        wakeup = ReleaseSubscriber(parse_nodes([impostor.url]), "p:")
        with closing(wakeup), wakeup.waiter():
            wait_until(lambda: impostor.connections > 2, 10, "it was hung up on, twice")
            assert impostor.sent / (impostor.connections - 1) < BUFFERED


@pytest.mark.parametrize("header", FLOODS)
def test_look_without_an_end_is_given_up(header: bytes, servers: Servers) -> None:
    with beside(servers, flood(header), b"\r\nSCAN\r\n") as (redlock, impostor):
        with redlock.lock("r"):
            seen = snapshot.survey(redlock)
        assert [entry.resource for entry in seen.entries] == ["r"], "the others tell"
        assert [node.reachable for node in seen.looks] == [False, True, True]
        assert impostor.sent < BUFFERED


def test_look_that_finds_ever_more_keys_is_given_up(servers: Servers, monkeypatch: Patch) -> None:
    monkeypatch.setattr(reader._Parser, "budget", 2**20)
    keys = b"".join(b"$12\r\nredlock:%04d\r\n" % number for number in range(1000))
    scanned = b"*2\r\n$1\r\n7\r\n*1000\r\n" + keys
    with beside(servers, scanned, b"\r\nSCAN\r\n") as (redlock, impostor):
        seen = snapshot.survey(redlock)
        assert "more than is read" in seen.looks[0].error
        assert impostor.sent < 2**20
