"""Connections over scripted peers: made, broken at any point, and made again."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from celery_redlock.protocol import quorum
from celery_redlock.protocol.errors import ConfigurationError, NodeError
from celery_redlock.runtime.polling import Poll
from celery_redlock.stores import connections
from celery_redlock.stores.driver import Driver
from celery_redlock.stores.kinds import parse_nodes
from celery_redlock.stores.redis.node import RedisNode
from celery_redlock.stores.reports import Reports
from tests.support.names import Log, Patch
from tests.support.peer import DEADLINE, Line, bulk, in_thread
from tests.support.peer_world import (
    SHORT,
    PeerWorld,
    a_claim,
    acquire,
    mute,
    votes,
)
from tests.support.wait import wait_until

# -- Connecting


@pytest.mark.parametrize("after", range(9))
def test_a_peer_that_closes_in_the_handshake_is_connected_to_again(
    world: PeerWorld, after: int
) -> None:
    """It closes after each request of the handshake in turn."""

    def breaks(line: Line) -> None:
        for _ in range(after if line.number == 0 else 0):
            if (asked := peer.read(line._file)) is not None:
                line.send(peer.greeting(asked) or b"-ERR\r\n")
        if line.number:
            peer.serve(line)

    peer = world.peer(breaks)
    driver = world.driver(up=False)
    driver.connect(0)
    wait_until(lambda: votes(acquire(driver, "r", token="mine")) == ["yes"], 5, "it is connected")
    assert peer.connections == 2


def test_nodes_that_hang_are_given_up_soon_after_another_is_up(world: PeerWorld) -> None:
    for script in (None, Line.gone, Line.gone):
        world.peer(script)
    urls = [f"{peer.url}?socket_connect_timeout={DEADLINE}" for peer in world.peers]
    driver, begun = world.driver(*urls, up=False), time.monotonic()
    driver.connect(DEADLINE, DEADLINE, SHORT)
    assert time.monotonic() - begun < DEADLINE / 2
    assert acquire(driver, "r").details[1:] == ["no connection yet"] * 2


def test_a_replica_is_refused_until_it_is_a_master(world: PeerWorld) -> None:
    peer = world.peer()
    peer.role = "slave"
    driver = world.driver(up=False)
    with pytest.raises(ConfigurationError, match=r"is not usable: it is a replica .*of h:1"):
        acquire(driver, "r")
    peer.role = "master"
    wait_until(lambda: driver.nodes[0].channel.up, 5, "it is connected to again")
    assert votes(acquire(driver, "r")) == ["yes"]


def test_a_connection_to_a_node_that_is_refused_is_closed(world: PeerWorld) -> None:
    closed = threading.Event()

    def script(line: Line) -> None:
        peer.serve(line)
        closed.set()

    peer = world.peer(script)
    peer.role = "slave"
    with pytest.raises(ConfigurationError):
        acquire(world.driver(up=False), "r")
    assert closed.wait(DEADLINE)


def test_server_under_two_of_three_addresses_votes_once(world: PeerWorld) -> None:
    """With two votes one server would be a quorum."""
    for run_id in ("the same", "the same", "another"):
        world.peer(run_id=run_id)
    with pytest.raises(ConfigurationError, match="is the same server as"):
        acquire(world.driver(up=False), "r")
    driver = world.driver(up=False, strict=False)
    driver.connect(DEADLINE, DEADLINE)
    asked = driver.run(lambda now: quorum.peek([a_claim("r", 3)], now, DEADLINE))
    assert sorted(votes(asked)) == ["silent", "yes", "yes"]


# -- Connections that end


@pytest.mark.parametrize("sent", range(len(bulk(b"theirs"))))
def test_attempt_whose_connection_ends_is_asked_again_on_the_next(
    world: PeerWorld, sent: int
) -> None:
    """Any part of the answer may have come; the caller notices nothing."""

    def breaks(line: Line) -> None:
        if line.number:
            peer.serve(line)
        else:
            line.send(peer.answer(line.request()))
            line.request()
            line.send(bulk(b"theirs")[:sent])

    peer = world.peer(breaks)
    driver = world.driver()
    assert votes(acquire(driver, "before")) == ["yes"]
    peer.next()
    assert votes(acquire(driver, "r")) == ["yes"]
    assert peer.next() == peer.next()
    assert peer.connections == 2


def test_connection_that_worked_is_made_again_without_a_pause(
    world: PeerWorld, monkeypatch: Patch
) -> None:
    """Again and again, as where a proxy closes idle connections."""

    def script(line: Line) -> None:
        line.send(peer.answer(line.request()))
        line.request()

    peer = world.peer(script)
    driver = world.driver()
    monkeypatch.setattr(connections, "JITTER", None)  # nothing is drawn
    for number in range(6):
        assert votes(acquire(driver, str(number))) == ["yes"]
    assert peer.connections == 6


def test_node_that_ends_every_handshake_is_connected_to_after_growing_pauses(
    world: PeerWorld, monkeypatch: Patch
) -> None:
    """Without a pause there would be thousands of connections a second."""
    monkeypatch.setattr(connections, "JITTER", SimpleNamespace(uniform=max))  # the longest
    peer = world.peer(lambda _line: None)
    driver, begun = world.driver(up=False), time.monotonic()
    driver.connect(0)
    wait_until(lambda: peer.connections >= 3, 5, "it tries again and again")
    assert time.monotonic() - begun >= 0.1 + 0.2


def test_a_node_whose_connection_has_ended_is_not_polled(
    world: PeerWorld, monkeypatch: Patch
) -> None:
    """A closed socket would be ready all the time if it were polled."""
    peers = [world.peer(mute), world.peer(mute), world.peer(Line.request)]
    driver = world.driver()
    acquire(driver, "r", SHORT)
    peers[2].close()
    ready: list[int] = []
    wait = Poll.wait

    def noted(poll: Poll, timeout: float) -> list[int]:
        ready.extend(now := wait(poll, timeout))
        return now

    monkeypatch.setattr(Poll, "wait", noted)
    assert votes(acquire(driver, "r", 0.2)) == ["silent"] * 3
    assert ready.count(2) < 4  # its last connections have ended


# -- The end


def test_thread_waiting_for_answers_ends_when_the_driver_is_closed(world: PeerWorld) -> None:
    peer = world.peer(lambda line: line.request() and line.gone())
    driver = world.driver()
    asked = in_thread(lambda: acquire(driver, "r"))
    peer.next()
    begun = time.monotonic()
    driver.close(DEADLINE)
    assert votes(asked()) == ["silent"]
    assert time.monotonic() - begun < DEADLINE / 2


def test_thread_waiting_for_connections_ends_when_the_driver_is_closed(
    world: PeerWorld,
) -> None:
    peer = world.peer(Line.gone)
    driver = world.driver(up=False)
    connecting = in_thread(lambda: driver.connect(DEADLINE, DEADLINE, None))
    wait_until(lambda: peer.connections, 5, "it is connecting")
    begun = time.monotonic()
    driver.close()
    connecting()
    assert time.monotonic() - begun < DEADLINE / 2


def test_no_thread_goes_on_connecting_for_a_closed_driver(world: PeerWorld) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    driver = world.driver(f"redis://127.0.0.1:{port}", up=False)
    driver.connect(0)
    wait_until(lambda: driver.nodes[0].failures > 1, 5, "it has tried twice")
    driver.close(DEADLINE)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.endswith(f"connect 127.0.0.1:{port}")]


def test_driver_closed_while_connecting_reports_nothing_about_the_node(
    monkeypatch: Patch, caplog: Log
) -> None:
    """Listeners serve the whole process and would attribute it to another driver."""
    driver = Driver(parse_nodes(["redis://127.0.0.1:1"]), "redlock:")
    (node,) = driver.nodes

    def closed_meanwhile(_node: RedisNode) -> Any:
        driver.close()
        raise NodeError("it is away")

    told: list[str] = []
    monkeypatch.setattr(RedisNode, "connect", closed_meanwhile)
    monkeypatch.setattr(Reports, "failed", lambda _reports, kind: told.append(kind))
    driver._connect(node)
    assert told == []
    assert caplog.messages == []
