"""The words of etcd: requests, answers in any pieces, and keys."""

from __future__ import annotations

import json
import random
from base64 import b64decode
from typing import Any

import pytest

from celery_redlock.protocol.errors import NodeError
from celery_redlock.stores.etcd.wire import (
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    Keys,
    Replies,
    Request,
    above,
    answer,
    refusal,
    request,
    text,
    value_of,
)
from tests.support.etcd_peer import http

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def test_a_request_has_the_length_of_its_body() -> None:
    asked = request(Request("kv/range", {"key": "ä"}), b"Host: h\r\n")
    head, _, body = asked.partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[:2] == [b"POST /v3/kv/range HTTP/1.1", b"Host: h"]
    assert head.endswith(b"Content-Length: %d" % len(body))
    assert json.loads(body) == {"key": "ä"}


# -- Answers


def test_answers_are_the_same_however_they_are_cut() -> None:
    """In random pieces, from a seed."""
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


def test_an_answer_is_complete_at_its_last_byte_and_not_before() -> None:
    for said in (
        http({}),
        http({"a": "b"}, chunked=4),
        CHUNKED + b"2;x=y\r\n{}\r\n0\r\nT: 1\r\n\r\n",
    ):
        replies = Replies()
        assert [list(replies.feed(said[at : at + 1])) for at in range(len(said) - 1)] == [
            [] for _ in range(len(said) - 1)
        ]
        assert len(list(replies.feed(said[-1:]))) == 1


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/2 200\r\n",
        b"X",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1),
        HEAD + b"Content-Length: much\r\n\r\n",
        HEAD + b"no field\r\n\r\n",
        HEAD + b"\r\n",
        b"HTTP/1.1 \r\nContent-Length: 2\r\n\r\n{}",
        HEAD + b"X: " + b"x" * MAX_HEAD_BYTES,
        CHUNKED + b"-1\r\n",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"%x\r\n" % (MAX_BODY_BYTES + 1),
        CHUNKED + b"1\r\n{\r\n%x\r\n" % MAX_BODY_BYTES,
    ],
)
def test_an_answer_that_is_no_http_or_too_long_is_refused_at_once(said: bytes) -> None:
    with pytest.raises(NodeError, match="another protocol"):
        list(Replies().feed(said))


def test_the_longest_head_and_the_longest_body_that_are_allowed_are_read() -> None:
    head = HEAD + b"Content-Length: 0\r\nX: "
    head += b"x" * (MAX_HEAD_BYTES - len(head) - 4) + b"\r\n\r\n"
    assert list(Replies().feed(head)) == [(200, b"")]
    assert list(Replies().feed(HEAD + b"Content-Length: %d\r\n\r\n" % MAX_BODY_BYTES)) == []


def test_each_part_of_an_endless_answer_is_handed_out() -> None:
    replies = Replies(endless=True)
    stream = CHUNKED + b"3\r\none\r\n3\r\ntwo\r\n"
    read = [one for byte in stream for one in replies.feed(bytes([byte]))]
    assert read == [(200, b"one"), (200, b"two")]
    with pytest.raises(NodeError, match="closed by the server"):
        list(replies.feed(b"0\r\n\r\n"))


def test_an_answer_is_an_object_of_etcd() -> None:
    assert answer(200, b'{"a": 1}') == {"a": 1}
    assert answer(400, b'{"code": 3}') == {"code": 3}
    for status, body in [(404, b'{"a": 1}'), (200, b"[]"), (200, b"<html>"), (502, b"")]:
        with pytest.raises(NodeError, match=f"HTTP status {status}"):
            answer(status, body)


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ({}, ""),
        ({"code": 3, "error": "too  many\noperations"}, "too many operations"),
        ({"code": 7, "message": "permission denied"}, "permission denied"),
        ({"code": 9, "error": "x" * 300}, "x" * 200),
    ],
)
def test_a_refusal_is_the_reason_of_the_cluster(said: dict[str, Any], refused: str) -> None:
    assert refusal(said) == refused


@pytest.mark.parametrize(
    "said",
    [{"code": code, "error": "why"} for code in (2, 4, 5, 13, 14, 16)]
    + [{"code": 3, "error": "etcdserver: user name is empty"}, {"code": 9, "error": "auth: old"}],
)
def test_a_refusal_that_is_of_the_member_or_the_connection_is_an_error(said: Any) -> None:
    with pytest.raises(NodeError, match=said["error"]):
        refusal(said)


# -- Keys


def test_no_key_of_a_queue_is_in_the_queue_of_another_name() -> None:
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
def test_a_range_ends_with_the_least_key_above_those_that_begin_so(
    start: bytes, end: bytes
) -> None:
    assert b64decode(above(start)) == end


def test_a_name_with_half_characters_is_coded_and_read_again() -> None:
    key = Keys("p:").lock("\ud800")
    assert value_of(key) == b"p:lock/\xed\xa0\x80"
    assert text(value_of(key)) == key
