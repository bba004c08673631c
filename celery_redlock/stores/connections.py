"""The connections of one process to the nodes, made in the background by a thread for each attempt.

They share one lock, which is held whenever a socket or a queue is used. No foreign code runs under
that lock: log lines and calls of listeners are kept until it is released.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence

from ..protocol.errors import ConfigurationError, NodeError
from ..protocol.node_info import NodeInfo
from ..protocol.restart_guard import RestartGuard
from ..protocol.values import quorum_of
from ..runtime.clock import monotonic
from ..runtime.polling import SharedPoll
from ..runtime.thread import Threads
from .kinds import Address, make_node
from .node import LEAVE_S, Node

__all__ = ["UNWATCHED_POLL_S", "Connections"]

logger = logging.getLogger("celery_redlock.node")

FIRST_CONNECT_S = 1.5
"""Longest wait of the first operation for a quorum of connections, in seconds. No later operation
waits for connections."""
REST_S = 0.02
"""Part of that wait which is spent on the other nodes once a quorum is connected; seconds."""
FAR_FACTOR = 10
"""Minimum wait for the other connections, as a multiple of the time that the first one took: the
other nodes may be further away."""
BACKOFF_S, BACKOFF_MAX_S = 0.05, 1.0
"""First and longest pause between attempts to connect to an unreachable node, in seconds; with full
jitter."""
UNWATCHED_POLL_S = 0.002
"""Longest single poll, in seconds, while something is waited for that does not end a poll: for a
connection that is being made, or for room in a socket's buffer."""
JITTER = random.SystemRandom()
"""Source of random delays. Not `random` itself: the application may have seeded that."""


class Connections:
    """The nodes and the connections of this process to them. Do not use it after a fork.

    Args:
        addresses: The addresses of the nodes.
        prefix: The prefix of keys.
        guard: The rule that decides which nodes may vote; None if all may.
        strict: True to raise at the start if too few nodes are usable; otherwise unusable nodes are
            silent. May be changed later.
        node_timeout: How long the first operation waits for nodes that hang; seconds.
        poll: Makes what polls the connections, of the arguments of `SharedPoll`.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        prefix: str,
        guard: RestartGuard | None = None,
        *,
        strict: bool = True,
        node_timeout: float = FIRST_CONNECT_S,
        poll: Callable[..., SharedPoll] = SharedPoll,
    ) -> None:
        self._node_timeout = node_timeout
        self._guard = guard = guard or RestartGuard(False, 0.0, logger.debug)
        self.strict = strict
        self._prefix = prefix
        self._later: deque[Callable[[], object]] = deque()
        nonces = [f"{prefix}nonce:{secrets.token_hex(16)}" for _ in addresses]
        later = self._later.append
        self.nodes = [
            make_node(n, address, prefix, guard, nonces, clock=monotonic, later=later)
            for n, address in enumerate(addresses)
        ]
        # A `with` cannot be interrupted right after it has taken a lock written in C. On a
        # Condition it can: a time limit there would leave it taken for ever.
        self._lock = threading.RLock()
        self._poll = poll(self._lock, self._read_nodes, self._look)
        self._clogged: list[Node] = []
        self._connecting = Threads[int]()
        self._closing = threading.Event()
        self._started = self._ready = False

    def connect(
        self, timeout: float = FIRST_CONNECT_S, rest: float = REST_S, hung: float | None = None
    ) -> None:
        """Connect to all nodes, in parallel; return when a quorum is up or none can be expected.

        Args:
            timeout: The longest wait in seconds; 0 only starts connecting.
            rest: The part of it that is spent on the other nodes once a quorum is up; seconds.
            hung: Seconds from the start after which, once one node is up, the others are assumed to
                hang; None for `timeout`. More if the first is far away: see `FAR_FACTOR`.

        Raises:
            ConfigurationError: So many servers are unusable as nodes that there is no quorum. If
                two report that they are the same server, neither counts. Not raised again after a
                success. An unusable minority is silent: so neither a failover, which turns a node
                into a replica, nor a node that lies stops the others.
        """
        with self._lock:
            if not self._started:
                self._started = True
                self._reconnect()
        start, hurried, quorum = monotonic(), hung is not None, quorum_of(len(self.nodes))
        while True:
            with self._lock:
                up = sum(node.channel.up for node in self.nodes)
                pending = [n for n in self.nodes if not (n.channel.up or n.channel.down)]
                if not pending:
                    break
                news = self._poll.sleeper(lambda: True)  # woken by any news
            if up and hung is not None:
                timeout = min(timeout, max(hung, FAR_FACTOR * (monotonic() - start)))
                hung = None
            # With a quorum it is not necessary to wait for the other nodes, but useful.
            patience = min(timeout, rest) if up >= quorum else timeout
            if not self._poll.sleep(news, start + patience - monotonic()):
                break
        if hurried and up < quorum:
            with self._lock:  # otherwise the first round would wait for them once more
                for node in pending:
                    if not (node.channel.up or node.channel.down):
                        node.channel.unreachable("no connection yet")
        if timeout > 0:
            misfits = [node for node in self.nodes if node.misfit]
            unfit = {node.index for node in misfits} | {node.twin for node in misfits} - {None}
            if self.strict and not self._ready and len(self.nodes) - len(unfit) < quorum:
                self._settle()
                whys = [f"node {node.name} is not usable: {node.misfit}" for node in misfits]
                raise ConfigurationError("; ".join(whys))
            self._ready = True
        self._settle()

    def close(self, wait: float = 0.0) -> None:
        """Close all connections; leases that are not released expire by their ttl.

        Args:
            wait: Seconds to wait for the end of each thread that is just connecting.
        """
        if self._reentered():
            self._later.append(self.close)
            return
        with self._lock:
            self._closing.set()
            for node in self.nodes:
                self._poll.forget(node.index)
                node.close()
                node.channel.dropped()
                node.channel.unreachable("closed")
            self._poll.wake()
            connecting = list(self._connecting.values())
        for thread in connecting if wait else ():
            thread.join(wait)
        self._settle()

    # -- Around the lock

    def _reentered(self) -> bool:
        """Return True if this thread has the lock: a handler has interrupted it in here."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def _settle(self) -> None:
        """Make the calls that had to wait until the lock is released."""
        while self._later and not self._reentered():
            try:
                call = self._later.popleft()
            except IndexError:
                return  # another thread has done it
            try:
                call()
            except Exception:
                # Most likely the error of a log handler; treat it as `logging` itself does.
                if logging.raiseExceptions:
                    traceback.print_exc()

    def _look(self) -> None:
        """Continue after a read, or after a new connection."""
        self._flush_soon()
        self._settle()

    def _read_nodes(self, ready: Sequence[int]) -> None:
        """Read from these nodes; `ready` is empty if the poll has timed out."""
        for index in ready:
            self.nodes[index].receive()
        for node in () if ready else self.nodes:
            if node.channel.stalled(monotonic(), LEAVE_S):
                node.receive()  # it may find another server to ask
        for node in self._clogged:
            node.flush()
        self._reconnect()
        if not ready and any([node.channel.unanswered for node in self.nodes]):
            self._poll.read_in(LEAVE_S / 4)

    def _flush_soon(self) -> None:
        """Write, before long, the rest of requests that did not fit into a socket's buffer."""
        self._clogged = [node for node in self.nodes if node.unsent]
        if self._clogged:
            self._poll.read_in(UNWATCHED_POLL_S)

    # -- In the background

    def _reconnect(self) -> None:
        """Connect in the background to the nodes without a connection, once at a time for each.

        The loop is here and not in the callers: CPython 3.12 and 3.13 forget the `with` around an
        `if` that ends a loop's body, and an exception there would not release the lock.
        """
        for node in self.nodes:
            if node.connection is not None:
                continue
            self._poll.forget(node.index)
            if not self._closing.is_set():
                name = f"celery_redlock connect {node.name}"
                self._connecting.begin(node.index, name, self._connect, node)

    def _connect(self, node: Node) -> None:
        connected = False
        while not connected and not self._closing.is_set():
            try:
                connected = self._attempt(node)
            finally:
                self._settle()

    def _attempt(self, node: Node) -> bool:
        """Try to connect, after a pause if that has failed before; return True to stop trying."""
        if node.failures:
            # Full jitter: many workers must not connect at the same moment to a node that is back.
            ceiling = min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(node.failures, 16))
            if self._closing.wait(JITTER.uniform(0, ceiling)):
                return True
        node.failures += 1
        asked = monotonic()
        try:
            connection, facts = node.connect()
        except NodeError as error:
            with self._lock:
                if self._closing.is_set():
                    return True  # without a report: listeners belong to the whole process
                node.unreachable(str(error))
                self._poll.wake()
            return False
        with self._lock:
            # Two threads connect to one node if a time limit struck while one of them was started.
            late = node.connection is not None
            if late or self._closing.is_set():
                connection.disconnect()
                return True
            twin = self._twin(node, facts)
            why = facts.misfit if twin is None else _same_as(self.nodes[twin])
            if why:
                node.refuse(connection, why, twin)
            else:
                node.opened(connection, facts, monotonic(), asked)
            connected = node.connection is not None
            if connected:
                self._connecting.pop(node.index, None)
                self._poll.watch(node.index, node.fileno())
            self._poll.wake()
            return connected

    def _twin(self, node: Node, facts: NodeInfo) -> int | None:
        """Return the index of another voting node that reports to be this same server, or None.

        It is impossible to find out which of the two lies. The first keeps its vote, so that a node
        that lies can silence only one other, and none that was connected before it.
        """
        voting = [None if other.misfit else other.facts for other in self.nodes]
        voting[node.index] = facts
        return self._guard.twin(node.index, voting)


def _same_as(other: Node) -> str:
    return (
        f"it is the same server as {other.name}, and would vote twice; or, if they are two servers,"
        " one of the two lies"
    )
