"""One contract for nodes: the shipped fake, Valkey and Redis."""

from __future__ import annotations

import select
from collections.abc import Iterator
from typing import Any

import redis

from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.restart_guard import RestartGuard
from celery_redlock.protocol.round import Round, Verb
from celery_redlock.runtime.clock import monotonic
from celery_redlock.server import LocalServer
from celery_redlock.stores.redis.address import parse_nodes
from celery_redlock.stores.redis.node import RedisNode
from celery_redlock.stores.redis.requests import encode
from celery_redlock.testing import fakes
from tests.support.clock import FakeClock
from tests.support.wait import wait_until

PREFIX = "redlock:"


LONG = 60.0


OFF = RestartGuard(False, LONG, print)


class Heard(Round):
    """A round of one node that remembers what it was told."""

    __slots__ = ("reply",)

    def answer(self, node: int, reply: Any, now: float, doubt: str = "") -> None:
        self.reply = reply
        super().answer(node, reply, now, doubt)


class Fake:
    """The fake node, under test."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.node = fakes.FakeNode()

    def ask(self, verb: Verb, *claims: Claim) -> Any:
        return self.node.execute(verb, claims, self.clock())

    def occupy(self, resource: str) -> None:
        self.node.occupy(resource)

    def drop(self, resource: str) -> None:
        self.node.held.pop(resource, None)

    def fence(self, resource: str) -> int | None:
        return self.node.fences.get(resource)

    def flush(self) -> None:
        self.node.forget()

    def listen(self, process: str) -> None:
        self.node.listening.add(PREFIX + process)

    def calls(self, count: int) -> list[str]:
        called = [member.removeprefix(PREFIX) for member in self.node.called]
        self.node.called.clear()
        assert len(called) == count
        return called

    def wait_for_expiry(self, resource: str, ttl: float) -> None:
        self.clock.advance(ttl)


def a_node(url: str) -> RedisNode:
    return RedisNode(
        *(0, parse_nodes([url])[0], PREFIX, OFF, [f"{PREFIX}nonce"]),
        clock=monotonic,
        later=lambda call: call(),
    )


class Real:
    """A real server, under test."""

    def __init__(self, server: LocalServer) -> None:
        self.admin = redis.Redis.from_url(server.url)
        self.pubsub = self.admin.pubsub()
        self.node = a_node(server.url)
        self.node.opened(*self.node.connect(), monotonic(), monotonic())

    def ask(self, verb: Verb, *claims: Claim) -> Any:
        round_ = Heard(verb, list(claims), monotonic(), 5.0)
        self.node.ask(round_, encode(round_, PREFIX), monotonic())
        while round_.votes[0] is None:
            assert self.node.connection is not None, round_.details
            ready, _, _ = select.select([self.node.connection._sock], [], [], 5.0)
            assert ready, "no answer"
            self.node.receive()
        return round_.reply if hasattr(round_, "reply") else f"silent: {round_.details[0]}"

    def key(self, resource: str) -> bytes:
        return (PREFIX + resource).encode("utf-8", "surrogatepass")

    def occupy(self, resource: str) -> None:
        self.admin.delete(self.key(resource))
        self.admin.rpush(self.key(resource), "a job")

    def drop(self, resource: str) -> None:
        self.admin.delete(self.key(resource))

    def fence(self, resource: str) -> int | None:
        value = self.admin.get(self.key(resource) + b"#fence")
        return None if value is None else int(value)

    def flush(self) -> None:
        self.admin.flushall()
        self.pubsub.reset()

    def listen(self, process: str) -> None:
        self.pubsub.subscribe(PREFIX + process)
        assert self.pubsub.get_message(timeout=5.0)["type"] == "subscribe"

    def calls(self, count: int) -> list[str]:
        self.admin.publish(PREFIX + "p1", "end")
        called = []
        while (news := self.pubsub.get_message(timeout=5.0))["data"] != b"end":
            called.append(f"{news['channel'].decode()}:{news['data'].decode()}")
        assert len(called) == count
        return [one.removeprefix(PREFIX) for one in called]

    def wait_for_expiry(self, resource: str, ttl: float) -> None:
        key = self.key(resource)
        wait_until(lambda: not self.admin.exists(key), ttl + 5.0, "the key has expired")

    def close(self) -> None:
        self.node.close()
        self.pubsub.close()
        self.admin.close()


Subject = Fake | Real


def _real(binary: str | None) -> Iterator[Real]:
    with LocalServer(binary=binary) as server:
        real = Real(server)
        yield real
        real.close()


Resource = str | tuple[str, ...]


def claim(token: str = "mine", resource: Resource = "r", ttl: float = LONG) -> Claim:
    return Claim(resource, token, ttl, 1)
