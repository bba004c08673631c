"""Answers of etcd with something odd in any of their fields: silence, and never another error."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest

from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.node_info import NodeInfo
from celery_redlock.protocol.restart_guard import RestartGuard
from celery_redlock.protocol.round import Round, Verb
from celery_redlock.protocol.values import QueueEntry
from celery_redlock.stores.etcd.questions import lease_id
from celery_redlock.stores.kinds import make_node, parse_nodes
from tests.support.clock import FakeClock
from tests.support.etcd_peer import MemoryEtcd, http
from tests.support.odd_json import ODD, bent, paths

MOST = 20
"""Answers to one question at most; a question without end gets no more."""
EACH = 8
"""Odd values that are tried in each field."""


def held(etcd: MemoryEtcd, name: str, token: str = "other") -> None:
    lease = str(lease_id(60.0, len(etcd.leases)))
    etcd.leases[lease] = 60
    etcd.put(f"redlock:lock/{name}".encode(), token.encode(), lease)


def waits(etcd: MemoryEtcd, name: str, waiter: str) -> None:
    etcd.put(f"redlock:line/{name}".encode() + b"\xff" + waiter.encode(), b"%020d" % len(waiter))


def a_world() -> MemoryEtcd:
    """Return a cluster where some names are held, and somebody waits for them."""
    etcd = MemoryEtcd()
    held(etcd, "held")
    held(etcd, "mine", "mine")
    held(etcd, "ours", "mine")
    for name in ("mine", "ours", "free"):
        waits(etcd, name, "redlock:gone:1")
        waits(etcd, name, "redlock:there:2222")
    etcd.put(b"redlock:there", b"")
    return etcd


def claim(*names: str, fenced: bool = False) -> Claim:
    new = Claim(names if len(names) > 1 else names[0], "mine", 60.0, 1)
    new.proposal, new.mark = (0 if fenced else None), ("done", 60.0)
    return new


def entry(*names: str) -> Any:
    return QueueEntry(names, 1, "redlock:gone:1", 5)


ASKED: dict[str, Callable[[], tuple[Verb, list[Any]]]] = {
    "a free one": lambda: (Verb.ACQUIRE, [claim("free")]),
    "a fenced one": lambda: (Verb.ACQUIRE, [claim("free", fenced=True)]),
    "one of another's": lambda: (Verb.ACQUIRE, [claim("held")]),
    "two, one of another's": lambda: (Verb.ACQUIRE, [claim("free", "held")]),
    "its own again": lambda: (Verb.ACQUIRE, [claim("mine", "ours")]),
    "to extend": lambda: (Verb.EXTEND, [claim("mine"), claim("held")]),
    "to renew": lambda: (Verb.RENEW, [claim("mine", "ours"), claim("free")]),
    "to release": lambda: (Verb.RELEASE, [claim("mine", "ours")]),
    "to undo": lambda: (Verb.UNDO, [claim("mine")]),
    "to look": lambda: (Verb.PEEK, [claim("mine", "ours"), claim("free"), claim("held")]),
    "to wait": lambda: (Verb.ENQUEUE, [entry("held", "mine")]),
    "to wait no more": lambda: (Verb.DEQUEUE, [entry("mine", "free")]),
    "to pass it on": lambda: (Verb.HAND_ON, [entry("mine", "free")]),
}
"""Questions of each kind, and of each way to answer them."""


class InMemory:
    """A connection to a member that is played by the test."""

    head = b""
    at = 0

    def __init__(self) -> None:
        self._sock = self
        self.asked, self.closed = b"", False
        self.answers: list[bytes] = []

    def send(self, data: bytes) -> int:
        self.asked += data
        return len(data)

    def recv(self, _size: int) -> bytes:
        if not self.answers:
            raise BlockingIOError
        return self.answers.pop(0)

    def disconnect(self) -> None:
        self.closed = True


def play(name: str, place: int = -1, odd: Callable[[Any], Any] = lambda said: said) -> list[Any]:
    """Ask one question; of all answers make the one at `place` odd. Return the true ones."""
    clock, wire, etcd, true = FakeClock(), InMemory(), a_world(), []
    (address,) = parse_nodes(["etcd://127.0.0.1:1,127.0.0.1:2"])
    guard = RestartGuard(False, 60.0, print)
    node = make_node(0, address, "redlock:", guard, [], clock=clock, later=lambda call: call())
    node.opened(wire, NodeInfo(), clock(), clock())
    verb, claims = ASKED[name]()
    round_ = Round(verb, claims, clock(), 60.0)
    node.ask(round_, None, clock())
    while wire.asked and not wire.closed and len(true) < MOST:
        head, _, rest = wire.asked.partition(b"\r\n\r\n")
        size = int(head.rpartition(b": ")[2])
        true.append(etcd.ask(head.split()[1].decode()[4:], json.loads(rest[:size])))
        wire.asked = rest[size:]
        wire.answers.append(http(odd(true[-1]) if len(true) == place + 1 else true[-1]))
        node.receive()
    round_.close()
    assert round_.votes != [None]
    return true


@pytest.mark.parametrize("name", ASKED)
def test_odd_field_in_an_answer_of_etcd_is_an_answer_or_silence_and_no_error(name: str) -> None:
    true = play(name)
    assert 0 < len(true) < MOST
    for place, said in enumerate(true):
        for path in paths(said):
            for odd in Random(f"{place} {path}").sample(ODD, EACH):
                play(name, place, partial(bent, path=path, odd=odd))
