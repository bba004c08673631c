"""`fake_redlock` and `redlock_nodes`: what a test can do to the nodes of its locks.

Both let all locks of the process be taken on nodes of the test's, and both can do the same things
to these. Only in the fake can time be moved.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from ..keepalive.watchdog import Watchdog, Watched
from ..locking.redlock import Redlock
from ..protocol.errors import RedlockError
from ..protocol.lease import Lease
from ..protocol.names import slots
from ..protocol.values import Owner
from ..runtime import clock
from ..runtime.clock import monotonic
from ..server import LocalServer, start_servers
from ..stores.redis.address import parse_nodes
from .memory_nodes import Memory, MemoryNode, MemoryWakeup
from .redirect import redirected
from .target import Target, target_of

__all__ = ["FakeNodes", "LocalNodes", "Nodes", "fake_redlock", "redlock_nodes"]

ANOTHER = Owner("another-host", 1)
"""Who holds and steals in a test's name."""
HELD_FOR = STOLEN_FOR = 3600.0
"""Seconds: longer than a test."""
SETTLED = 10.0
"""Seconds at most until an extension that is under way has been settled; it takes microseconds."""


class Nodes:
    """The nodes of all locks of this process, for the time of a test.

    Attributes:
        urls: Their addresses, for other processes.
    """

    urls: list[str]

    def __init__(self) -> None:
        self._engines: Any = list
        self._others: dict[str, Redlock] = {}

    @property
    def settings(self) -> dict[str, Any]:
        """What a worker in another process must be told to use these nodes."""
        return {"redlock_nodes": self.urls, "redlock_restart_guard": "off"}

    @property
    def redlock(self) -> Redlock:
        """A lock of somebody else's, as from another process: to contend with the app's."""
        return self._other("redlock:")

    def __len__(self) -> int:
        return len(self.urls)

    @contextmanager
    def hold(self, what: Any, *args: Any, **kwargs: Any) -> Iterator[Lease]:
        """Another holds a resource, or what a task would lock, while the block runs.

        Args:
            what: A resource's name, a task, or a signature.
            *args: The task's.
            **kwargs: The task's.

        Raises:
            ResourceHeld: It is held already.
        """
        target = target_of(what, args, kwargs)
        other = self._other(target.redlock.prefix)
        names = target.names if len(target.names) > 1 else target.names[0]
        with ExitStack() as stack:
            # All slots of a resource that several may hold. Acquired, not `lock()`: what runs in
            # the block is not the holder.
            for _ in range(target.limit):
                lease = other.acquire(
                    names, owner=ANOTHER, limit=target.limit, ttl=HELD_FOR, wait=0.5
                )
                stack.callback(other.release, lease)
            yield lease

    def steal(self, what: Any, *args: Any, **kwargs: Any) -> None:
        """Another's token stands where the holder's was, on all nodes: its lease is lost.

        No client of this library does that; a flushed node, or a hand with `redis-cli`, comes to
        it. The holder is told at once if it is in this process, else by its next extension.

        Args:
            what: As for `hold`.
            *args: The task's.
            **kwargs: The task's.
        """
        target = target_of(what, args, kwargs)
        names = target.names
        if target.limit > 1:
            names = tuple(slots(names[0], target.limit))
        token = ANOTHER.token("0" * 32)
        for name in names:
            self._overwrite(target, name, token)
        self.extend()

    def partition(self, *nodes: int) -> None:
        """Nobody reaches some nodes any more, by their numbers from 0; all, if none is named."""
        raise NotImplementedError

    def heal(self) -> None:
        """All nodes are reached again, and remember what they held."""
        raise NotImplementedError

    def forget(self, *nodes: int) -> None:
        """Some nodes lose all they held (all nodes, if none is named), as if they were flushed."""
        raise NotImplementedError

    def extend(self) -> None:
        """Have every lease of this process extended now, and not when it is due."""
        for engine in self._engines():
            watchdog = engine.watchdog
            if isinstance(watchdog, Watchdog):
                with watchdog.lock:
                    watched = list(watchdog.schedule.watched.values())
                _round(watchdog, watched)

    def _overwrite(self, target: Target, name: str, token: str) -> None:
        raise NotImplementedError

    def _other(self, prefix: str) -> Redlock:
        if prefix not in self._others:
            self._others[prefix] = Redlock(self.urls, prefix=prefix, restart_guard="off")
        return self._others[prefix]

    def _picked(self, nodes: Sequence[int]) -> Sequence[int]:
        wrong = [number for number in nodes if not 0 <= number < len(self)]
        if wrong:
            raise IndexError(f"there is no node {wrong[0]}: they are 0 to {len(self) - 1}")
        return nodes or range(len(self))


class LocalNodes(Nodes):
    """Real servers on this machine.

    Attributes:
        servers: They themselves: `pause`, `kill`, `restart` and more.
    """

    def __init__(self, servers: Sequence[LocalServer]) -> None:
        super().__init__()
        self.servers = list(servers)
        self.urls = [server.url for server in servers]

    def partition(self, *nodes: int) -> None:
        """Some servers are stopped (SIGSTOP): they answer nothing."""
        for number in self._picked(nodes):
            self.servers[number].pause()

    def heal(self) -> None:
        """Let them go on."""
        for server in self.servers:
            server.resume()

    def forget(self, *nodes: int) -> None:
        """Flush some of them."""
        for number in self._picked(nodes):
            self._ask(number, "FLUSHALL")

    def _overwrite(self, target: Target, name: str, token: str) -> None:
        milliseconds = str(int(STOLEN_FOR * 1000))
        for number in range(len(self)):
            self._ask(number, "SET", target.redlock.prefix + name, token, "PX", milliseconds)

    def _ask(self, number: int, *command: str) -> None:
        (address,) = parse_nodes([self.urls[number]])
        connection = address.connection()
        try:
            connection.connect()
            connection.send_command(*command)
            connection.read_response()
        finally:
            connection.disconnect()


class FakeNodes(Nodes):
    """Nodes in memory, of this process alone.

    Attributes:
        nodes: They themselves: `skew` is what a node's clock is ahead, in seconds.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory
        self.nodes: list[MemoryNode] = memory.nodes
        self.urls = [f"redis://{node.name}/0" for node in memory.nodes]

    @property
    def settings(self) -> dict[str, Any]:
        """There are none: another process has another memory."""
        raise RedlockError(
            "fake_redlock is in the memory of this process, and no other can use it: give a worker"
            " in a process of its own redlock_nodes"
        )

    def partition(self, *nodes: int) -> None:
        """Nobody reaches some nodes any more, by their numbers from 0; all, if none is named."""
        with self._memory.taking_turns():
            for number in self._picked(nodes):
                self.nodes[number].cut = True
                for driver in self._memory.drivers:
                    driver.cut(number)

    def heal(self) -> None:
        """All nodes are reached again, and remember what they held."""
        with self._memory.taking_turns():
            for number, node in enumerate(self.nodes):
                if node.cut:
                    node.cut = False
                    for driver in self._memory.drivers:
                        driver.heal(number)

    def forget(self, *nodes: int) -> None:
        """Some nodes lose all they held; all, if none is named."""
        with self._memory.taking_turns():
            for number in self._picked(nodes):
                self.nodes[number].forget()

    def advance(self, seconds: float) -> None:
        """Time passes, and leases are extended when they fall due.

        Args:
            seconds: How much. Nobody waits for it.
        """
        now, until = monotonic(), monotonic() + seconds
        while now < until:
            due = min((_next_due(engine.watchdog) for engine in self._engines()), default=until)
            self._shift(max(0.0, min(due, until) - now))
            self._tend()
            now = max(monotonic(), now + 1e-6)
        self._look()

    def jump(self, seconds: float) -> None:
        """This process was stopped for a time (SIGSTOP, swap, a suspended machine).

        It extends nothing meanwhile, and the nodes go on: what lasted for less is lost.

        Args:
            seconds: For how long.
        """
        self._shift(seconds)
        self._tend()
        self._look()

    def jump_node(self, number: int, seconds: float) -> None:
        """The wall clock of one node is set forward: it drops what would have expired till then.

        Args:
            number: Which node, from 0.
            seconds: How far.
        """
        self._picked([number])
        self.nodes[number].skew += seconds

    def _shift(self, seconds: float) -> None:
        self._memory.time.shift += seconds

    def _tend(self) -> None:
        for engine in self._engines():
            watchdog = engine.watchdog
            if isinstance(watchdog, Watchdog):
                with watchdog.lock:
                    due = watchdog.schedule.take(monotonic())
                _round(watchdog, due)

    def _look(self) -> None:
        """Whoever sleeps until some time looks at the clock."""
        for engine in self._engines():
            if isinstance(engine.watchdog, Watchdog):
                engine.watchdog.wake()
            if isinstance(engine.wakeup, MemoryWakeup):
                engine.wakeup.ring()

    def _overwrite(self, target: Target, name: str, token: str) -> None:
        with self._memory.taking_turns():
            for node in self.nodes:
                until = node.clock() + STOLEN_FOR
                node.store(target.redlock.prefix).held[name] = token, until


def _next_due(watchdog: Any) -> float:
    """When a lease falls due next, once those are settled that the watchdog's thread has taken."""
    until = time.monotonic() + SETTLED
    while isinstance(watchdog, Watchdog) and time.monotonic() < until:
        with watchdog.lock:
            if all(watched.due < math.inf for watched in watchdog.schedule.watched.values()):
                break
        time.sleep(0.0005)
    return float(watchdog.next_due)


def _round(watchdog: Watchdog, due: Sequence[Watched]) -> None:
    """What the watchdog's thread does: in a thread, for a loss may be raised in this one."""
    if due:
        thread = threading.Thread(target=watchdog.extend_due, args=(due,), daemon=True)
        thread.start()
        thread.join()


@contextmanager
def fake_redlock(nodes: int = 3) -> Iterator[FakeNodes]:
    """All locks of this process are taken in its memory, while the block runs. No server is needed.

    Args:
        nodes: How many nodes there are.
    """
    memory = Memory(nodes)
    fake = FakeNodes(memory)
    addresses = parse_nodes(fake.urls)
    with (
        patch.object(clock, "time", memory.time),
        redirected(addresses, memory.driver, memory.wakeup) as engines,
    ):
        fake._engines = engines
        yield fake


@contextmanager
def redlock_nodes(
    nodes: int = 3, *, servers: Sequence[LocalServer] | None = None
) -> Iterator[LocalNodes]:
    """All locks of this process are taken on real servers, while the block runs.

    Args:
        nodes: How many to start. They end with the block.
        servers: Servers that run already, in place of these; they are flushed.

    Raises:
        ConfigurationError: No server binary was found; the text says what to install.
    """
    with ExitStack() as stack:
        if servers is None:
            servers = stack.enter_context(start_servers(nodes))
        local = LocalNodes(servers)
        local.heal()
        local.forget()
        stack.callback(local.heal)
        engines = stack.enter_context(redirected(parse_nodes(local.urls)))
        local._engines = engines
        yield local
