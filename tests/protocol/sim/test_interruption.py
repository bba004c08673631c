"""A process that is stopped between two lines: no answer counts that was read too late."""

from __future__ import annotations

from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.node_info import NodeInfo
from celery_redlock.protocol.restart_guard import RestartGuard
from celery_redlock.protocol.round import Round, Verb
from celery_redlock.runtime.polling import WAITS
from celery_redlock.stores.redis.address import parse_nodes
from celery_redlock.stores.redis.node import RedisNode
from celery_redlock.stores.redis.requests import encode
from celery_redlock.stores.redis.resp import SIZE
from tests.protocol.sim.interruption import at_each_line

TTL = 10.0


class Line:
    """A node's connection: answers at once, and notes when it was read."""

    def __init__(self, world: World) -> None:
        self.world, self.answers = world, b""
        self._sock = self

    def send(self, data: bytes) -> int:
        self.answers += b"$1\r\n1\r\n"  # it is extended
        return len(data)

    def recv(self, size: int) -> bytes:
        data, self.answers = self.answers, b""
        if not data:
            raise BlockingIOError
        self.world.read_at = self.world.now
        return data

    def disconnect(self) -> None: ...


class World:
    """One node, one claim that it has granted, and a clock."""

    def __init__(self, kind: type[RedisNode]) -> None:
        self.now, self.read_at = 100.0, 0.0
        self.claim = Claim("r", "token", TTL, 1)
        self.node = kind(
            *(
                0,
                parse_nodes(["redis://127.0.0.1:1"])[0],
                "p:",
                RestartGuard(False, TTL, print),
                [],
            ),
            clock=lambda: self.now,
            later=lambda _call: None,
        )
        self.node.opened(Line(self), NodeInfo(), self.now, self.now)
        self.claim.acknowledged(0, self.now, self.now)
        assert self.claim.grant(self.now)
        self.deadline = self.claim.deadline
        self.now += TTL / 2

    def extend(self) -> None:
        round_ = Round(Verb.EXTEND, [self.claim], self.now, 1.0)
        round_.begin()
        self.node.ask(round_, encode(round_, "p:"), self.now)
        self.node.receive()


def revived(kind: type[RedisNode]) -> list[int]:
    """Stop at each line, for longer than the lease lasts: at which it was revived."""
    wrong: list[int] = []
    seen: list[World] = []

    def work() -> None:
        world = seen[-1]
        world.extend()
        in_time = world.read_at < world.deadline
        if world.claim.deadline > world.deadline and not in_time:
            wrong.append(len(seen))
        if world.now < world.deadline:
            assert world.claim.deadline > world.deadline, "an extension in time does not count"

    def stopped() -> None:
        seen[-1].now += 2 * TTL

    assert at_each_line(work, stopped, before=lambda: seen.append(World(kind))) > 40
    return wrong


def test_answer_read_behind_the_deadline_revives_nothing() -> None:
    assert revived(RedisNode) == []


def test_planted_clock_read_before_the_answer_is_found() -> None:
    """Once the time was taken before the answer was read."""

    class ClockFirst(RedisNode):
        def receive(self) -> None:  # in this file: its lines are not ours; stopped between the two
            now = self._clock()
            world = self.connection.world
            world.now += 2 * TTL if not world.read_at else 0.0
            try:
                data = self.connection._sock.recv(SIZE)
            except WAITS:
                return
            self._take(data, now)

    assert revived(ClockFirst)
