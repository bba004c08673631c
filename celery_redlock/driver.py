"""Carries rounds to the nodes: one connection per node, one poll loop, any number of threads.

All threads of a process share the connections. Whoever waits for a round and finds nobody polling
polls for all, and hands every answer to its round; the others sleep until that wakes them or it
becomes their turn to poll. A lone thread thus goes straight from write to poll to read, with no
other thread to wake, and a thread stuck waiting for a slow quorum holds up nobody.

The driver owns the clock. Everything that touches a socket or a queue happens with the *turn*
held; only the poll itself happens without.
"""

from __future__ import annotations

import logging
import random
import secrets
import select
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from .address import Address
from .bell import Bell
from .commands import encode
from .errors import ConfigurationError, NodeError
from .green import READABLE, poll
from .guard import Facts, Guard
from .lease import Claim, quorum_of
from .node import Node, close_round
from .quorum import Round, Steps, Verb, extend

__all__ = ["Driver", "monotonic"]

logger = logging.getLogger("celery_redlock.node")

T = TypeVar("T")

FIRST_CONNECT = 1.5
"""Seconds the first operation waits for a quorum of connections. No later one waits for any."""
REST = 0.02
"""Seconds of these that it waits for the other nodes once it has a quorum."""
BACKOFF, BACKOFF_MAX = 0.05, 1.0
"""Seconds between attempts to connect to a node that cannot be reached: full jitter up to these."""
JITTER = random.SystemRandom()
"""Not the module's own generator: that one is the application's, which may have seeded it."""
BATCH = 200
"""Leases in one request: keeps a node's other clients from waiting a whole tick."""
SLICE = 0.002
"""Seconds of polling at a time for what the poll set lacks: a connection that is being made, room
in a socket's buffer."""


def _clock() -> int:
    # Counts on while the machine is suspended, or a lease would outlive its nodes' patience.
    return getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


_CLOCK = _clock()


def monotonic() -> float:
    """Seconds on the clock of leases. Never steps; counts time spent suspended where it can."""
    return time.clock_gettime(_CLOCK)


class Driver:
    """The nodes as this process reaches them. Not to be used after a fork.

    Args:
        addresses: Where they are.
        prefix: What keys begin with.
        guard: Knows which of them may vote; None for all.
        strict: Refuse to begin where a node cannot be one; else it is silent. May be changed.
        told: Whether listeners are told how the nodes do. Not where they could not be called: in a
            native thread beside greenlets.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        prefix: str,
        guard: Guard | None = None,
        *,
        strict: bool = True,
        told: bool = True,
    ) -> None:
        self._guard = guard = guard or Guard(False, 0.0, logger.debug)
        self.strict = strict
        nonces = [f"{prefix}nonce:{secrets.token_hex(16)}" for _ in addresses]
        self.nodes = [
            Node(index, address, prefix, guard, nonces, told)
            for index, address in enumerate(addresses)
        ]
        self._prefix = prefix
        # `with` on a lock written in C cannot be interrupted between taking it and owing to give it
        # back; on a Condition it can: a time limit that struck there would leave it taken for good.
        self._turn = threading.RLock()
        self._bells: list[Bell] = []
        self._polling = False
        self._poll = _Poll()
        self._connecting: dict[int, threading.Thread] = {}
        self._closing = threading.Event()
        self._started = self._ready = False

    def connect(self, timeout: float = FIRST_CONNECT, rest: float = REST) -> None:
        """Connect to all nodes, in parallel; return when a quorum is up or hope is gone.

        Args:
            timeout: Seconds to wait at most; 0 only starts connecting.
            rest: Seconds of these to wait for the other nodes once a quorum is up.

        Raises:
            ConfigurationError: One of them cannot be a node. Not raised again once all went well:
                one that becomes such a node later is silent.
        """
        with self._turn:
            if not self._started:
                self._started = True
                for node in self.nodes:
                    self._reconnect(node)
        start = monotonic()
        while True:
            with self._turn:
                up = sum(node.channel.up for node in self.nodes)
                if all(node.channel.up or node.channel.down for node in self.nodes):
                    break
                bell = self._bell()
            # With a quorum there is no need to wait for the rest, but it is good to have.
            patience = min(timeout, rest) if up >= quorum_of(len(self.nodes)) else timeout
            if not bell.wait(start + patience - monotonic()):
                break
        if timeout > 0:
            misfit = next((node for node in self.nodes if node.misfit), None)
            if misfit is not None and self.strict and not self._ready:
                raise ConfigurationError(f"node {misfit.name} cannot be one: {misfit.misfit}")
            self._ready = True

    def run(
        self, operation: Callable[[float], Steps[T]], ahead: Callable[[float], Round] | None = None
    ) -> T:
        """Run one operation to its end.

        Args:
            operation: Makes its steps, given the time; seconds.
            ahead: Makes a round, likewise, that is written along with the first, and ahead of it.
        """
        if not self._ready:
            self.connect()
        try:
            first = () if ahead is None else (ahead(monotonic()),)
            steps = operation(monotonic())
            round_ = next(steps)
            while True:
                self._carry((*first, round_))
                first = ()
                round_ = steps.send(monotonic())
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    def run_all(self, operations: Sequence[Callable[[float], Steps[T]]]) -> list[T]:
        """Run single-round operations side by side: one write per node each, one wait for all."""
        if not self._ready:
            self.connect()
        now = monotonic()
        started = [operation(now) for operation in operations]
        self._carry([next(steps) for steps in started])
        results = []
        for steps in started:
            try:
                steps.send(monotonic())
            except StopIteration as stop:
                results.append(stop.value)
        return results

    def extend(
        self, claims: Sequence[Claim], patience: float, verb: Verb = Verb.EXTEND
    ) -> list[Round]:
        """Extend many, in as few requests as no node minds; the rounds.

        Args:
            claims: What to extend.
            patience: How long to wait for the answers; seconds.
            verb: See `quorum.extend`.
        """
        batches = [claims[i : i + BATCH] for i in range(0, len(claims), BATCH)]
        return self.run_all(
            [partial(extend, batch, patience=patience, verb=verb) for batch in batches]
        )

    def close(self, wait: float = 0.0) -> None:
        """Close all connections; what is not released is left to its ttl.

        Args:
            wait: Seconds to wait for the end of each thread that is just connecting.
        """
        with self._turn:
            self._closing.set()
            for node in self.nodes:
                self._poll.forget(node.index)
                node.close()
                node.channel.dropped()
                node.channel.unreachable("closed")
            self._ring()
            connecting = list(self._connecting.values())
        for thread in connecting if wait else ():
            thread.join(wait)

    def _carry(self, rounds: Sequence[Round]) -> None:
        """Write rounds to their nodes and hand in answers until each is decided or overdue."""
        with self._turn:
            now = monotonic()
            for round_ in rounds:
                last = round_ is rounds[-1]
                round_.begin()
                payload = encode(round_, self._prefix)
                for index in round_.targets:
                    node = self.nodes[index]
                    node.ask(round_, payload, now, round_.verb is Verb.QUEUE and not last)
                    self._reconnect(node)
        until = max(round_.until for round_ in rounds)
        while not all([round_.decided for round_ in rounds]):
            left = until - monotonic()
            # An unread answer is no silence: read once more, however late it is.
            self._wait(rounds, max(0.0, left))
            if left <= 0:
                break
        with self._turn:
            for round_ in rounds:
                waited = round_.until - round_.sent
                for index in close_round(round_, f"no answer within {waited:.3f} s"):
                    self.nodes[index].late(round_.verb, f"no answer within {waited:.3f} s")

    def _wait(self, rounds: Sequence[Round], timeout: float) -> None:
        """Let answers come in: poll for everybody, or sleep while another thread does."""
        if self._connecting and any(node.channel.awaited for node in self.nodes):
            timeout = min(timeout, SLICE)
        clogged = [node for node in self.nodes if node.unsent]
        if clogged:
            timeout = min(timeout, SLICE)
        polling = False
        try:
            with self._turn:
                if all([round_.decided for round_ in rounds]):
                    return  # by the thread that has just polled: nothing would wake us
                if self._polling:
                    bell = self._bell()
                else:
                    polling = self._polling = True
            if not polling:
                bell.wait(timeout)
                return
            ready = self._poll.wait(timeout)
            with self._turn:
                polling = self._polling = False
                now = monotonic()
                for index in ready:
                    node = self.nodes[index]
                    node.receive(now)
                    self._reconnect(node)
                for node in clogged:
                    node.flush()
                self._ring()
        except BaseException:
            with self._turn:
                if polling:
                    self._polling = False
                self._ring()  # somebody else must poll
            raise

    def _bell(self) -> Bell:
        """Rung when answers or connections have come, or when somebody else must poll."""
        bell = Bell()
        self._bells.append(bell)
        return bell

    def _ring(self) -> None:
        bells, self._bells = self._bells, []
        for bell in bells:
            bell.ring()

    def _reconnect(self, node: Node) -> None:
        """Make a new connection in the background if there is none, unless that is being done.

        It is asked here and not in the callers' loops: CPython 3.12 and 3.13 forget the `with`
        around an `if` that ends a loop's body, and an exception struck there would keep the turn.
        """
        if node.connection is not None:
            return
        self._poll.forget(node.index)
        running = self._connecting.get(node.index)
        # Alive: a time limit that struck before its start left one that never will be.
        if self._closing.is_set() or (running is not None and running.is_alive()):
            return
        name = f"celery_redlock connect {node.name}"
        thread = threading.Thread(target=self._connect, args=(node,), name=name, daemon=True)
        self._connecting[node.index] = thread
        thread.start()

    def _connect(self, node: Node) -> None:
        while not self._closing.is_set():
            if node.failures:
                # Full jitter: a fleet of workers must not knock in step at a node that is back.
                ceiling = min(BACKOFF_MAX, BACKOFF * 2.0 ** min(node.failures, 16))
                if self._closing.wait(JITTER.uniform(0, ceiling)):
                    return
            node.failures += 1
            try:
                connection, facts = node.connect()
            except NodeError as error:
                with self._turn:
                    if self._closing.is_set():
                        return  # nobody is to be told any more: listeners are of the whole process
                    node.unreachable(str(error))
                    self._ring()
                continue
            with self._turn:
                # Two threads connect to one node if a time limit struck while one was started.
                late = node.connection is not None
                if late or self._closing.is_set():
                    connection.disconnect()
                    return
                why = self._misfit(node, facts)
                if why:
                    node.refuse(connection, why)
                    self._ring()
                    continue
                node.opened(connection, facts, monotonic())
                if node.connection is not None:
                    self._connecting.pop(node.index, None)
                    self._poll.watch(node.index, connection._sock.fileno())
                    self._ring()
                    return

    def _misfit(self, node: Node, facts: Facts) -> str:
        """Why this cannot be a node; empty if it can."""
        all_facts = [facts if other is node else other.facts for other in self.nodes]
        twin = self._guard.twin(node.index, all_facts)
        if twin is None:
            return facts.misfit
        return f"it is the same server as {self.nodes[twin].name}, and would vote twice"


class _Poll:
    """Which nodes can be read: select.poll, or select.select where there is nothing like it."""

    def __init__(self) -> None:
        self._poll = poll()
        self._index_of: dict[int, int] = {}

    def watch(self, index: int, fd: int) -> None:
        self.forget(index)
        self._index_of[fd] = index
        if self._poll is not None:
            self._poll.register(fd, READABLE)

    def forget(self, index: int) -> None:
        for fd in [fd for fd, known in self._index_of.items() if known == index]:
            del self._index_of[fd]
            if self._poll is not None:
                self._poll.unregister(fd)

    def wait(self, timeout: float) -> list[int]:
        """Indexes of the nodes with something to read, after at most `timeout` seconds."""
        if self._poll is not None:
            fds = [fd for fd, _event in self._poll.poll(timeout * 1000)]
        else:
            fds = select.select(list(self._index_of), [], [], timeout)[0]
        return [self._index_of[fd] for fd in fds if fd in self._index_of]
