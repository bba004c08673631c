"""The nodes of the world, and the connections to them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from celery_redlock.protocol.node_info import NodeInfo
from celery_redlock.protocol.pipeline import Pipeline
from celery_redlock.protocol.restart_guard import Trust
from celery_redlock.protocol.round import Round
from celery_redlock.testing.fakes import FakeNode

if TYPE_CHECKING:
    from tests.protocol.sim.world.process import Process


class Server:
    """A node of the world: a fake node with a clock of its own, that can be down or frozen.

    It can be another server than before, under the same address; and a replica for a while.
    """

    def __init__(self, index: int, rate: float, offset: float) -> None:
        self.index = index
        self.rate = rate
        self.offset = offset
        self.node = FakeNode()
        self.up = True
        self.frozen_until = 0.0
        self.refuses_until = self.full_until = 0.0
        self.runs = 0
        self.started: float | None = None  # by its own clock; None: long ago
        self.replica_until = 0.0
        self.promotions = 0
        self._swapped: list[tuple[Any, ...]] = []
        self._others = 0
        self._name = str(index)

    def clock(self, now: float) -> float:
        """This node's time at the true time `now`."""
        return self.rate * now + self.offset

    def facts(self, now: float) -> NodeInfo:
        """Return the node's account of itself at the true time `now`."""
        run = f"{self._name}.{self.runs}"
        return NodeInfo(
            run_id=run,
            uptime=1e6 if self.started is None else float(int(self.clock(now) - self.started)),
            role="slave" if self.replica_until > now else "master",
            history=f"{run} {self.promotions - 1}" if self.promotions else "",
            replication=f"{run} {self.promotions}",
        )

    def swap(self, now: float, up: float) -> None:
        """Put another server in its place: empty, and up for so many seconds."""
        node = self.node
        self._swapped.append((*self._kept(), self.runs, self.started, self._name))
        self._others += 1
        node.held, node.readers, node.lines, node.fences = {}, {}, {}, {}
        self.runs, self.started = 0, self.clock(now) - up
        self._name = f"{self.index}+{self._others}"

    def _kept(self) -> tuple[Any, ...]:
        return self.node.held, self.node.readers, self.node.lines, self.node.fences

    def swap_back(self) -> None:
        """The server that was there before is there again, with all that it knew."""
        node = self.node
        *kept, self.runs, self.started, self._name = self._swapped.pop()
        node.held, node.readers, node.lines, node.fences = kept

    def demote(self, until: float) -> None:
        """Make it the replica of an empty server until it is promoted."""
        self.node.forget()
        self.replica_until = until
        self.promotions += 1


class Connection:
    """Two queues. Each has one event under way at most, for its head: order cannot break."""

    __slots__ = ("alive", "key", "link", "opened", "proven", "replies", "requests", "sent")

    def __init__(self, link: Link, key: int, now: float) -> None:
        self.link = link
        self.key = key
        self.opened = now
        self.proven = False
        self.alive = True
        self.sent = 0
        self.requests: deque[tuple[float, int, Round]] = deque()
        self.replies: deque[tuple[float, Round, Any]] = deque()


class Link:
    """A process's connection to a node: what `node.Node` is in production.

    Attributes:
        breaks: How often a fault broke its connection.
    """

    def __init__(self, process: Process, index: int, server: Server) -> None:
        self.process = process
        self.index = index
        self.server = server
        self.channel = Pipeline(index)
        self.connection: Connection | None = None
        self.connecting = False
        self.failures = 0
        self.connections = 0
        self.breaks = 0
        self.trust = Trust(process.guard, index)
        self.requests_cut = self.replies_cut = 0.0
