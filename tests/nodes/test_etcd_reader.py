"""The reader of an etcd cluster over scripted members: what commands show of locks and queues."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator

import pytest

from celery_redlock.stores.etcd import reader as reader_module
from celery_redlock.stores.etcd.address import parse
from celery_redlock.stores.etcd.questions import MAX_OPS, lease_id
from celery_redlock.stores.etcd.reader import EtcdReader
from celery_redlock.stores.reading import QUEUE, KeyValue
from tests.support.etcd_peer import EtcdPeer, MemoryEtcd
from tests.support.names import Patch
from tests.support.peer import DEADLINE

PREFIX = "redlock:"


@pytest.fixture(autouse=True)
def _handshakes_may_take_their_time(monkeypatch: Patch) -> None:
    monkeypatch.setattr("celery_redlock.stores.etcd.address.TIMEOUT_S", DEADLINE)


@pytest.fixture
def etcd() -> MemoryEtcd:
    return MemoryEtcd()


@pytest.fixture
def peer(etcd: MemoryEtcd) -> Iterator[EtcdPeer]:
    with EtcdPeer(etcd=etcd) as peer:
        yield peer


@pytest.fixture
def reader(peer: EtcdPeer) -> Iterator[EtcdReader]:
    reader = EtcdReader(parse(peer.url, "nodes[0]"), PREFIX, DEADLINE)
    reader.connect()
    yield reader
    reader.close()


def hold(etcd: MemoryEtcd, name: str, token: str, ttl: float = 60.0) -> None:
    lease = str(lease_id(ttl, len(etcd.leases)))
    etcd.leases[lease] = math.ceil(ttl)
    etcd.put(f"redlock:lock/{name}".encode(), token.encode(), lease)


def wait_for(etcd: MemoryEtcd, name: bytes, waiter: bytes, since: int, lease: str = "") -> None:
    etcd.put(b"redlock:line/" + name + b"\xff" + waiter, b"%020d" % since, lease)


def test_etcd_scan_finds_locks_tokens_and_queues_by_name(
    etcd: MemoryEtcd, reader: EtcdReader
) -> None:
    for name in ("a", "a#reserved", "b"):
        hold(etcd, name, "t")
    wait_for(etcd, b"a", b"p:w", 1)
    wait_for(etcd, b"a", b"p:x", 2)
    etcd.put(b"another:lock/a", b"t")
    assert set(reader.scan("")) == {"a", "a#fence", "a#reserved", "b", "b#fence", "a#line"}
    assert set(reader.scan("a")) == {"a", "a#fence", "a#reserved", "a#line"}
    assert reader.scan("b")["b"] == b"redlock:b"
    assert reader.scan("none") == {}


def test_etcd_scan_of_many_keys_reads_each_page(
    etcd: MemoryEtcd, reader: EtcdReader, monkeypatch: Patch
) -> None:
    """One key a page. The key after "a" is "a!", which is less than "a0"."""
    monkeypatch.setattr(reader_module, "PAGE", 1)
    names = {"a", "a!", "a!!", "b"}
    for name in names:
        hold(etcd, name, "t")
    assert {name for name in reader.scan("") if "#" not in name} == names


def test_etcd_reader_returns_tokens_with_their_time_left(
    etcd: MemoryEtcd, reader: EtcdReader
) -> None:
    hold(etcd, "a", "mine", 60.0)
    hold(etcd, "over", "gone", 5.0)
    etcd.put(b"redlock:lock/for ever", b"theirs")
    etcd.elapsed = 20
    keys = {
        name: f"redlock:{name}".encode() for name in ("a", "a#fence", "over", "free", "for ever")
    }
    found = reader.values(keys)
    assert set(found) == {"a", "a#fence", "for ever"}
    assert found["a"].value == b"mine"
    assert 39 <= found["a"].left <= 41
    assert int(found["a#fence"].value) > 1
    assert found["for ever"] == KeyValue(b"theirs", math.inf)


def test_etcd_reader_splits_many_keys_into_transactions(
    etcd: MemoryEtcd, reader: EtcdReader
) -> None:
    names = [str(n) for n in range(2 * MAX_OPS + 1)]
    for name in names:
        etcd.put(f"redlock:lock/{name}".encode(), name.encode())
    found = reader.values({name: f"redlock:{name}".encode() for name in names})
    assert {name: one.value.decode() for name, one in found.items()} == {n: n for n in names}


def test_etcd_reader_shows_a_queue_in_the_order_of_its_waiters(
    etcd: MemoryEtcd, reader: EtcdReader
) -> None:
    lease = str(lease_id(60.0))
    etcd.leases[lease], etcd.elapsed = 60, 10
    wait_for(etcd, b"a", b"p:third", 3_000, lease)
    wait_for(etcd, b"a", b"p:first", 1_000)
    wait_for(etcd, b"a", b"p:second", 2_000)
    wait_for(etcd, b"ab", b"p:other", 1)
    queue = reader.queues({"a#line": b"redlock:a#line"}, 2)["a#line"]
    assert (queue.value, queue.waiting) == (QUEUE, 3)
    assert queue.first == ((b"p:first", 1_000.0), (b"p:second", 2_000.0))
    assert 49 <= queue.left <= 51
    assert reader.queues({"b#line": b"redlock:b#line"}, 2) == {}


def test_etcd_reader_reports_its_round_trip_and_its_peer(reader: EtcdReader) -> None:
    before = reader.heard
    assert 0.0 < reader.rtt() < DEADLINE
    assert reader.heard > before
    assert reader.peer == "127.0.0.1"


def test_each_etcd_member_is_asked_for_its_cluster(peer: EtcdPeer) -> None:
    with (
        EtcdPeer(etcd=MemoryEtcd("78")) as foreign,
        EtcdPeer(etcd=peer.etcd) as leaderless,
        socket.create_server(("127.0.0.1", 0)) as gone,
    ):
        leaderless.said["maintenance/status"] = {"header": {"cluster_id": "77"}, "version": "3.5"}
        port = gone.getsockname()[1]
        gone.close()
        ports = [peer.port, foreign.port, leaderless.port, port]
        members = [f"127.0.0.1:{port}" for port in ports]
        reader = EtcdReader(parse(f"etcd://{','.join(members)}", "nodes[0]"), PREFIX, DEADLINE)
        whys, clusters = reader.members()
    assert [whys[member] for member in members] == [
        *("", "", "it has no leader", "Connection refused"),
    ]
    assert clusters == {"77", "78"}
