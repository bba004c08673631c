"""The words of etcd: requests, answers in any pieces, and keys."""

from __future__ import annotations

import json
import random
from base64 import b64decode
from typing import Any

import pytest

from celery_redlock.protocol.errors import NodeError
from celery_redlock.stores.etcd.wire import (
    MAX_HEAD_BYTES,
    MAX_REPLY_BYTES,
    REPLY_S,
    Keys,
    Replies,
    above,
    answer,
    number,
    refusal,
    value_of,
)
from tests.support.etcd_peer import http

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


# -- Answers


def test_etcd_answers_are_the_same_however_they_are_cut() -> None:
    """The pieces are random, from a seed."""
    rng = random.Random(20261126)
    for _ in range(100):
        said = ["x" * rng.randrange(30) for _ in range(rng.randrange(5))]
        stream = b"".join(http({"said": one}, chunked=rng.choice([0, 1, 3, 99])) for one in said)
        cuts = sorted(rng.randrange(len(stream) + 1) for _ in range(rng.randrange(7)))
        parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
        replies = Replies()
        read = [one for part in parts for one in replies.feed(part)]
        assert [(status, json.loads(body)["said"]) for status, body in read] == [
            (200, one) for one in said
        ]


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/2 200\r\n",
        b"X",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: +1\r\n\r\n",
        HEAD + b"Content-Length: 1_0\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        HEAD + b"Content-Length: much\r\n\r\n",
        HEAD + b"no field\r\n\r\n",
        HEAD + b"\r\n",
        b"HTTP/1.1 \r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"X: " + b"x" * MAX_HEAD_BYTES,
        CHUNKED + b"-1\r\n",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"0x1\r\n",
        CHUNKED + b"1\r\n{}}",
        CHUNKED + b"0" * (MAX_HEAD_BYTES + 1),
        CHUNKED + b"0\r\nX: " + b"x" * MAX_HEAD_BYTES,
    ],
)
def test_etcd_answer_in_another_protocol_is_refused_at_once(said: bytes) -> None:
    with pytest.raises(NodeError, match="another protocol"):
        list(Replies().feed(said))


@pytest.mark.parametrize(
    "said",
    [
        HEAD + b"Content-Length: %d\r\n\r\n" % (MAX_REPLY_BYTES + 1),
        CHUNKED + b"%x\r\n" % (MAX_REPLY_BYTES + 1),
        CHUNKED + b"1\r\n{\r\n%x\r\n" % MAX_REPLY_BYTES,
    ],
)
def test_etcd_answer_that_is_too_long_is_refused_before_it_comes(said: bytes) -> None:
    with pytest.raises(NodeError, match=f"more than {MAX_REPLY_BYTES} bytes"):
        list(Replies().feed(said))
    assert list(Replies(2 * MAX_REPLY_BYTES).feed(said)) == []


@pytest.mark.parametrize("endless", [False, True])
def test_half_an_etcd_answer_is_waited_for_no_longer_than_a_lost_packet(endless: bool) -> None:
    replies = Replies(endless=endless)
    assert list(replies.feed(b"HTTP/1.1 200 ", 5.0)) == []
    assert list(replies.feed(CHUNKED[13:] + b"3\r\n{}\n\r\n", 6.0))[:1] == [(200, b"{}")] * endless
    if not endless:
        assert list(replies.feed(b"0\r\n\r\n", 6.5)) == [(200, b"{}\n")]
        assert list(replies.feed(HEAD, 60.0)) == []
    else:
        assert list(replies.feed(b"1\r\n{\r\n", 60.0)) == []
    assert replies.partial
    assert list(replies.feed(b"1", 60.0 + REPLY_S)) == []
    with pytest.raises(NodeError, match="half an answer"):
        list(replies.feed(b"0", 60.1 + REPLY_S))


def test_lines_of_an_endless_etcd_answer_are_handed_out_once_they_are_whole() -> None:
    replies = Replies(endless=True)
    stream = CHUNKED + b"4\r\none\n\r\n2\r\ntw\r\n6\r\no\n3\n45\r\n1\r\n\n\r\n"
    read = [one for byte in stream for one in replies.feed(bytes([byte]))]
    assert read == [(200, b"one"), (200, b"two\n3"), (200, b"45")]
    assert not replies.partial
    with pytest.raises(NodeError, match="closed by the server"):
        list(replies.feed(b"0\r\n\r\n"))


def test_etcd_answer_must_be_a_json_object() -> None:
    assert answer(200, b'{"a": 1}') == {"a": 1}
    assert answer(400, b'{"code": 3}') == {"code": 3}
    for status, body in [
        *((404, b'{"a": 1}'), (200, b"[]"), (200, b"<html>"), (502, b""), (200, b'{"code": []}')),
        *((200, b"[" * 100_000), (200, b'{"a":' * 100_000), (400, b'{"code": null}')),
        *((200, b"9" * 5000), (200, b'{"a\xff": 1}')),
    ]:
        with pytest.raises(NodeError, match=f"HTTP status {status}"):
            answer(status, body)


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ({}, ""),
        ({"code": 3, "error": "too  many\noperations"}, "too many operations"),
        ({"code": 7, "message": "permission denied"}, "permission denied"),
        ({"code": 9, "error": "x" * 300}, "x" * 200),
        ({"code": 9, "error": "\x1b[2J\ud800"}, "\\x1b[2J\\ud800"),
        ({"code": 9, "error": {"x": []}}, "no reason given"),
    ],
)
def test_refusal_by_etcd_is_the_reason_of_the_cluster(said: dict[str, Any], refused: str) -> None:
    assert refusal(said) == refused


@pytest.mark.parametrize(
    "said",
    [{"code": code, "error": "why"} for code in (2, 4, 5, 13, 14, 16)]
    + [{"code": 3, "error": "etcdserver: user name is empty"}, {"code": 9, "error": "auth: old"}],
)
def test_refusal_by_an_etcd_member_or_connection_is_an_error(said: Any) -> None:
    with pytest.raises(NodeError, match=said["error"]):
        refusal(said)


@pytest.mark.parametrize(
    "field", ["", "1" * 21, 10**400, "1.5", "1e5", " 1", "\u0661", 1.5, None, True, [], {}, "nan"]
)
def test_malformed_etcd_number_is_refused(field: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        number(field)


# -- Keys


def test_etcd_queue_key_is_in_the_range_of_no_other_name() -> None:
    keys = Keys("p:")
    start, end = keys.line("a"), b64decode(above(keys.line("a")))
    inside = value_of(keys.waiter("a", "process:waiter"))
    outside = [value_of(keys.waiter(name, "process:waiter")) for name in ("ab", "a:", "", "b")]
    assert start <= inside < end
    assert not [key for key in outside if start <= key < end]
    assert value_of(keys.lock("a")) == b"p:lock/a"


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (b"a", b"b"),
        (b"a/", b"a0"),
        (b"a\xff", b"b"),
        (b"a\xfe\xff\xff", b"a\xff"),
        (b"\x00", b"\x01"),
    ],
)
def test_etcd_range_ends_with_the_least_key_above_its_prefix(start: bytes, end: bytes) -> None:
    assert b64decode(above(start)) == end
