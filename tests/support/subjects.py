"""One contract for nodes: the fake, Valkey, Redis, PostgreSQL, etcd, and another's store."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.replies import FOREIGN
from celery_redlock.protocol.restart_guard import RestartGuard
from celery_redlock.protocol.round import Round, Verb
from celery_redlock.runtime.clock import monotonic
from celery_redlock.server import LocalServer
from celery_redlock.stores.contract import Wanted
from celery_redlock.stores.etcd.wire import Keys, text
from celery_redlock.stores.kinds import make_node, parse_nodes, subscribe
from celery_redlock.stores.node import Node
from celery_redlock.stores.postgresql.statements import to_text
from celery_redlock.testing import fakes
from celery_redlock.testing.etcd import LocalEtcd
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import etcd, postgres
from tests.support.calls import calls as names_of_calls
from tests.support.clock import FakeClock
from tests.support.sqlite_store import SqliteStore
from tests.support.wait import wait_until

PREFIX = "redlock:"


LONG = 60.0


OFF = RestartGuard(False, LONG, print)


class Heard(Round):
    """A round of one node that remembers the reply."""

    __slots__ = ("reply",)

    def answer(self, node: int, reply: Any, now: float, doubt: str = "") -> None:
        self.reply = reply
        super().answer(node, reply, now, doubt)


class Contract:
    """Promises in which kinds of nodes differ."""

    sets_again = True  # what an extension finds missing


class Fake(Contract):
    """The fake node, under test."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.node = fakes.FakeNode()

    def ask(self, verb: Verb, *claims: Claim) -> Any:
        return self.node.execute(verb, claims, self.clock())

    def occupy(self, resource: str) -> None:
        self.node.occupy(resource)

    def fill(self, *, full: bool = True) -> None:
        self.node.full = full

    def drop(self, resource: str) -> None:
        self.node.held.pop(resource, None)

    def fence(self, resource: str) -> int | None:
        return self.node.fences.get(resource)

    def flush(self) -> None:
        self.node.forget()

    def listen(self, process: str) -> None:
        self.node.listening.add(PREFIX + process)

    def calls(self, count: int) -> list[str]:
        called = [member.removeprefix(PREFIX) for member in self.node.notified]
        self.node.notified.clear()
        assert len(called) == count
        return called

    def wait_for_expiry(self, resource: str, ttl: float) -> None:
        self.clock.advance(ttl)


def a_node(url: str) -> Node:
    return make_node(
        *(0, parse_nodes([url])[0], PREFIX, OFF, [f"{PREFIX}nonce"]),
        clock=monotonic,
        later=lambda call: call(),
    )


class Server(Contract):
    """A real server under test: the part that all kinds share."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.node = a_node(url)
        self.node.opened(*self.node.connect(), monotonic(), monotonic())

    def ask(self, verb: Verb, *claims: Claim) -> Any:
        round_ = Heard(verb, list(claims), monotonic(), 5.0)
        self.node.ask(round_, self.node.encode(round_), monotonic())
        while round_.votes[0] is None:
            assert self.node.connection is not None, round_.details
            ready, _, _ = select.select([self.node.fileno()], [], [], 5.0)
            assert ready, "no answer"
            self.node.receive()
        return round_.reply if hasattr(round_, "reply") else f"silent: {round_.details[0]}"


class Real(Server):
    """A Redis, or a server with its protocol."""

    def __init__(self, server: LocalServer) -> None:
        super().__init__(server.url)
        self.admin = redis.Redis.from_url(server.url)
        self.pubsub = self.admin.pubsub()

    def key(self, resource: str) -> bytes:
        return (PREFIX + resource).encode("utf-8", "surrogatepass")

    def occupy(self, resource: str) -> None:
        self.admin.delete(self.key(resource))
        self.admin.rpush(self.key(resource), "a job")

    def fill(self, *, full: bool = True) -> None:
        """Have no memory for another key."""
        self.admin.config_set("maxmemory", 1 if full else 0)

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


class Subscribed(Server):
    """A server whose notifications are received by subscriptions as those of clients."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.heard: dict[str, Any] = {}

    def listen(self, process: str) -> None:
        subscription = subscribe(parse_nodes([self.url])[0], (PREFIX + process).encode())
        subscription.connect()
        self.heard[process] = subscription, names_of_calls(subscription)

    def calls(self, count: int) -> list[str]:
        called = []
        for process, (subscription, calls) in self.heard.items():
            self.end(process, subscription)
            while (news := next(calls)) != b"end":
                called.append(f"{process}:{news.decode()}")
        assert len(called) == count
        return called

    def end(self, process: str, subscription: Any) -> None:
        """Call it by the word `end`."""
        raise NotImplementedError

    def _close_subscriptions(self) -> None:
        for subscription, calls in self.heard.values():
            with contextlib.suppress(Exception):
                calls.close()
            subscription.close()
        self.heard.clear()

    def close(self) -> None:
        self._close_subscriptions()
        self.node.close()


class Postgres(Subscribed):
    """A PostgreSQL database, under test."""

    def __init__(self, server: LocalPostgres) -> None:
        super().__init__(server.url)
        self.server = server
        self.admin = postgres.admin(server)

    def key(self, resource: str) -> str:
        return to_text(PREFIX + resource).decode()

    def occupy(self, resource: str) -> None:
        self.admin.execute(
            "INSERT INTO redlock_lease VALUES (%s, %s, 0, now() + interval '1 day', now())"
            " ON CONFLICT (resource) DO UPDATE SET token = excluded.token, until = excluded.until",
            [self.key(resource), FOREIGN],
        )

    def drop(self, resource: str) -> None:
        self.admin.execute("DELETE FROM redlock_lease WHERE resource = %s", [self.key(resource)])

    def fence(self, resource: str) -> int | None:
        query = "SELECT nullif(fence, 0) FROM redlock_lease WHERE resource = %s"
        row = self.admin.execute(query, [self.key(resource)]).fetchone()
        return row and row[0]

    def flush(self) -> None:
        self.admin.execute(postgres.EMPTY)
        self._close_subscriptions()

    def end(self, process: str, subscription: Any) -> None:
        self.admin.execute("SELECT pg_notify(%s, 'end')", [subscription._channel])

    def wait_for_expiry(self, resource: str, ttl: float) -> None:
        query = "SELECT FROM redlock_lease WHERE resource = %s AND until > clock_timestamp()"
        where = [self.key(resource)]
        wait_until(
            lambda: not self.admin.execute(query, where).fetchall(), ttl + 5.0, "it has expired"
        )

    def close(self) -> None:
        super().close()
        self.admin.close()


class Etcd(Subscribed):
    """An etcd cluster, under test."""

    sets_again = False

    def __init__(self, server: LocalEtcd) -> None:
        super().__init__(server.url)
        self.server = server
        self.keys = Keys(PREFIX)

    def get(self, resource: str) -> Any:
        kvs = etcd.ask(self.server, "kv/range", key=self.keys.lock(resource)).get("kvs", [])
        return kvs[0] if kvs else None

    def occupy(self, resource: str) -> None:
        value = text(FOREIGN.encode())
        etcd.ask(self.server, "kv/put", key=self.keys.lock(resource), value=value)

    def drop(self, resource: str) -> None:
        etcd.ask(self.server, "kv/deleterange", key=self.keys.lock(resource))

    def fence(self, resource: str) -> int | None:
        there = self.get(resource)
        return there and int(there["create_revision"])

    def flush(self) -> None:
        etcd.as_new(self.server)
        self._close_subscriptions()

    def end(self, process: str, subscription: Any) -> None:
        end = {"value": text(b"end"), "ignore_lease": True}
        etcd.ask(self.server, "kv/put", key=text((PREFIX + process).encode()), **end)

    def wait_for_expiry(self, resource: str, ttl: float) -> None:
        wait_until(lambda: self.get(resource) is None, ttl + 10.0, "it has expired")


class Plain(Server):
    """A store that another package might publish, under test. It keeps no wait queues."""

    sets_again = False

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.admin = SqliteStore(parse_nodes([url])[0])
        self.admin.connect()

    def occupy(self, resource: str) -> None:
        self.drop(resource)
        self.admin.acquire(Wanted((PREFIX + resource,), FOREIGN, 86_400.0))

    def drop(self, resource: str) -> None:
        for held in self.admin.peek([PREFIX + resource]):
            self.admin.release(Wanted((PREFIX + resource,), held[0] if held else "", 0.0))

    def flush(self) -> None:
        for name in list(self.admin.scan("")):
            self.drop(name.removeprefix(PREFIX))

    def listen(self, process: str) -> None:
        pytest.skip("this store keeps no wait queues")

    def wait_for_expiry(self, resource: str, ttl: float) -> None:
        wait_until(lambda: self.admin.peek([PREFIX + resource]) == [None], ttl + 5.0, "expired")

    def close(self) -> None:
        self.node.close()
        self.admin.close()


Subject = Fake | Real | Postgres | Etcd | Plain


def _real(binary: str | None) -> Iterator[Real]:
    with LocalServer(binary=binary) as server:
        real = Real(server)
        yield real
        real.close()


def _postgres() -> Iterator[Postgres]:
    with postgres.start_postgres() as server:
        subject = Postgres(server)
        yield subject
        subject.close()


def _etcd() -> Iterator[Etcd]:
    with etcd.start_etcd() as server:
        subject = Etcd(server)
        yield subject
        subject.close()


Resource = str | tuple[str, ...]


def _plain(directory: Path) -> Iterator[Plain]:
    subject = Plain(f"sqlite://{directory}/locks.db")
    yield subject
    subject.close()


def claim(token: str = "mine", resource: Resource = "r", ttl: float = LONG) -> Claim:
    return Claim(resource, token, ttl, 1)
