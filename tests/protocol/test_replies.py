"""Replies of a node: read once, accepted only where they fit, and bounded in every direction."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.exceptions import InvalidResponse, RedisError, ResponseError

from celery_redlock.protocol import outcome
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.errors import NodeError
from celery_redlock.protocol.node_info import NodeInfo
from celery_redlock.protocol.pipeline import Pipeline
from celery_redlock.protocol.quorum import look, mark
from celery_redlock.protocol.replies import MAX_TTL_S, decode
from celery_redlock.protocol.restart_guard import RestartGuard
from celery_redlock.protocol.round import VERBS, Round, Verb
from celery_redlock.protocol.values import QueueEntry, Vote
from celery_redlock.stores.redis.address import parse_nodes
from celery_redlock.stores.redis.node import RedisNode
from celery_redlock.stores.redis.reader import BATCH_KEYS, MAX_VALUE_BYTES, _Parser
from celery_redlock.stores.redis.reader import MAX_REPLY_BYTES as LARGEST_LOOK
from celery_redlock.stores.redis.requests import encode
from celery_redlock.stores.redis.resp import (
    HANDSHAKE_TIMEOUTS,
    MAX_REPLY_BYTES,
    REPLY_S,
    Parser,
    Replies,
)
from tests.support.wire import Wire

NODES = ["one", "two", "three"]
TOKEN = b"stamp|host|1|task|0|name|0|nonce"


# -- the reader ------------------------------------------------------------------------------------


def wire(value: Any) -> bytes:
    """A value as a server writes it."""
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    if isinstance(value, Exception):
        return b"-%b\r\n" % str(value).encode()
    return b"*%d\r\n" % len(value) + b"".join(map(wire, value))


INTEGERS = st.integers() | st.sampled_from([-(2**63), 2**63 - 1, 2**63, 10**400, -(10**400), -2])
SCALARS = (
    st.none()
    | INTEGERS
    | st.binary(max_size=40)
    | st.sampled_from([TOKEN, b"", b"1", b"0" * 3, b"12"])
)
VALUES = SCALARS | st.lists(SCALARS | st.lists(SCALARS, max_size=3), max_size=8)
SENDABLE = st.recursive(
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=80),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
).filter(lambda value: depth(value) <= 2)


def depth(value: Any) -> int:
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@settings(max_examples=200, deadline=None)
@given(st.lists(SENDABLE, max_size=5), st.data())
def test_redis_replies_are_the_same_however_they_are_cut(
    values: list[Any], data: st.DataObject
) -> None:
    stream = b"".join(map(wire, values))
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6).map(sorted))
    replies = Replies()
    read = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        read += list(replies.feed(stream[start:end]))
    assert read == values
    assert not replies.partial
    drop_by_drop = Replies()
    assert [r for byte in stream for r in drop_by_drop.feed(bytes([byte]))] == values


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | st.text("*$:-+0123456789\r\n", max_size=60).map(str.encode))
def test_any_bytes_are_redis_replies_or_end_the_connection(data: bytes) -> None:
    for replies in (Replies(), Replies(budget=1000)):
        with contextlib.suppress(RedisError):
            list(replies.feed(data))


@pytest.mark.parametrize(
    "data",
    [b":%d\r\n" % 10**400, b":%d\r\n" % 2**63, b":1_000\r\n", b": 1\r\n", b":\r\n", b":+1\r\n",
     b"$1e3\r\n", b"$-2\r\n", b"*-2\r\n", b"$1\r\nabc", b"$%d\r\n" % MAX_REPLY_BYTES,
     b"*%d\r\n" % (MAX_REPLY_BYTES // 4), b"*1\r\n*1\r\n*1\r\n:1\r\n", b"%1\r\n"],
)  # fmt: skip
def test_malformed_redis_reply_is_refused_at_its_first_line(data: bytes) -> None:
    with pytest.raises(InvalidResponse):
        list(Replies().feed(data))


def test_redis_reply_without_a_length_is_given_up_when_it_is_too_long() -> None:
    for begin in (b"-ERR ", b":", b"*100\r\n-ERR "):
        replies = Replies()
        with pytest.raises(InvalidResponse, match=f"more than {MAX_REPLY_BYTES} bytes"):
            list(replies.feed(begin))
            for _ in range(20):
                list(replies.feed(b"x" * (MAX_REPLY_BYTES // 16)))


def test_redis_reply_that_drips_is_parsed_once() -> None:
    """Parsed again with each byte, 1 200 locks a second fell to 14."""
    reply = wire([TOKEN * 4, 9999] * 200)
    begun = time.process_time()
    whole = list(Replies().feed(reply))
    at_once = time.process_time() - begun
    replies, read = Replies(), []
    begun = time.process_time()
    for byte in reply:
        read += list(replies.feed(bytes([byte])))
    assert read == whole
    dripped = time.process_time() - begun
    assert dripped < max(1.0, 500 * at_once), "a microsecond or two a byte"


def test_half_a_redis_reply_is_waited_for_no_longer_than_a_lost_packet() -> None:
    replies = Replies()
    assert list(replies.feed(b"*2\r\n:1\r\n:2\r\n*2\r\n", 10.0)) == [[1, 2]]
    assert list(replies.feed(b":", 10.0 + REPLY_S / 2)) == []
    assert list(replies.feed(b"1\r\n:2\r\n$", 10.0 + REPLY_S)) == [[1, 2]]
    assert list(replies.feed(b"5", 10.0 + 2 * REPLY_S)) == [], "another reply, and its own time"
    with pytest.raises(InvalidResponse, match="half a reply"):
        list(replies.feed(b"\r\n", 10.1 + 2 * REPLY_S))


def test_all_redis_replies_of_a_look_together_have_a_budget() -> None:
    replies = Replies(budget=1000)
    assert list(replies.feed(wire([1, 2, 3]))) == [[1, 2, 3]]
    with pytest.raises(InvalidResponse, match="more than is read"):
        for _ in range(10):
            list(replies.feed(wire([b""] * 3)))
    with pytest.raises(InvalidResponse, match="more than is read"):
        list(Replies(budget=1000).feed(b"*100\r\n"))
    with pytest.raises(InvalidResponse, match="more than is read"):
        list(Replies(budget=1000).feed(wire(b"x" * 1000)))


def test_look_has_room_for_a_batch_of_the_longest_values() -> None:
    replies = Replies(largest=_Parser.largest)
    ((*_read,),) = [list(replies.feed(wire([b"x" * MAX_VALUE_BYTES, 9999] * BATCH_KEYS)))]
    assert _Parser.largest == LARGEST_LOOK


# -- for redis-py's connections --------------------------------------------------------------------


class Peer:
    """A connection as its parser has it, with the other end."""

    def __init__(self, timeout: float) -> None:
        self._sock, self.other = socket.socketpair()
        self.socket_timeout = timeout
        self.parser = Parser()
        self.parser.on_connect(self)

    def close(self) -> None:
        self._sock.close()
        self.other.close()


def test_redis_parser_returns_one_reply_at_a_time() -> None:
    peer = Peer(1.0)
    peer.other.sendall(b"+OK\r\n:1\r\n-NOPERM no\r\n")
    assert peer.parser.read_response() == "OK"
    assert peer.parser.can_read()
    assert peer.parser.read_response() == 1
    error = peer.parser.read_response()
    assert isinstance(error, ResponseError) and not peer.parser.can_read()
    peer.other.close()
    with pytest.raises(RedisError, match="closed"):
        peer.parser.read_response()
    peer.close()


@pytest.mark.parametrize(
    ("begin", "drop", "pause", "timeouts"),
    [(b"$1000\r\n", b"x", 0.02, 1), (b"", b"+OK\r\n", 0.1, HANDSHAKE_TIMEOUTS)],
    ids=["the bytes of a reply", "replies each of which is in time"],
)
def test_redis_parser_has_one_time_limit_for_a_whole_reply(
    begin: bytes, drop: bytes, pause: float, timeouts: int
) -> None:
    peer, done = Peer(0.2), threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            peer.other.sendall(begin)
            while not done.wait(pause):
                peer.other.sendall(drop)

    dripping = threading.Thread(target=drip)
    dripping.start()
    begun = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            for _ in range(100):
                assert peer.parser.read_response() == "OK"
        assert time.monotonic() - begun < 0.2 * timeouts + 1.0
    finally:
        done.set()
        dripping.join()
        peer.close()


# -- the verbs -------------------------------------------------------------------------------------


def asked(verb: Verb, claims: int, names: int, fenced: bool) -> Round:
    if verb is Verb.LOOK:
        return look(0, 100.0)
    if verb is Verb.MARK:
        return mark(0, 100.0, "60.000 a b ")
    resources = tuple(f"r{n}" for n in range(names))
    if verb in (Verb.ENQUEUE, Verb.DEQUEUE, Verb.HAND_ON):
        return Round(verb, [QueueEntry(resources, len(NODES), "process:1", 1)], 100.0, 0.0)
    made = [Claim(resources, f"token{n}", 10.0, len(NODES)) for n in range(claims)]
    if fenced:
        made[0].proposal = made[0].fencing_token = 1_700_000_000_000_000
    return Round(verb, made, 100.0, 1.0)


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(VERBS),
    st.integers(1, 3),
    st.integers(1, 2),
    st.booleans(),
    st.lists(VALUES, min_size=3, max_size=3),
)
def test_any_decoded_answer_fits_or_is_the_silence_of_its_node(
    verb: Verb, claims: int, names: int, fenced: bool, values: list[Any]
) -> None:
    single = not verb.extends and verb is not Verb.PEEK
    fenced = fenced and verb in (Verb.ACQUIRE, Verb.FENCE)
    round_ = asked(verb, 1 if single else claims, 1 if fenced else names, fenced)
    for node, value in zip(round_.targets, values, strict=False):
        try:
            answer = decode(round_, value)  # also of numbers that the reader never hands out
        except NodeError as error:
            round_.silence(node, str(error))
            continue
        if verb is Verb.LOOK:
            assert NodeInfo.of(answer) is not None
            return
        round_.answer(node, answer, 100.5)
    round_.close("late")
    if verb is Verb.ACQUIRE and round_.yes < round_.quorum:
        assert str(outcome.refusal("r0", round_, NODES, 10.0))
    if verb is Verb.PEEK and round_.yes >= round_.quorum:
        for number in range(len(round_.claims)):
            left = outcome.free_in(round_, number)
            assert 0 <= left <= MAX_TTL_S or left == math.inf
        if len(round_.claims) > 1 and not any(outcome.free(round_)):
            full = {"r0": (1, range(len(round_.claims)))}
            assert str(outcome.all_held("r0", full, round_, NODES, None))
    if verb is Verb.RELEASE:
        assert round_.details.count("called") <= len(NODES)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "reply",
    [b":%d\r\n" % 10**400, b"*2\r\n$1\r\na\r\n:%d\r\n" % 10**400,
     b"*2\r\n$1\r\na\r\n:%d\r\n" % -(10**17), b"*2\r\n$1\r\na\r\n:-1\r\n*0\r\n",
     b"*1\r\n-ERR x\r\n", b":4\r\n", b":-1\r\n"],
)  # fmt: skip
def test_odd_reply_of_a_node_raises_nothing_in_the_reading_thread(verb: Verb, reply: bytes) -> None:
    """The reading thread may be any caller's, with a round of its own for other nodes."""
    line = Wire()
    node = RedisNode(
        *(0, parse_nodes(["redis://127.0.0.1:1"])[0], "p:", RestartGuard(False, 30.0, print), []),
        clock=lambda: 100.2,
        later=lambda call: call(),
    )
    node.opened(line, NodeInfo(), 100.0, 100.0)
    round_ = asked(verb, 1, 1, False)
    node.ask(round_, encode(round_, "p:"), 100.0)
    line.peer.sendall(reply)
    node.receive()
    another_key = reply.startswith(b"*2\r\n$1\r\na\r\n:") and verb in (Verb.PEEK, Verb.LOOK)
    assert node.connection is None or another_key
    assert round_.votes[0] in (None, Vote.SILENT) or another_key
    node.close()


def test_ttl_that_no_clock_can_represent_is_a_long_one() -> None:
    round_ = asked(Verb.PEEK, 1, 1, False)
    assert decode(round_, [TOKEN, 2**63 - 1]) == (TOKEN.decode(), MAX_TTL_S)
    assert decode(round_, [TOKEN, -2]) == (TOKEN.decode(), 0.0)
    assert decode(round_, [TOKEN, -1]) == (TOKEN.decode(), math.inf)
    for wrong in (-3, 10**400, b"1", None, []):
        with pytest.raises(NodeError):
            decode(round_, [TOKEN, wrong])


def test_info_of_a_node_between_two_requests_must_be_short() -> None:
    round_ = asked(Verb.LOOK, 1, 1, False)
    honest = (
        b"role:master\r\n" + b"slave0:ip=10.0.0.1,port=6379,state=online,offset=1,lag=0\r\n" * 100
    )
    assert NodeInfo.of(decode(round_, honest)).role == "master"
    with pytest.raises(NodeError):
        decode(round_, honest + b"a:\r\n" * 8000)


# -- a node that does not read ---------------------------------------------------------------------


@pytest.mark.parametrize("reads", [0, 2048])
def test_node_that_answers_and_does_not_read_is_asked_nothing_more(
    reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a node guesses its answers. Its requests would pile up here for ever."""
    monkeypatch.setattr("celery_redlock.stores.node.MAX_UNSENT_BYTES", 600_000)
    now = [100.0]
    line = Wire()
    line._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    node = RedisNode(
        *(0, parse_nodes(["redis://127.0.0.1:1"])[0], "p:", RestartGuard(False, 30.0, print), []),
        clock=lambda: now[0],
        later=lambda call: call(),
    )
    node.opened(line, NodeInfo(), now[0], now[0])
    most, said = 0, set()
    for number in range(5000):
        if reads and number % 20 == 19:
            line.peer.recv(reads)  # less than it is sent
            node.flush()
        round_ = Round(Verb.PEEK, [Claim("r", "token", 10.0, 1)], now[0], 1.0)
        node.ask(round_, encode(round_, "p:"), now[0])
        said.add(round_.details[0])
        if round_.votes[0] is None:
            line.peer.sendall(b"*2\r\n$-1\r\n:-2\r\n")
            node.receive()
        now[0] += 0.001
        most = max(most, len(node.unsent))
    assert 300_000 < most < 700_000, "of one second, or as much as may be"
    assert said == {None, "it does not read its requests"}
    # It reads again, and is asked again.
    while node.unsent:
        with contextlib.suppress(BlockingIOError):
            line.peer.recv(1_000_000)
        node.flush()
    round_ = Round(Verb.PEEK, [Claim("r", "token", 10.0, 1)], now[0], 1.0)
    node.ask(round_, encode(round_, "p:"), now[0])
    assert round_.votes == [None]
    line.disconnect()


def test_new_connection_is_not_clogged_by_the_one_before() -> None:
    channel = Pipeline(0)
    channel.connected(100.0)
    channel.clogged = 100.0
    assert channel.stalled(101.1) and not channel.stalled(100.9)
    channel.dropped()
    channel.connected(102.0)
    assert not channel.stalled(110.0)
