"""The nodes of the world, and the connections to them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from ..channel import Channel
from ..guard import ALWAYS, Facts
from ..quorum import Round
from .fakes import FakeNode

if TYPE_CHECKING:
    from .process import Process


class Server:
    """A node of the world: a fake node with a clock of its own, that can be down or frozen."""

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

    def clock(self, now: float) -> float:
        """This node's time at the true time `now`."""
        return self.rate * now + self.offset

    def facts(self, now: float) -> Facts:
        """What it says of itself at the true time `now`; one with a memory is durable."""
        if self.started is None:
            return Facts(run_id=f"{self.index}.0", uptime=1e6)
        uptime = float(int(self.clock(now) - self.started))
        return Facts(run_id=f"{self.index}.{self.runs}", uptime=uptime)


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
    """One process's way to one node: what `node.Node` is in production.

    Attributes:
        breaks: How often a fault broke its connection.
    """

    def __init__(self, process: Process, index: int, server: Server) -> None:
        self.process = process
        self.index = index
        self.server = server
        self.channel = Channel(index)
        self.connection: Connection | None = None
        self.connecting = False
        self.failures = 0
        self.connections = 0
        self.breaks = 0
        self.facts: Facts | None = None
        self.opened = self.began = ALWAYS
        self.requests_cut = self.replies_cut = 0.0
