"""`fake_redlock` and `redlock_nodes`: the operations of a test on the nodes of its locks.

Both redirect all locks of the process to the test's nodes, and offer the same operations on them.
Only the fake can move time.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from ..keepalive.watchdog import Watchdog, Watched
from ..locking.client import LockClient
from ..locking.redlock import Redlock
from ..protocol.errors import RedlockError
from ..protocol.lease import Lease
from ..protocol.names import of_each, slots_of
from ..protocol.values import Owner
from ..runtime import clock
from ..runtime.clock import monotonic
from ..server import LocalServer, start_servers
from ..stores.redis.address import parse_nodes
from .memory_nodes import Memory, MemoryDriver, MemoryNode, MemoryWakeup
from .redirect import redirected
from .target import target_of

__all__ = ["FakeNodes", "LocalNodes", "Nodes", "fake_redlock", "redlock_nodes"]

ANOTHER = Owner("another-host", 1)
"""Owner of the locks that a test takes in another's name (`hold`, `steal`)."""
HELD_S = 3600.0
"""Seconds for which these locks are held: longer than a test."""
HOLD_WAIT_S = 0.5
"""Seconds that `hold` waits: a worker frees a lock a moment after its result is stored."""
SETTLE_TIMEOUT_S = 10.0
"""Seconds until an extension under way must be settled; it takes microseconds."""


class Nodes:
    """The nodes of all locks of this process, for the duration of a test.

    Attributes:
        urls: Their addresses, for other processes.
    """

    urls: list[str]

    def __init__(self) -> None:
        self._clients: Callable[[], list[LockClient]] = list
        self._others: dict[str, Redlock] = {}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that make a worker in another process use these nodes."""
        return {"redlock_nodes": self.urls, "redlock_restart_guard": "off"}

    @property
    def redlock(self) -> Redlock:
        """Another program's lock, as in another process, to contend with the app's."""
        return self._other("redlock:")

    def __len__(self) -> int:
        return len(self.urls)

    @contextmanager
    def hold(self, what: Any, *args: Any, **kwargs: Any) -> Iterator[Lease]:
        """Hold a resource, or what a task would lock, as another owner while the block runs.

        Args:
            what: A resource's name, a task (followed by its arguments), or a signature.

        Raises:
            ResourceHeld: It is held already.
        """
        target = target_of(what, args, kwargs)
        other = self._other(target.redlock.prefix)
        names = [(target.names, 1)]
        if target.limit != 1:
            each = zip(target.names, of_each(target.names, target.limit), strict=True)
            names = [((name,), limit) for name, limit in each for _ in range(limit)]
        with ExitStack() as stack:
            # Take all slots of a resource that several may hold. With `acquire`, not `lock()`, so
            # that code in the block does not count as the holder.
            for of, limit in names:
                asked: Any = {"owner": ANOTHER, "limit": limit, "ttl": HELD_S, "wait": HOLD_WAIT_S}
                lease = other.acquire(of, **asked)
                stack.callback(other.release, lease)
            yield lease

    def steal(self, what: Any, *args: Any, **kwargs: Any) -> None:
        """Replace the holder's token by another's on all nodes, so that its lease is lost.

        No client of this library does that, but a flushed node or `redis-cli` has the same effect.
        A holder in this process is notified at once, any other at its next extension. `what`: as
        for `hold`.
        """
        target = target_of(what, args, kwargs)
        names = [slot for slots in slots_of(target.names, target.limit) for slot in slots]
        token = ANOTHER.token("0" * 32)
        for number in range(len(self)):
            for name in names:
                self._put(number, target.redlock.prefix, name, token)
        self.extend()

    def partition(self, *nodes: int) -> None:
        """Cut some nodes off, by their numbers from 0; all, if none is named.

        They answer nothing. Real servers are stopped (SIGSTOP).
        """
        for number in self._picked(nodes):
            self._cut(number)

    def heal(self) -> None:
        """Make all nodes reachable again, with the locks that they had."""
        for number in range(len(self)):
            self._mend(number)

    def forget(self, *nodes: int) -> None:
        """Make some nodes lose all locks, as if flushed; all nodes, if none is named."""
        for number in self._picked(nodes):
            self._flush(number)

    def extend(self) -> None:
        """Extend every lease of this process now, before it is due."""
        for watchdog in self._watchdogs():
            with watchdog.lock:
                watched = list(watchdog.schedule.watched.values())
            _round(watchdog, watched)

    def _watchdogs(self) -> list[Watchdog]:
        found = [client.watchdog for client in self._clients()]
        return [watchdog for watchdog in found if isinstance(watchdog, Watchdog)]

    def _cut(self, number: int) -> None:
        raise NotImplementedError

    def _mend(self, number: int) -> None:
        raise NotImplementedError

    def _flush(self, number: int) -> None:
        raise NotImplementedError

    def _put(self, number: int, prefix: str, name: str, token: str) -> None:
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
        servers: The servers, with `pause`, `kill`, `restart` and more.
    """

    def __init__(self, servers: Sequence[LocalServer]) -> None:
        super().__init__()
        self.servers = list(servers)
        self.urls = [server.url for server in servers]

    def _cut(self, number: int) -> None:
        self.servers[number].pause()

    def _mend(self, number: int) -> None:
        self.servers[number].resume()

    def _flush(self, number: int) -> None:
        self._ask(number, "FLUSHALL")

    def _put(self, number: int, prefix: str, name: str, token: str) -> None:
        self._ask(number, "SET", prefix + name, token, "EX", str(int(HELD_S)))

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
        nodes: The nodes; `skew` is the number of seconds that a node's clock is ahead.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory
        self.nodes: list[MemoryNode] = memory.nodes
        self.urls = [f"redis://{node.name}/0" for node in memory.nodes]

    @property
    def settings(self) -> dict[str, Any]:
        """Raise an error: another process cannot use this memory."""
        raise RedlockError(
            "fake_redlock is in the memory of this process, and no other can use it: give a worker"
            " in another process redlock_nodes"
        )

    def advance(self, seconds: float) -> None:
        """Let time pass, without waiting; leases are extended when they fall due."""
        now, until = monotonic(), monotonic() + seconds
        while now < until:
            due = min(map(_next_due, self._watchdogs()), default=until)
            self._memory.time.shift += max(0.0, min(due, until) - now)
            self._tend()
            now = max(monotonic(), now + 1e-6)
        self._look()

    def jump(self, seconds: float) -> None:
        """Stop this process for a time, without waiting (SIGSTOP, swap, a suspended machine).

        It extends nothing meanwhile, and the nodes go on: leases with less time left are lost.
        """
        self._memory.time.shift += seconds
        self._tend()
        self._look()

    def jump_node(self, number: int, seconds: float) -> None:
        """Set the wall clock of one node forward: it drops keys that would expire until then."""
        self._picked([number])
        self.nodes[number].skew += seconds

    def _tend(self) -> None:
        for watchdog in self._watchdogs():
            with watchdog.lock:
                due = watchdog.schedule.take(monotonic())
            _round(watchdog, due)

    def _look(self) -> None:
        """Wake all threads that sleep until some time, so that they read the clock."""
        for watchdog in self._watchdogs():
            watchdog.wake()
        for client in self._clients():
            if isinstance(client.wakeup, MemoryWakeup):
                client.wakeup.wake_all()

    def _cut(self, number: int) -> None:
        self._memory.cut(number)

    def _mend(self, number: int) -> None:
        self._memory.mend(number)

    def _flush(self, number: int) -> None:
        with self._memory.turn:
            self.nodes[number].forget()

    def _put(self, number: int, prefix: str, name: str, token: str) -> None:
        with self._memory.turn:
            node = self.nodes[number]
            node.store(prefix).held[name] = token, node.clock() + HELD_S


def _next_due(watchdog: Watchdog) -> float:
    """Return when the next lease falls due, once the watchdog's thread has settled its own."""
    until = time.monotonic() + SETTLE_TIMEOUT_S
    while time.monotonic() < until:
        with watchdog.lock:
            if all(watched.due < math.inf for watched in watchdog.schedule.watched.values()):
                break
        time.sleep(0.0005)
    return watchdog.next_due


def _round(watchdog: Watchdog, due: Sequence[Watched]) -> None:
    """Run the watchdog's round in a thread, because a loss may be raised in the current one."""
    if due:
        thread = threading.Thread(target=watchdog.extend_due, args=(due,), daemon=True)
        thread.start()
        thread.join()


@contextmanager
def fake_redlock(nodes: int = 3) -> Iterator[FakeNodes]:
    """Keep all locks of this process in memory, on this many nodes, while the block runs."""
    memory = Memory(nodes)
    fake = FakeNodes(memory)
    with (
        patch.object(clock, "time", memory.time),
        redirected(
            parse_nodes(fake.urls), partial(MemoryDriver, memory), partial(MemoryWakeup, memory)
        ) as fake._clients,
    ):
        yield fake


@contextmanager
def redlock_nodes(
    nodes: int = 3, *, servers: Sequence[LocalServer] | None = None
) -> Iterator[LocalNodes]:
    """Redirect all locks of this process to real servers, while the block runs.

    Args:
        nodes: How many to start. They end with the block.
        servers: Running servers to use instead; they are flushed.

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
        local._clients = stack.enter_context(redirected(parse_nodes(local.urls)))
        yield local
