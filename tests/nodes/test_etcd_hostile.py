"""A hostile member of an etcd cluster: whatever it sends is its silence, and the next answers."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from celery_redlock.protocol.errors import NodeError
from celery_redlock.stores.etcd import address as address_module
from celery_redlock.stores.etcd import reader as reader_module
from celery_redlock.stores.etcd import subscription as subscription_module
from celery_redlock.stores.etcd.address import parse
from celery_redlock.stores.etcd.reader import EtcdReader
from celery_redlock.stores.etcd.subscription import EtcdSubscription
from celery_redlock.survey.reader import read_nodes
from tests.support.calls import calls
from tests.support.etcd_peer import EtcdPeer, MemoryEtcd, coded, http
from tests.support.names import Patch
from tests.support.peer import DEADLINE, Line
from tests.support.peer_world import PeerWorld, acquire, votes
from tests.support.wait import wait_until

BUFFERED = 20 * 2**20
"""Bytes that the system may hold between both ends: they are sent, and never read."""
FLOOD = 200 * 2**20
PATIENCE_S = 0.2
"""Seconds for which these tests wait for a member's answer; the default is one."""

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
TRUE = http({"header": {"cluster_id": "77"}, "version": "3.5.21", "leader": "1"})


def flood(begin: bytes, piece: bytes) -> Iterator[bytes]:
    """Yield the beginning, and then the piece again and again."""
    yield begin
    many = piece * (65536 // len(piece) + 1)
    for _ in range(FLOOD // len(many)):
        yield many


ENDLESS: dict[str, Callable[[], Iterable[bytes]]] = {
    "a status line": lambda: flood(b"HTTP/1.1 200 ", b"x"),
    "a header": lambda: flood(OK + b"X: ", b"x"),
    "headers": lambda: flood(OK, b"X: y\r\n"),
    "a body": lambda: flood(OK + b"Content-Length: 1000000000000\r\n\r\n", b"x"),
    "a body of 64 MB": lambda: flood(OK + b"Content-Length: 64000000\r\n\r\n", b"x"),
    "a body without a length": lambda: flood(OK + b"\r\n", b"x"),
    "a chunk size": lambda: flood(CHUNKED, b"0"),
    "a chunk extension": lambda: flood(CHUNKED + b"1;", b"x"),
    "a chunk": lambda: flood(CHUNKED + b"10000000\r\n", b"x"),
    "chunks": lambda: flood(CHUNKED, b"1000\r\n" + b"x" * 4096 + b"\r\n"),
    "a trailer": lambda: flood(CHUNKED + b"2\r\n{}\r\n0\r\nX: ", b"x"),
    "100 Continue": lambda: flood(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "answers": lambda: flood(b"", TRUE),
}
"""Answers of a member that never end."""


def body(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return OK + b"Content-Length: %d\r\n\r\n%b" % (len(raw), raw)


NONSENSE = {
    "a negative length": OK + b"Content-Length: -5\r\n\r\n{}",
    "a length that is none": OK + b"Content-Length: 0x2\r\n\r\n{}",
    "two lengths": OK + b"Content-Length: 2\r\nContent-Length: 9\r\n\r\n{}",
    "a length and chunks": (
        OK + b"Content-Length: 7\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    ),
    "a negative chunk": CHUNKED + b"-2\r\n{}\r\n",
    "a chunk without its end": CHUNKED + b"2\r\n{}xx0\r\n\r\n",
    "204 with a body": b"HTTP/1.1 204 No Content\r\n\r\n{}",
    "gzip": OK + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00",
    "TLS": b"\x15\x03\x03\x00\x02\x02\x28",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "HTTP/2": b"\x00\x00\x12\x04\x00\x00\x00\x00\x00",
    "Redis": b"-ERR unknown command\r\n",
    "an answer too many": TRUE + http({}),
    "half an answer": TRUE[:-9],
    "nothing": b"",
    "deeply nested": body("[" * 100_000),
    "nested objects": body('{"a":' * 100_000),
    "a number of 5000 digits": body('{"leader":%s}' % ("9" * 5000)),
    "NaN": body('{"header":NaN,"leader":Infinity}'),
    "a lone surrogate": body('{"header":{"cluster_id":"\ud800"},"version":"\\ud800"}'),
    "no UTF-8": OK + b'Content-Length: 8\r\n\r\n{"a\xff":1}',
    "a list": body("[]"),
    "a code that is a list": body('{"code": [], "error": {}}'),
    "a code that is an object": body('{"code": {}, "error": []}'),
}
"""Malformed answers of a member that then closes the connection."""


def hostile(line: Line, sends: Iterable[bytes]) -> None:
    """Send this, whatever was asked."""
    line.sent = 0  # type: ignore[attr-defined]
    with contextlib.suppress(OSError):
        for piece in sends:
            line.stream.sendall(piece)
            line.sent += len(piece)  # type: ignore[attr-defined]


def drip(line: Line, data: bytes) -> None:
    """Send byte by byte, each of them in time."""
    with contextlib.suppress(OSError):
        for byte in data:
            line.stream.sendall(bytes([byte]))
            time.sleep(PATIENCE_S / 10)


def reset(line: Line) -> None:
    """End the connection as a crash of its machine does."""
    line.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.stream.close()


def silent_after(data: bytes) -> Callable[[Line], object]:
    def script(line: Line) -> None:
        line.send(data)
        line.gone()

    return script


SLOW: dict[str, Callable[[Line], object]] = {
    "bytes that drip": lambda line: drip(line, TRUE[:-9] + b" " * 9999),
    "a head that drips": lambda line: drip(line, OK + b"X: y\r\n" * 999),
    "half an answer, and silence": silent_after(TRUE[:-9]),
    "one 100 Continue, and silence": silent_after(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "silence": silent_after(b""),
}
HOSTILE: dict[str, Callable[[Line], object]] = {
    **{f"endless: {k}": lambda line, v=v: hostile(line, v()) for k, v in ENDLESS.items()},
    **{k: lambda line, v=v: hostile(line, [v]) for k, v in NONSENSE.items()},
    **SLOW,
    "a reset": reset,
}


def hostile_after(answers: int, name: str) -> Callable[[Line], object]:
    """Return a script that is honest for so many requests of a handshake."""

    def script(line: Line) -> None:
        for _ in range(answers):
            asked = line.peer.read(line._file)
            line.send(line.peer.greeting(asked) if asked else b"")
        if line.peer.read(line._file):
            HOSTILE[name](line)

    return script


@pytest.fixture(autouse=True)
def _soon(monkeypatch: Patch) -> None:
    monkeypatch.setattr(address_module, "TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr("celery_redlock.stores.etcd.node.LEAVE_S", PATIENCE_S)
    monkeypatch.setattr("secrets.randbelow", lambda _count: 0)  # the first member is asked first


def url_of(*members: EtcdPeer) -> str:
    return "etcd://" + ",".join(f"127.0.0.1:{member.port}" for member in members)


def assert_little_was_sent(peer: EtcdPeer) -> None:
    for line in peer._lines:
        wait_until(lambda stream=line.stream: stream.fileno() < 0, DEADLINE, "it is hung up on")
        assert getattr(line, "sent", 0) < BUFFERED


@pytest.mark.parametrize("name", HOSTILE)
def test_handshake_with_a_hostile_member_is_that_members_silence(
    world: PeerWorld, name: str
) -> None:
    etcd = MemoryEtcd()
    bad = world.etcd_peer(hostile_after(0, name), etcd=etcd)
    honest = world.etcd_peer(etcd=etcd)
    driver = world.driver(url_of(bad, honest), up=False)
    wait_until(lambda: votes(acquire(driver, "r", token="mine")) == ["yes"], DEADLINE, "it is ours")
    assert_little_was_sent(bad)


@pytest.mark.parametrize("name", HOSTILE)
def test_requests_to_a_member_that_turns_hostile_are_answered_by_the_next(
    world: PeerWorld, name: str
) -> None:
    etcd = MemoryEtcd()

    bad = world.etcd_peer(hostile_after(2, name), etcd=etcd)
    driver = world.driver(url_of(bad, world.etcd_peer(etcd=etcd)))
    wait_until(lambda: votes(acquire(driver, "r", token="mine")) == ["yes"], DEADLINE, "it is ours")
    assert_little_was_sent(bad)


FEW = ["endless: a body", "endless: chunks", "deeply nested", "a code that is a list", "NaN"]


@pytest.mark.parametrize("name", [*FEW, "bytes that drip", "an answer too many"])
@pytest.mark.parametrize("after", [0, 1])
def test_look_at_a_hostile_member_is_an_error_of_that_node(after: int, name: str) -> None:
    with EtcdPeer(hostile_after(after, name)) as bad:
        reader = EtcdReader(parse(bad.url, "nodes[0]"), "redlock:", PATIENCE_S)
        with pytest.raises((NodeError, TimeoutError)):
            reader.connect()
            reader.rtt()
        reader.close()
        assert_little_was_sent(bad)


def test_look_asks_the_next_member_if_the_first_hangs_for_the_timeout(
    world: PeerWorld, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(address_module, "TIMEOUT_S", 1.0)
    honest = world.etcd_peer(etcd=MemoryEtcd())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"etcd://127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{honest.port}"
        address = parse(url, "nodes[0]")
        (look,), results = read_nodes([address], "redlock:", lambda _reader: "read", 1.0)
    assert (look.error, results) == ("", ["read"])


def test_look_that_finds_ever_more_keys_is_given_up(monkeypatch: Patch) -> None:
    monkeypatch.setattr(reader_module, "MAX_NODE_BYTES", 2**20)
    kvs = [{"key": coded(b"redlock:lock/%d" % n)} for n in range(1000)]
    asked: list[Any] = []

    def more(line: Line) -> None:
        while one := line.request():
            asked.append(one)
            line.send(http({"kvs": kvs, "more": True}))

    with EtcdPeer(more) as bad:
        reader = EtcdReader(parse(bad.url, "nodes[0]"), "redlock:", DEADLINE)
        reader.connect()
        with pytest.raises(NodeError, match="more than is read of one node"):
            reader.scan("")
        reader.close()
    assert len(asked) < 50


WATCHED = {
    "a line": lambda: flood(CHUNKED, b"1000\r\n" + b"x" * 4096 + b"\r\n"),
    "an odd event": lambda: [CHUNKED + chunk(b'{"result":{"events":[7]}}\n')],
    "deeply nested": lambda: [CHUNKED + chunk(b"[" * 100_000 + b"\n")],
    "no answer": lambda: [CHUNKED + chunk(b"[]\n")],
    "an error": lambda: [CHUNKED + chunk(b'{"error":{"grpc_code":[]}}\n')],
    "no chunk": lambda: [OK + b"Content-Length: 2\r\n\r\n{}"],
}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize("name", [*FEW, *WATCHED])
def test_watch_of_a_hostile_etcd_member_ends_and_is_made_again(name: str) -> None:
    def turns(line: Line) -> None:
        while (asked := line.request()) is not None:
            if asked.path == "watch":
                hostile(line, WATCHED[name]()) if name in WATCHED else HOSTILE[name](line)
                return
            line.send(http({"header": {"revision": "7"}}))

    with EtcdPeer(turns) as bad:
        subscription = EtcdSubscription(parse(bad.url, "nodes[0]"), b"redlock:p")
        with pytest.raises(Exception) as raised:
            subscription.connect()
            list(calls(subscription))
        subscription.close()
        assert subscription.reason(raised.value)
        assert_little_was_sent(bad)


def test_etcd_member_that_does_not_confirm_a_watch_is_left(monkeypatch: Patch) -> None:
    monkeypatch.setattr(subscription_module, "LISTENS_S", 3 * PATIENCE_S)
    monkeypatch.setattr(subscription_module, "lease_id", lambda *_: 1)

    def silent(line: Line) -> None:
        while (asked := line.request()) is not None:
            if asked.path != "watch":
                line.send(http({"header": {"revision": "7"}, "result": {"TTL": "3"}}))

    with EtcdPeer(silent) as bad:
        subscription = EtcdSubscription(parse(bad.url, "nodes[0]"), b"redlock:p")
        with pytest.raises(TimeoutError):
            subscription.connect()
        subscription.close()
