"""Drivers over scripted peers, and what their tests ask."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from celery_redlock.protocol import quorum
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.round import Round
from celery_redlock.protocol.values import Vote
from celery_redlock.runtime.loop_polling import LoopPoll
from celery_redlock.stores.driver import Driver
from celery_redlock.stores.kinds import parse_nodes
from tests.support.etcd_peer import EtcdPeer
from tests.support.peer import DEADLINE, Line, RedisPeer, bulk, verb_of

PREFIX = "redlock:"
SHORT = 0.05
"""Seconds of patience where a test waits until they are over."""
OPTIONS = {"node_timeout": DEADLINE}


class PeerWorld:
    """Peers, and drivers over them; closed in the end."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._drivers: list[Driver] = []
        self.peers: list[RedisPeer | EtcdPeer] = []

    def peer(self, script: Callable[[Line], object] | None = None, **options: Any) -> RedisPeer:
        peer: RedisPeer = self._stack.enter_context(RedisPeer(script, **options))
        self.peers.append(peer)
        return peer

    def etcd_peer(self, script: Callable[[Line], object] | None = None, **options: Any) -> EtcdPeer:
        peer: EtcdPeer = self._stack.enter_context(EtcdPeer(script, **options))
        self.peers.append(peer)
        return peer

    def driver(self, *urls: str, up: bool = True, **options: Any) -> Driver:
        """Return a driver over all peers, or over some URLs; `up`: connected to all of them."""
        addresses = parse_nodes(urls or [peer.url for peer in self.peers])
        driver = Driver(addresses, PREFIX, None, **{**OPTIONS, **options})
        self._drivers.append(driver)
        if up:
            driver.connect(DEADLINE, DEADLINE)
        return driver

    def loop_driver(self, loop: Any, *urls: str, **options: Any) -> Driver:
        """Return a driver of an event loop over all peers, or some URLs; it is not connected."""
        return self.driver(*urls, up=False, poll=partial(LoopPoll, loop), **options)

    def close(self) -> None:
        for driver in self._drivers:
            driver.close()
        self._stack.close()
        for driver in self._drivers:
            driver.close(DEADLINE)  # no thread is in a handshake any more


@pytest.fixture
def world() -> Iterator[PeerWorld]:
    """Peers of this test's own, and drivers over them."""
    world = PeerWorld()
    yield world
    world.close()


def a_claim(name: str, nodes: int = 1, ttl: float = 60.0, token: str = "") -> Claim:
    return Claim(name, token or f"token of {name}", ttl, nodes)


def acquire(driver: Driver, name: str, patience: float = DEADLINE, token: str = "") -> Round:
    claim = a_claim(name, len(driver.nodes), token=token)
    return driver.run(lambda now: quorum.acquire(claim, now, patience))


def release(driver: Driver, claim: Claim, patience: float = DEADLINE) -> Any:
    return driver.run(lambda now: quorum.release(claim, now, patience))


def votes(round_: Round) -> list[str]:
    return ["" if vote is None else vote.value for vote in round_.votes]


def echo(asked: list[bytes]) -> bytes:
    """Return the answer that somebody holds the key: a holder by the name of the key."""
    return bulk(b"holder of " + verb_of(asked)[1][0].removeprefix(PREFIX.encode()))


def echoing(line: Line) -> None:
    """Answer each attempt with a holder by the name of the requested resource."""
    while (asked := line.request()) is not None:
        line.send(echo(asked) if verb_of(asked)[0] == "acquire" else b":0\r\n")


def own(round_: Round) -> bool:
    """Return True if all answers of a round are to its own question, from an echoing peer."""
    name = round_.claims[0].resource
    given = [d for v, d in zip(round_.votes, round_.details, strict=True) if v is Vote.NO]
    return bool(given) and all(detail == f"holder of {name}" for detail in given)


def mute(line: Line) -> None:
    """Read everything, and answer nothing."""
    while line.request() is not None:
        pass
