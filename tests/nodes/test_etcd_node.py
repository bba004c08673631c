"""An etcd cluster as a node, over scripted members: what a caller gets, whatever they do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from celery_redlock.protocol import quorum
from celery_redlock.protocol.errors import ConfigurationError, NodeError
from celery_redlock.protocol.node_info import NodeInfo
from celery_redlock.protocol.restart_guard import RestartGuard
from celery_redlock.stores.etcd.address import parse
from celery_redlock.stores.kinds import make_node, parse_nodes
from celery_redlock.stores.node import LEAVE_S
from tests.support.clock import FakeClock
from tests.support.etcd_peer import EtcdPeer, MemoryEtcd, http
from tests.support.peer import DEADLINE, Line, in_thread
from tests.support.peer_world import SHORT, PeerWorld, a_claim, acquire, mute, votes
from tests.support.wait import wait_until
from tests.support.wire import Wire

Refused = dict[str, Any]
NO_LEADER = {"code": 14, "error": "etcdserver: no leader"}


def key(name: str) -> bytes:
    return b"redlock:lock/" + name.encode()


# -- What is asked and answered


def test_etcd_requests_of_many_steps_get_their_own_answers(world: PeerWorld) -> None:
    """A look reads keys first and then their leases; other requests are written in between."""
    peer = world.etcd_peer()
    driver = world.driver()
    names = [f"key {n}" for n in range(12)]
    for name in names:
        acquire(driver, name)

    def look(name: str) -> Any:
        return [
            driver.run(lambda now: quorum.peek([a_claim(name)], now, DEADLINE)).details[0][0]
            for _ in range(5)
        ]

    def attempt(name: str) -> Any:
        return [acquire(driver, name, token="other").details[0] for _ in range(5)]

    asked = [in_thread(partial(call, name)) for name in names for call in (look, attempt)]
    assert [one() for one in asked] == [
        [f"token of {name}"] * 5 for name in names for _ in range(2)
    ]
    assert peer.connections == 1


def test_etcd_attempt_without_an_answer_is_undone_behind_itself(world: PeerWorld) -> None:
    peer = world.etcd_peer(mute)
    driver = world.driver()
    assert votes(acquire(driver, "r", SHORT)) == ["silent"]
    asked = [peer.next() for _ in range(3)]
    assert [one.path for one in asked] == ["lease/grant", "kv/txn", "kv/txn"]
    undoing = asked[2].body["success"][0]["requestTxn"]
    assert [next(iter(op)) for op in undoing["success"]] == ["requestDeleteRange"]


def test_new_etcd_connection_has_leases_of_its_own(world: PeerWorld) -> None:
    """It is unknown whether the leases of the previous connection were granted."""

    def breaks(line: Line) -> None:
        for _ in range(2 if line.number == 0 else 0):  # a lease and a transaction
            line.send(peer.answer(line.request()))
        if line.number:
            peer.serve(line)

    peer = world.etcd_peer(breaks)
    driver = world.driver()
    for name in "ab":
        assert votes(acquire(driver, name)) == ["yes"]
    assert peer.etcd.lease_of(key("a")) != peer.etcd.lease_of(key("b"))


def test_error_of_the_etcd_cluster_is_silence_with_its_reason(world: PeerWorld) -> None:
    def full(line: Line) -> None:
        while (asked := line.request()) is not None:
            said = {"code": 8, "error": "etcdserver: mvcc: database space exceeded"}
            line.send(peer.http(said) if asked.path == "kv/txn" else peer.answer(asked))

    peer = world.etcd_peer(full)
    asked = acquire(world.driver(), "r")
    assert votes(asked) == ["silent"]
    assert "database space exceeded" in asked.details[0]
    assert peer.connections == 1


# -- Connections


@pytest.mark.parametrize("answered", range(2))
def test_etcd_look_whose_connection_ends_begins_again_on_the_next(
    world: PeerWorld, answered: int
) -> None:
    def breaks(line: Line) -> None:
        for _ in range(2 + answered if line.number == 0 else 0):
            line.send(peer.answer(line.request()))
        if line.number:
            peer.serve(line)
        else:
            line.request()

    peer = world.etcd_peer(breaks)
    driver = world.driver()
    acquire(driver, "r", token="mine")
    seen = driver.run(lambda now: quorum.peek([a_claim("r")], now, DEADLINE))
    assert seen.details[0][0] == "mine"
    assert peer.connections == 2


# -- Members


def two(world: PeerWorld, first: Callable[[Line], object]) -> tuple[EtcdPeer, EtcdPeer, str]:
    """Return two members of one cluster and their URL; the one asked first does as `first` says.

    Whichever is connected to first is the first, so the script of both is the same.
    """
    etcd, begun = MemoryEtcd(), threading.Lock()

    def script(line: Line) -> None:
        asked = line.request()
        if asked is not None and begun.acquire(blocking=False):
            line.asked = asked  # type: ignore[attr-defined]
            first(line)
        elif asked is not None:
            line.send(line.peer.answer(asked))
            line.peer.serve(line)

    members = [world.etcd_peer(script, etcd=etcd) for _ in range(2)]
    url = f"etcd://127.0.0.1:{members[0].port},127.0.0.1:{members[1].port}"
    return members[0], members[1], url


def connections(*members: EtcdPeer) -> list[int]:
    """Return how often each member was connected to by a node, not only compared with another."""
    return sorted(sum(post.path == "kv/range" for post in member.greeted) for member in members)


def test_etcd_member_without_a_leader_is_left_for_the_next(world: PeerWorld) -> None:
    def leaderless(line: Line) -> None:
        line.send(line.peer.http(NO_LEADER) * 2)  # type: ignore[attr-defined]
        line.gone()

    one, other, url = two(world, leaderless)
    driver = world.driver(url)
    wait_until(lambda: votes(acquire(driver, "r", 1.0)) == ["yes"], 5, "another has answered")
    assert connections(one, other) == [1, 1]


def asking(count: int) -> tuple[Any, Wire, FakeClock, list[Any]]:
    """Return a node that has asked one of two members to undo so many, and these rounds."""
    clock, wire = FakeClock(), Wire()
    wire.head, wire.at = b"", 0  # type: ignore[attr-defined]
    (address,) = parse_nodes(["etcd://127.0.0.1:1,127.0.0.1:2"])
    guard = RestartGuard(False, 60.0, print)
    node = make_node(0, address, "redlock:", guard, [], clock=clock, later=lambda call: call())
    node.opened(wire, NodeInfo(), clock(), clock())
    undone = [next(quorum.undo(a_claim(str(n)), clock())) for n in range(count)]
    for round_ in undone:
        round_.until += DEADLINE
        node.ask(round_, None, clock())
    return node, wire, clock, undone


def test_etcd_member_whose_answer_drips_is_left_as_a_silent_one() -> None:
    node, wire, clock, _undone = asking(1)
    for byte in b"HTTP":
        assert not wire.closed
        wire.peer.sendall(bytes([byte]))
        clock.advance(0.3 * LEAVE_S)
        node.receive()
    assert wire.closed


def test_etcd_member_that_makes_progress_is_not_left() -> None:
    """Its answers arrive one by one, each before it would be left, and all of them later."""
    node, wire, clock, undone = asking(3)
    for _ in undone[1:]:
        wire.peer.sendall(http({"responses": [{"response_txn": {}}]}))
        clock.advance(LEAVE_S - 0.1)
        node.receive()
        assert not wire.closed
    clock.advance(LEAVE_S + 0.1)
    node.receive()
    assert wire.closed
    assert [votes(round_) for round_ in undone] == [["no"], ["no"], ["silent"]]


def test_members_of_two_etcd_clusters_are_refused_as_one_node(world: PeerWorld) -> None:
    one, other = (world.etcd_peer(etcd=MemoryEtcd(cluster)) for cluster in ("1", "2"))
    url = f"etcd://127.0.0.1:{one.port},127.0.0.1:{other.port}"
    with pytest.raises(ConfigurationError, match="are of several clusters"):
        acquire(world.driver(url, up=False), "r")


# -- The handshake


@pytest.mark.parametrize(
    ("path", "said", "why"),
    [
        ("maintenance/status", {"version": "3.3.27", "leader": "1"}, "it is etcd 3.3.27"),
        ("maintenance/status", {"version": "2.3.8", "leader": "1"}, "it is etcd 2.3.8, and 3.4"),
        ("kv/range", {"code": 7, "error": "etcdserver: permission denied"}, "it refuses us"),
        ("kv/range", {"code": 3, "error": "etcdserver: user name is empty"}, "it refuses us"),
    ],
)
def test_etcd_cluster_that_cannot_be_a_node_is_refused_with_the_reason(
    world: PeerWorld, path: str, said: Refused, why: str
) -> None:
    world.etcd_peer().said[path] = {"header": {"cluster_id": "77"}, **said}
    with pytest.raises(ConfigurationError, match=why):
        acquire(world.driver(up=False), "r")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("maintenance/status", {"version": "3.5.21", "header": {"cluster_id": "77"}}),
        ("kv/range", NO_LEADER),
        ("kv/range", {"code": 4, "error": "etcdserver: request timed out"}),
    ],
)
def test_etcd_member_without_a_leader_is_silent_until_it_has_one(
    world: PeerWorld, path: str, said: Refused
) -> None:
    peer = world.etcd_peer()
    peer.said[path] = said
    driver = world.driver(up=False)
    asked = acquire(driver, "r", SHORT)
    assert votes(asked) == ["silent"]
    peer.said.clear()
    wait_until(lambda: votes(acquire(driver, "r", 1.0)) == ["yes"], 5, "it votes")


def test_etcd_user_sends_the_password_once_and_a_token_with_each_request(world: PeerWorld) -> None:
    peer = world.etcd_peer()
    driver = world.driver(f"etcd://me:secret@127.0.0.1:{peer.port}")
    assert votes(acquire(driver, "r")) == ["yes"]
    login, *others = peer.greeted
    assert login.body == {"name": "me", "password": "secret"}
    heads = [one.head for one in others] + [peer.next().head]
    assert [head["authorization"] for head in heads] == ["a token"] * len(heads)


def test_etcd_member_that_is_only_compared_is_sent_no_password(world: PeerWorld) -> None:
    """Checking a password costs a server a tenth of a second."""
    etcd = MemoryEtcd()
    members = [world.etcd_peer(etcd=etcd) for _ in range(2)]
    where = ",".join(f"127.0.0.1:{member.port}" for member in members)
    world.driver(f"etcd://me:secret@{where}")
    logins = [post for member in members for post in member.greeted if "password" in post.body]
    assert len(logins) == 1
    assert all(member.greeted for member in members)


def test_etcd_user_is_not_named_where_authentication_is_off(world: PeerWorld) -> None:
    peer = world.etcd_peer()
    peer.said["auth/authenticate"] = {"code": 9, "error": "authentication is not enabled"}
    driver = world.driver(f"etcd://me:secret@127.0.0.1:{peer.port}")
    assert votes(acquire(driver, "r")) == ["yes"]
    assert "authorization" not in peer.next().head


def test_wrong_etcd_password_is_in_no_error(world: PeerWorld) -> None:
    peer = world.etcd_peer()
    said = {"code": 3, "error": "etcdserver: authentication failed, invalid user ID or password"}
    peer.said["auth/authenticate"] = said
    driver = world.driver(f"etcd://me:secret@127.0.0.1:{peer.port}", up=False)
    asked = acquire(driver, "r", SHORT)
    assert votes(asked) == ["silent"]
    assert "authentication failed" in asked.details[0]
    assert "secret" not in asked.details[0]


def test_error_of_an_unreachable_etcd_cluster_names_each_member() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as b:
        ports = one.getsockname()[1], b.getsockname()[1]
    whys = [f"127.0.0.1:{port}: Connection refused" for port in ports]
    members = ",".join(f"127.0.0.1:{port}" for port in ports)
    with pytest.raises(NodeError) as raised:
        parse(f"etcd://{members}", "nodes[0]").connect()
    assert str(raised.value) == "; ".join(sorted(whys))
    with pytest.raises(NodeError, match=r"\AConnection refused\Z"):
        parse(f"etcd://127.0.0.1:{ports[0]}", "nodes[0]").connect()
