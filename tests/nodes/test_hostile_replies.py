"""Nodes that lie, babble, or never stop: their vote is lost, nothing else is."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psutil
import pytest
import redis

from celery_redlock import QuorumUnavailable, Redlock
from celery_redlock.locking.pubsub import ReleaseSubscriber
from celery_redlock.locking.wait_queue import Waiter
from celery_redlock.protocol.values import Vote
from celery_redlock.runtime.blocking import blocking
from celery_redlock.stores.redis import reader
from celery_redlock.stores.redis.address import parse_nodes
from celery_redlock.survey import snapshot
from tests.support.impostor import Impostor, Reply
from tests.support.machine import brief
from tests.support.names import Locks, Log, Patch, Servers
from tests.support.nodes import all_connected
from tests.support.wait import wait_until

LONG = b"x" * 2_000_000
REPLIES: dict[str, bytes] = {
    "an integer": b":7\r\n",
    "a status": b"+OK\r\n",
    "a status like a token": b"+|host|1||0||0|nonce\r\n",
    "an array": b"*2\r\n$1\r\na\r\n$1\r\nb\r\n",
    "an empty array": b"*0\r\n",
    "nested arrays": b"*1\r\n*1\r\n*1\r\n:1\r\n",
    "a push": b">3\r\n$7\r\nmessage\r\n$1\r\na\r\n$1\r\nb\r\n",
    "a null of RESP3": b"_\r\n",
    "a map": b"%1\r\n$1\r\na\r\n:1\r\n",
    "a double": b",1.5\r\n",
    "a boolean": b"#t\r\n",
    "a big number": b"(3492890328409238509324850943850943825024385\r\n",
    "a verbatim string": b"=5\r\ntxt:a\r\n",
    "a long error of RESP3": b"!3\r\nERR\r\n",
    "HTTP": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "TLS": b"\x15\x03\x01\x00\x02\x02\x46\r\n",
    "random bytes": b"\x00" + os.urandom(64) + b"\r\n",
    "a bulk that is too long": b"$536870912\r\n" + LONG,
    "an array that is too long": b"*1000000000\r\n" + b":1\r\n" * 500_000,
    "a line that never ends": b"$" + LONG,
    "an error that never ends": b"-" + LONG,
    "no integer": b":abc\r\n",
    "no length": b"$abc\r\n",
    "no count": b"*abc\r\n",
    "arrays in arrays": b"*1\r\n" * 3000,
    "a number of 5000 digits": b":" + b"9" * 5000 + b"\r\n",
    "the half of an answer, then the end": b"$50\r\nabc",
    "nothing, then the end": b"",
}
SHORT_OF_AN_END = {"the half of an answer, then the end"}


@contextlib.contextmanager
def with_impostors(
    servers: Servers, impostors: int, ttl: float = 2.0
) -> Iterator[tuple[Redlock, list[Impostor]]]:
    """A lock over three nodes, the first of which are impostors that behave, as yet."""
    with ExitStack() as stack:
        false = [stack.enter_context(Impostor(s.port)) for s in servers[:impostors]]
        urls = [one.url for one in false] + [s.url for s in servers[impostors:3]]
        redlock = Redlock(urls, ttl=ttl)
        stack.callback(redlock.close)
        yield all_connected(redlock), false


def spoil(impostors: list[Impostor], name: str) -> None:
    for one in impostors:
        one.hangs_up = name in SHORT_OF_AN_END
        one.reply = REPLIES[name]


@pytest.mark.parametrize("name", REPLIES)
def test_lying_minority_costs_nothing(name: str, servers: Servers) -> None:
    # A long reply is read to its limit; a tenth of the ttl must be time for that.
    with with_impostors(servers, 1, ttl=20.0) as (redlock, impostors):
        spoil(impostors, name)
        times = []
        begin = time.monotonic()
        for turn in range(7):
            begun = time.monotonic()
            lease = redlock.extend(redlock.acquire(f"r{turn}"))
            holder = redlock.holder(f"r{turn}") if turn == 6 else None
            assert redlock.release(lease) is True
            times.append(time.monotonic() - begun)
        assert holder is not None and holder.nodes == 2
        brief(sorted(times)[3], 0.1, "a lock's life", since=begin)


@pytest.mark.parametrize("name", REPLIES)
def test_lying_majority_grants_nothing_and_loses_its_connections(
    name: str, servers: Servers
) -> None:
    process = psutil.Process()
    with with_impostors(servers, 2) as (redlock, impostors):
        spoil(impostors, name)
        before = process.memory_info().rss
        for turn in range(3):
            with pytest.raises(QuorumUnavailable) as raised:
                redlock.acquire(f"r{turn}")
            votes = [vote.vote for vote in raised.value.votes]
            assert votes[:2] == [Vote.SILENT, Vote.SILENT], raised.value
            assert str(raised.value).isprintable()
        assert process.memory_info().rss - before < 50_000_000
        for one in impostors:

            def dropped(impostor: Impostor = one) -> bool:
                with contextlib.suppress(QuorumUnavailable):
                    redlock.acquire("again")  # what came too late for its round is read now
                return bool(impostor.connections > 1)

            wait_until(dropped, 5, "that connection is dropped")
        # Sound again, they are believed again, in their turn.
        for one in impostors:
            one.reply, one.hangs_up = None, False

        def granted() -> bool:
            try:
                return redlock.release(redlock.acquire("s"))
            except QuorumUnavailable:
                return False

        wait_until(granted, 5, "it can be locked again")


def test_surplus_reply_ends_the_connection_and_shifts_no_other(
    servers: Servers, admins: list[redis.Redis]
) -> None:
    with with_impostors(servers, 3) as (redlock, impostors):
        for one in impostors[:2]:
            one.reply = b"$-1\r\n$-1\r\n"
        # Or a quorum may be met without both.
        admins[2].set("redlock:r", "another's", px=60_000)
        redlock.acquire("r")  # two nodes that lie are a quorum that lies
        for one in impostors[:2]:
            one.reply = None
        # What they sent too much must not be taken for a yes to this.
        for client in admins[:2]:
            client.set("redlock:other", "another's", px=60_000)

        def refused_over_new_connections() -> bool:
            assert redlock.try_acquire("other") is None
            first, second, third = (one.connections for one in impostors)
            return first >= 2 and second >= 2 and third == 1

        wait_until(refused_over_new_connections, 20.0, "the liars' connections are new ones")


def test_malformed_reply_is_not_shown(servers: Servers, caplog: Log) -> None:
    """The reply may have been meant for another client: a token."""
    caplog.set_level(logging.DEBUG)
    with with_impostors(servers, 2) as (redlock, impostors):
        for one in impostors:
            one.reply = b"|host|1||0||0|s3cr3t-nonce\r\n"
        with pytest.raises(QuorumUnavailable) as raised:
            redlock.acquire("r")
        assert "not the protocol" in str(raised.value)
        assert "s3cr3t" not in str(raised.value) + caplog.text


def test_control_characters_in_replies_are_escaped(servers: Servers, caplog: Log) -> None:
    caplog.set_level(logging.DEBUG)
    with with_impostors(servers, 2) as (redlock, impostors):
        for one in impostors:
            one.reply = "-ERR \x1b[2J\x1b]0;owned\x07 \u202egnitirw\r\n".encode()
        with pytest.raises(QuorumUnavailable, match=r"\\x1b\[2J") as raised:
            redlock.acquire("r\n\x1b[31m\ud800")
        assert str(raised.value).isprintable()
        assert raised.value.resource == "r\n\x1b[31m\ud800"
    assert all(record.getMessage().isprintable() for record in caplog.records)


def reads(waiter: Waiter) -> bool:
    """Have a waiter wait, and so read what its process is sent."""
    waiter.forget()
    blocking(waiter.wait(0.01))
    return True


def test_listener_gives_up_a_message_without_an_end(
    servers: Servers, admins: list[redis.Redis], lock_over: Locks
) -> None:
    """The subscriptions have connections of their own; whoever waits reads from them."""
    process, redlock = psutil.Process(), lock_over(servers[:1], ttl=5.0)
    with redlock.lock("r"), redlock.client.wakeup.waiter() as waiter:
        wait_until(lambda: waiter.is_subscribed, 5, "it listens")
        subscriptions = redlock.client.wakeup._subscriptions
        before, first = process.memory_info().rss, subscriptions[0]
        admins[0].publish(redlock.client.wakeup.channel, b"x" * 100_000_000)

        wait_until(
            lambda: reads(waiter) and waiter.is_subscribed and subscriptions[0] is not first,
            10,
            "it listens again",
        )
        assert process.memory_info().rss - before < 90_000_000


@pytest.mark.parametrize(
    "reply",
    [
        b"*0\r\n",
        b"*1\r\n*0\r\n",
        b"*2\r\n$7\r\nmessage\r\n*0\r\n",
        b":1\r\n",
        b"+OK\r\n",
        b"*3\r\n$9\r\nsubscribe\r\n$3\r\np:r\r\n:1\r\n",  # which was asked for once
        b"*3\r\n$11\r\nunsubscribe\r\n$3\r\np:r\r\n:0\r\n",
    ],
)
def test_listener_survives_malformed_messages(reply: bytes, servers: Servers) -> None:
    with Impostor(servers[0].port) as impostor:
        wakeup = ReleaseSubscriber(parse_nodes([impostor.url]), "p:")
        with contextlib.closing(wakeup), wakeup.waiter() as waiter:
            wait_until(lambda: waiter.is_subscribed, 5, "it listens")
            impostor.say(reply)
            wait_until(lambda: reads(waiter) and impostor.connections > 1, 5, "it has hung up")
            wait_until(lambda: waiter.is_subscribed, 5, "it listens again")


# -- A node that sends without end: it costs a process neither memory nor time

BUFFERED = 20 * 2**20
"""Bytes that the system may hold between both ends: they are sent, and never read."""
FLOOD = 200 * 2**20


@contextlib.contextmanager
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
        with contextlib.closing(wakeup), wakeup.waiter():
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
