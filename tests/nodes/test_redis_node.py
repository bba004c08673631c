"""One node of Redis: which answers count for which requests, and what it proves to the guard."""

from __future__ import annotations

from typing import Any

import pytest

from celery_redlock.protocol import quorum
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.node_info import NodeInfo
from celery_redlock.protocol.restart_guard import RestartGuard, Trust
from celery_redlock.protocol.round import Round, Verb
from celery_redlock.protocol.values import Vote
from celery_redlock.stores.redis.address import parse_nodes
from celery_redlock.stores.redis.node import RedisNode
from celery_redlock.stores.redis.requests import encode, request
from celery_redlock.stores.redis.scripts import RELEASE_DIGEST
from tests.support.clock import FakeClock
from tests.support.names import Patch
from tests.support.wire import Wire

NOW = 1000.0
PREFIX = "redlock:"
ADDRESS = parse_nodes(["redis://127.0.0.1:1"])[0]


@pytest.fixture
def wire() -> Any:
    wire = Wire()
    yield wire
    wire.disconnect()


@pytest.fixture
def node(wire: Wire) -> RedisNode:
    node = RedisNode(
        *(0, ADDRESS, PREFIX, RestartGuard(False, 30.0, print), []),
        clock=lambda: 1.2,
        later=lambda call: call(),
    )
    node.opened(wire, NodeInfo(), 1.0, 1.0)
    return node


def test_arrived_answer_is_read_before_a_newer_extension_is_asked(
    node: RedisNode, wire: Wire
) -> None:
    """Read later, an older answer would count for a younger request."""
    mine = Claim("r", "mine", 10.0, 1)
    first, second = (next(quorum.extend([mine], at, 0.5)) for at in (1.0, 1.1))
    node.ask(first, encode(first, PREFIX), 1.0)
    assert wire.peer.recv(65536)
    wire.peer.sendall(b"$1\r\n1\r\n")
    assert first.votes == [None]
    node.ask(second, encode(second, PREFIX), 1.1)
    assert first.votes == [Vote.YES]
    assert second.votes == [None]


@pytest.mark.parametrize("interrupted", [True, False])
def test_old_server_is_not_asked_again_for_an_attempt_that_is_over(
    node: RedisNode, wire: Wire, interrupted: bool
) -> None:
    """Redis 6.2 rejects SET .. NX GET; the attempt may be over by the time that answer arrives.

    The round of an interrupted attempt is never closed: it has ended, and is not looked at again.
    """
    mine = Claim("r", "mine", 10.0, 1)
    asked = next(attempt := quorum.acquire(mine, 1.0, 0.5))
    node.ask(asked, encode(asked, PREFIX), 1.0)
    assert b"SET" in wire.peer.recv(65536)
    if interrupted:
        mine.ended = True
    else:
        asked.close("no answer")
        undoing = attempt.send(1.1)
        node.ask(undoing, encode(undoing, PREFIX), 1.1)
        assert b"DEL" in wire.peer.recv(65536)
    wire.peer.sendall(b"-ERR syntax error\r\n")
    node.receive()
    with pytest.raises(BlockingIOError):
        wire.peer.recv(65536)  # it would be set, and nobody would free it


def test_write_proves_a_master_only_at_the_time_of_its_request(wire: Wire) -> None:
    """It may be a replica by the time of the answer: the next vote needs another look."""
    guard = RestartGuard(True, 30.0, print)
    node = RedisNode(*(0, ADDRESS, PREFIX, guard, []), clock=lambda: 1.2, later=lambda call: call())
    node.opened(wire, NodeInfo(run_id="one", uptime=1e6, role="master"), 1.0, 1.0)
    asked = next(quorum.extend([Claim("r", "mine", 10.0, 1)], 1.1, 0.5))
    node.ask(asked, encode(asked, PREFIX), 1.1)
    wire.peer.sendall(b"$1\r\n1\r\n")
    node.receive()  # at 1.2
    assert asked.votes == [Vote.YES]
    assert not node._trust.to_ask_again(1.1)
    assert node._trust.to_ask_again(1.2)


@pytest.mark.parametrize("uptime", [50.0, 99.0], ids=["restarted", "restarted right after it"])
def test_unread_answer_does_not_turn_a_later_restart_into_a_swap(uptime: float) -> None:
    """An idle process reads the answer to a release only with its next request."""
    trust = idle_node_meets(uptime)
    assert (trust.memory.what, trust.memory.began) == ("started", 101.0 - uptime)


def test_server_that_ran_when_the_previous_one_answered_is_another_server() -> None:
    trust = idle_node_meets(100.0)
    assert trust.memory.began == 100.0
    assert trust.doubt(100.0).startswith("is another server than before, met 0 s ago")


def idle_node_meets(uptime: float) -> Trust:
    """Have a server answer a release of 1.1; at 100.0, read that and meet one with this uptime."""
    guard, clock, wires = RestartGuard(True, 30.0, print), FakeClock(1.2), (Wire(), Wire())
    node = RedisNode(*(0, ADDRESS, PREFIX, guard, []), clock=clock, later=lambda call: call())
    node.opened(wires[0], NodeInfo(run_id="one", uptime=1e6, role="master"), 1.0, 1.0)
    release = next(quorum.release(Claim("r", "mine", 10.0, 1), 1.1, 0.5))
    node.ask(release, encode(release, PREFIX), 1.1)
    wires[0].peer.sendall(b":1\r\n")
    wires[0].peer.close()
    clock.advance(98.8)
    node.receive()
    node.receive()
    assert release.votes == [Vote.YES] and node.connection is None
    node.opened(wires[1], NodeInfo(run_id="two", uptime=uptime, role="master"), 100.0, 100.0)
    for wire in wires:
        wire.disconnect()
    return node._trust


@pytest.mark.parametrize("at", ["_put", "flush"])
def test_request_interrupted_before_it_is_written_drops_its_connection(
    node: RedisNode, wire: Wire, monkeypatch: Patch, at: str
) -> None:
    """The next answer would be taken for the one to the request that was never sent."""

    def struck(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RedisNode, at, struck)
        asked = next(quorum.extend([Claim("r", "mine", 10.0, 1)], 1.0, 0.5))
        with pytest.raises(KeyboardInterrupt):
            node.ask(asked, encode(asked, PREFIX), 1.0)
    assert wire.closed and node.connection is None
    assert not node.channel.up and not node.channel.unanswered and not node.unsent


# -- The bytes that it is sent


@pytest.mark.parametrize("name", ["k", "größe", "k" * 300])
def test_acquire_and_release_from_templates_equal_the_general_encoding(name: str) -> None:
    claim, key = Claim(name, "token", 1.5, 1), f"p:{name}".encode()
    acquired, released = (
        encode(Round(verb, [claim], 0.0, 1.0), "p:") for verb in (Verb.ACQUIRE, Verb.RELEASE)
    )
    assert acquired == request(b"SET", key, b"token", b"NX", b"GET", b"PX", b"1500")
    assert released == request(b"EVALSHA", RELEASE_DIGEST, b"1", key, b"token")


@pytest.mark.parametrize("verb", [Verb.ACQUIRE, Verb.RELEASE])
def test_request_contains_the_key_and_not_the_displayed_resource(verb: Verb) -> None:
    claim = Claim("k#slot2", "token", 1.0, 1)
    claim.resource = "k"  # as of a slot of a limit
    assert b"\r\np:k#slot2\r\n" in encode(Round(verb, [claim], 0.0, 1.0), "p:")
