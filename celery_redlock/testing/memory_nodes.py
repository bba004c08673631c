"""Nodes in memory, for a project's own tests: the real lock over them, without server or socket.

Only the classes that touch a socket are replaced: the driver, and the subscriptions to releases.
The rounds, the queue of each node (`pipeline.py`), claims, watchdog, tasks and workers are those of
production. So a node that is cut off keeps unanswered requests as a real one does, and releases
made meanwhile reach it when it is back.
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
from .fakes import FakeNode

T = TypeVar("T")

CUT = "cut off by the test"


class ShiftedTime:
    """Stand-in for the module `time`, for the clock of leases: `shift` seconds ahead of it."""

    def __init__(self) -> None:
        self.shift = 0.0

    def clock_gettime(self, clock: int) -> float:
        """Return the seconds on `clock`, plus the shift."""
        return time.clock_gettime(clock) + self.shift


class Store(FakeNode):
    """The keys of one node under one prefix, with the subscriptions to their releases."""

    def __init__(self, node: MemoryNode) -> None:
        super().__init__()
        self._node = node

    def _notifies(self, process: str, waiter: str) -> bool:
        subscriptions = self._subscriptions(process)
        for subscription in subscriptions:
            subscription.notify(waiter.encode())
        return bool(subscriptions)

    def _listens(self, member: str) -> bool:
        return bool(self._subscriptions(member.rpartition(":")[0]))

    def _subscriptions(self, process: str) -> list[MemorySubscription]:
        channel = process.encode("utf-8", "surrogatepass")
        return [
            subscription
            for subscription in self._node.subscriptions
            if subscription.channel == channel
        ]


class MemoryNode:
    """One node.

    Attributes:
        name: Its name in errors.
        skew: Seconds that its clock is ahead: a step of the clock makes keys expire early.
        cut: True if no client reaches it.
        stores: Its keys, by prefix.
        subscriptions: The subscriptions to it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.skew = 0.0
        self.cut = False
        self.stores: dict[str, Store] = {}
        self.subscriptions: list[MemorySubscription] = []

    def __repr__(self) -> str:
        return f"<{self.name} in memory{', cut off' if self.cut else ''}>"

    def store(self, prefix: str) -> Store:
        """Return its keys for locks with this prefix."""
        return self.stores.setdefault(prefix, Store(self))

    def clock(self) -> float:
        """Return its time, in seconds."""
        return monotonic() + self.skew

    def forget(self) -> None:
        """Lose all memory."""
        for store in self.stores.values():
            store.forget()


class Memory:
    """The nodes of all locks of this process, and the time."""

    def __init__(self, count: int) -> None:
        self.nodes = [MemoryNode(f"fake-{number}:6379") for number in range(1, count + 1)]
        self.time = ShiftedTime()
        self.turn = threading.RLock()
        self.drivers: weakref.WeakSet[MemoryDriver] = weakref.WeakSet()
        self.process = os.getpid()

    def cut(self, index: int) -> None:
        """Cut a node off, so that it cannot be reached."""
        with self.turn:
            self.nodes[index].cut = True
            for driver in self.drivers:
                driver.cut(index)

    def mend(self, index: int) -> None:
        """Let a node be reached again."""
        with self.turn:
            if self.nodes[index].cut:
                self.nodes[index].cut = False
                for driver in self.drivers:
                    driver.mend(index)


class MemoryDriver:
    """Driver that carries rounds to nodes in memory at once, in place of `Driver`."""

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
        """The nodes, for `Redlock.check`: none of them is a misfit."""
        pairs = zip(self._memory.nodes, self._pipelines, strict=True)
        return [
            SimpleNamespace(name=node.name, channel=at, misfit="", facts=None) for node, at in pairs
        ]

    def connect(self, timeout: float = 0.0, rest: float = 0.0) -> None:
        """Do nothing: there is no connection to open."""

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

    async def ask(
        self, operation: Callable[[float], Steps[T]], ahead: Callable[[float], Round] | None = None
    ) -> T:
        """Do the same in a coroutine."""
        return self.run(operation, ahead)

    def start(self, operation: Callable[[float], Steps[T]], done: Callable[[T], object]) -> None:
        """Run one operation to its end, and pass its result to `done`."""
        done(self.run(operation))

    def read(self, wait: float = 0.0) -> bool:
        """Return True: no answer is unread."""
        return True

    def is_leaving(self) -> bool:
        """Return False: each node answers at once."""
        return False

    def run_all(self, operations: Sequence[Callable[[float], Steps[T]]]) -> list[T]:
        """Run several operations, one after the other."""
        return [self.run(operation) for operation in operations]

    def close(self, wait: float = 0.0) -> None:
        """Close it, so that it reaches no node."""
        self._closed = True
        for pipeline in self._pipelines:
            pipeline.dropped()
            pipeline.unreachable("closed")

    def cut(self, index: int) -> None:
        """Mark a node as unreachable."""
        self._pipelines[index].dropped()
        self._pipelines[index].unreachable(CUT)

    def mend(self, index: int) -> None:
        """Mark a node as reachable again, and send it the releases that it has missed."""
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
        """Let the node execute its requests in order, including those an exception interrupted."""
        node, unanswered = self._memory.nodes[index], self._pipelines[index].unanswered
        while unanswered:
            round_ = unanswered[0]
            reply = node.store(self._prefix).execute(round_.verb, round_.claims, node.clock())
            unanswered.popleft()
            round_.answer(index, reply, monotonic())


class MemoryWakeup(ReleaseSubscriber):
    """Receiver of notifications from nodes in memory, which wake their waiters themselves."""

    def __init__(self, memory: Memory, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._memory_subscriptions = [
            MemorySubscription(self, *node) for node in enumerate(memory.nodes)
        ]

    def wake_all(self) -> None:
        """Wake all waiters, because time was moved."""
        with self._lock:
            for waiter in list(self._waiters.values()):
                waiter.news.set()

    def close(self) -> None:
        """Listen no more, and wake all waiters."""
        for subscription in self._memory_subscriptions:
            subscription.close()
        super().close()

    def _connect_missing(self, why: str = "") -> None:
        for subscription in self._memory_subscriptions:
            subscription.start()


class MemorySubscription:
    """Subscription to one node in memory, in place of a `Subscription`."""

    def __init__(self, wakeup: MemoryWakeup, index: int, node: MemoryNode) -> None:
        self.node = index
        self.channel = wakeup.channel
        self._wakeup = wakeup
        self._memory_node = node

    def start(self) -> None:
        """Begin to receive notifications for this process, if it does not yet."""
        if self not in self._memory_node.subscriptions:
            self._memory_node.subscriptions.append(self)
            self._wakeup.subscribed(self.node)

    def notify(self, name: bytes) -> None:
        """Pass a node's notification on to its waiter."""
        self._wakeup.notified(self.node, name)

    def close(self) -> None:
        """Stop receiving."""
        if self in self._memory_node.subscriptions:
            self._memory_node.subscriptions.remove(self)
