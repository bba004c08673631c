"""Nodes in memory, for a project's own tests: the real lock over them, without server or socket.

What is replaced is what touches a socket: the driver and the ears that hear releases. The rounds,
the queue of each node (`pipeline.py`), claims, watchdog, tasks and workers are production's. So a
node that is cut off owes and is owed as a real one does, and what was released meanwhile is freed
when it is back.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from ..locking.pubsub import ReleaseSubscriber
from ..protocol.errors import RedlockError
from ..protocol.pipeline import Pipeline
from ..protocol.round import Round, Steps
from ..runtime.clock import monotonic
from ..stores.driver import Driver
from ..stores.redis.address import Address
from .fakes import FakeNode

T = TypeVar("T")

CUT = "cut off by the test"


class ShiftedTime:
    """The module `time`, as the clock of leases reads it: `shift` seconds ahead of the real one."""

    def __init__(self) -> None:
        self.shift = 0.0

    def clock_gettime(self, clock: int) -> float:
        """Return the seconds on `clock`, and the shift."""
        return time.clock_gettime(clock) + self.shift


class Store(FakeNode):
    """What one node keeps under one prefix, and whom it tells of releases."""

    def __init__(self, node: MemoryNode) -> None:
        super().__init__()
        self._node = node

    def _hears(self, process: str, waiter: str) -> bool:
        ears = self._ears(process)
        for ear in ears:
            ear.hear(waiter.encode())
        return bool(ears)

    def _listens(self, member: str) -> bool:
        return bool(self._ears(member.rpartition(":")[0]))

    def _ears(self, process: str) -> list[Ear]:
        channel = process.encode("utf-8", "surrogatepass")
        return [ear for ear in self._node.ears if ear.channel == channel]


class MemoryNode:
    """One node.

    Attributes:
        name: As errors name it.
        skew: Seconds that its clock is ahead: a step of it lets keys expire early.
        cut: Whether nobody reaches it.
        stores: What it keeps, by prefix.
        ears: The subscriptions to it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.skew = 0.0
        self.cut = False
        self.stores: dict[str, Store] = {}
        self.ears: list[Ear] = []

    def __repr__(self) -> str:
        return f"<{self.name} in memory{', cut off' if self.cut else ''}>"

    def store(self, prefix: str) -> Store:
        """What it keeps for locks with this prefix."""
        return self.stores.setdefault(prefix, Store(self))

    def clock(self) -> float:
        """Its time; seconds."""
        return monotonic() + self.skew

    def forget(self) -> None:
        """Lose all memory."""
        for store in self.stores.values():
            store.forget()


class Memory:
    """The nodes that all locks of this process have, and the time."""

    def __init__(self, count: int) -> None:
        self.nodes = [MemoryNode(f"fake-{number}:6379") for number in range(1, count + 1)]
        self.time = ShiftedTime()
        self.turn = threading.RLock()
        self.drivers: weakref.WeakSet[MemoryDriver] = weakref.WeakSet()
        self.process = os.getpid()

    def cut(self, index: int) -> None:
        """A node cannot be reached from now on."""
        with self.turn:
            self.nodes[index].cut = True
            for driver in self.drivers:
                driver.cut(index)

    def mend(self, index: int) -> None:
        """It can be reached again."""
        with self.turn:
            if self.nodes[index].cut:
                self.nodes[index].cut = False
                for driver in self.drivers:
                    driver.mend(index)


class MemoryDriver:
    """Carries rounds to nodes in memory, at once: what `Driver` is in production."""

    def __init__(
        self, memory: Memory, _addresses: object, prefix: str, *_more: Any, **_options: Any
    ) -> None:
        self.strict = True
        self._memory = memory
        self._prefix = prefix
        self._pipelines = [Pipeline(index) for index in range(len(memory.nodes))]
        self._closed = False
        for pipeline, node in zip(self._pipelines, memory.nodes, strict=True):
            if node.cut:
                pipeline.unreachable(CUT)
            else:
                pipeline.connected(monotonic())
        memory.drivers.add(self)

    extend: Any = Driver.extend

    @property
    def nodes(self) -> list[Any]:
        """What `Redlock.check` looks at: none of them is unsuitable."""
        pairs = zip(self._memory.nodes, self._pipelines, strict=True)
        return [SimpleNamespace(name=node.name, channel=at, misfit="") for node, at in pairs]

    def connect(self, timeout: float = 0.0, rest: float = 0.0) -> None:
        """There is nothing to connect to."""

    def run(
        self, operation: Callable[[float], Steps[T]], ahead: Callable[[float], Round] | None = None
    ) -> T:
        """Run one operation to its end; see `Driver.run`."""
        rounds = [] if ahead is None else [ahead(monotonic())]
        steps = operation(monotonic())
        try:
            rounds.append(next(steps))
            while True:
                self._carry(rounds)
                rounds = [steps.send(monotonic())]
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    def start(self, operation: Callable[[float], Steps[T]], done: Callable[[T], object]) -> None:
        """Run one to its end, and tell of it."""
        done(self.run(operation))

    def read(self, wait: float = 0.0) -> bool:
        """There is nothing that was not read."""
        return True

    def run_all(self, operations: Sequence[Callable[[float], Steps[T]]]) -> list[T]:
        """Run several, one after the other."""
        return [self.run(operation) for operation in operations]

    def close(self, wait: float = 0.0) -> None:
        """No node is reached any more."""
        self._closed = True
        for pipeline in self._pipelines:
            pipeline.dropped()
            pipeline.unreachable("closed")

    def cut(self, index: int) -> None:
        """Note that a node cannot be reached from now on."""
        self._pipelines[index].dropped()
        self._pipelines[index].unreachable(CUT)

    def mend(self, index: int) -> None:
        """Note that it can again; what was owed to it is written first."""
        if not self._closed:
            self._pipelines[index].connected(monotonic())
            self._serve(index)

    def _carry(self, rounds: Sequence[Round]) -> None:
        if os.getpid() != self._memory.process:
            raise RedlockError(
                "fake_redlock keeps its locks in the memory of one process, and this is a child of"
                " it: a prefork worker's, for example. Test with the pool solo or threads, or with"
                " redlock_nodes, which are real servers"
            )
        with self._memory.turn:
            for round_ in rounds:
                round_.begin()
                for index in round_.targets:
                    if self._pipelines[index].ask(round_, monotonic()):
                        self._serve(index)
        for round_ in rounds:
            round_.close("no answer")

    def _serve(self, index: int) -> None:
        """The node does what it was asked, in order; also what an exception has kept it from."""
        node, unanswered = self._memory.nodes[index], self._pipelines[index].unanswered
        while unanswered:
            round_ = unanswered[0]
            reply = node.store(self._prefix).execute(round_.verb, round_.claims, node.clock())
            unanswered.popleft()
            round_.answer(index, reply, monotonic())


class MemoryWakeup(ReleaseSubscriber):
    """Hears whom nodes in memory call."""

    def __init__(self, memory: Memory, addresses: Sequence[Address], prefix: str) -> None:
        super().__init__(addresses, prefix)
        subscriptions: Any = [Ear(self, *node) for node in enumerate(memory.nodes)]
        self._subscriptions = subscriptions

    def ring(self) -> None:
        """Let all who wait look again: time has passed."""
        with self._lock:
            for waiter in list(self._waiters.values()):
                waiter.news.set()


class Ear:
    """Listens to one node in memory: what `NodeSubscription` is in production."""

    def __init__(self, wakeup: MemoryWakeup, index: int, node: MemoryNode) -> None:
        self.node = index
        self.channel = wakeup.channel
        self._wakeup = wakeup
        self._memory_node = node

    def start(self) -> None:
        """Begin to listen for calls to this process."""
        self._memory_node.ears.append(self)
        self._wakeup.subscribed(self.node)

    def hear(self, name: bytes) -> None:
        """The node calls a waiter."""
        self._wakeup.called(self.node, name)

    def close(self) -> None:
        """Listen no more."""
        if self in self._memory_node.ears:
            self._memory_node.ears.remove(self)
