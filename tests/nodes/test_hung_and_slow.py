"""Nodes that hang at the first call, that are late half of the time, that change their TLS keys."""

from __future__ import annotations

import select
import ssl
import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_redlock import QuorumUnavailable, Redlock
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.node_info import NodeInfo
from celery_redlock.protocol.restart_guard import RestartGuard
from celery_redlock.protocol.round import Round, Verb
from celery_redlock.runtime.clock import monotonic
from celery_redlock.server import LocalServer
from celery_redlock.stores import driver
from celery_redlock.stores.redis.address import parse_nodes
from celery_redlock.stores.redis.node import RedisNode
from celery_redlock.stores.redis.requests import encode
from tests.support.machine import brief
from tests.support.nodes import hung


@pytest.mark.parametrize("forked", [False, True], ids=["here", "in a fork's child"])
def test_first_call_with_three_of_five_nodes_hung_takes_one_node_timeout(
    servers: list[LocalServer], lock_over: Callable[..., Redlock], forked: bool
) -> None:
    redlock = lock_over(servers, node_timeout=0.4)
    if forked:
        redlock.client.start_afresh()
    with hung(servers[:3]) as begin:
        with pytest.raises(QuorumUnavailable):
            redlock.acquire("r")
        took = time.monotonic() - begin
    assert took > 0.3
    brief(took, 0.8, "to be refused, where a connection attempt takes 1.0 s,", since=begin)
    assert redlock.release(redlock.acquire("r", wait=10.0))


def test_first_call_with_two_of_five_nodes_hung_waits_for_none_of_them(
    servers: list[LocalServer], lock_over: Callable[..., Redlock]
) -> None:
    redlock = lock_over(servers, node_timeout=1.0)
    with hung(servers[:2]) as begin:
        assert redlock.release(redlock.acquire("r"))
        assert time.monotonic() - begin < 0.9


class Wants:
    """A TLS connection whose keys are just changed: it must read before it can write."""

    def __init__(self) -> None:
        self._sock = self
        self.sent = b""
        self.raises: list[type[OSError]] = []

    def send(self, data: bytes) -> int:
        if self.raises:
            raise self.raises.pop()
        self.sent += data
        return len(data)

    recv: Any = send

    def disconnect(self) -> None: ...


@pytest.mark.parametrize("wants", [ssl.SSLWantReadError, ssl.SSLWantWriteError])
def test_connection_that_renegotiates_its_tls_keys_is_not_dropped(wants: type[OSError]) -> None:
    node = RedisNode(
        *(0, parse_nodes(["redis://127.0.0.1:1"])[0], "p:", RestartGuard(False, 1.0, print), []),
        clock=time.monotonic,
        later=lambda call: call(),
    )
    wire = Wants()
    node.opened(wire, NodeInfo(), 1.0, 1.0)
    asked = Round(Verb.PEEK, [Claim("r", "token", 10.0, 1)], 1.0, 1.0)
    payload = encode(asked, "p:")
    wire.raises = [wants]
    node.ask(asked, payload, 1.0)
    assert node.connection is wire and node.unsent == payload
    wire.raises = [wants]
    node.receive()
    node.flush()
    assert wire.sent == payload and node.unsent == b""
    assert list(node.channel.unanswered) == [asked]


def test_answer_that_has_arrived_is_read_however_late(
    servers: list[LocalServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was stopped right after its request: the node was not silent."""
    redlock = Redlock([servers[0].url], ttl=60.0, node_timeout=0.25)
    redlock.connect(5.0)
    (node,) = redlock.client.driver.nodes
    ask, stopped_for = node.ask, 0.0

    def stopped(*request: Any) -> None:
        nonlocal stopped_for
        ask(*request)
        assert select.select([node.connection._sock], [], [], 5.0)[0]
        stopped_for += 1.0

    monkeypatch.setattr(node, "ask", stopped)
    monkeypatch.setattr(driver, "monotonic", lambda: monotonic() + stopped_for)
    assert redlock.release(redlock.acquire("late"))
    assert stopped_for == 2.0
    redlock.close()
