"""The connections of one process to the nodes: made in the background, one thread for each attempt.

They share one lock. Whatever touches a socket or a queue happens with it held, and nobody else's
code runs then: what is to be logged, or told to listeners, is kept until it is given up.
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
from .kinds import Address, make_node
from .node import Node

__all__ = ["Connections"]

logger = logging.getLogger("celery_redlock.node")

FIRST_CONNECT_S = 1.5
"""How long the first operation waits for a quorum of connections. No later one waits for any."""
REST_S = 0.02
"""How much of that it waits for the other nodes once it has a quorum."""
FAR_FACTOR = 10
"""How many times as long as for the first connection it waits for the others at least: they may be
further away."""
BACKOFF_S, BACKOFF_MAX_S = 0.05, 1.0
"""Between attempts to connect to a node that cannot be reached: full jitter up to these."""
JITTER = random.SystemRandom()
"""Not the module's own generator: that one is the application's, which may have seeded it."""


class Connections:
    """The nodes as this process reaches them. Not to be used after a fork.

    Args:
        addresses: Where they are.
        prefix: What keys begin with.
        guard: Knows which of them may vote; None for all.
        strict: Refuse to begin where too few nodes are usable; else these are silent. May be
            changed.
        node_timeout: How long the first operation waits for nodes that hang; seconds.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        prefix: str,
        guard: RestartGuard | None = None,
        *,
        strict: bool = True,
        node_timeout: float = FIRST_CONNECT_S,
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
        # `with` on a lock written in C cannot be interrupted between taking it and owing to give it
        # back; on a Condition it can: a time limit there would leave it taken for good.
        self._lock = threading.RLock()
        self._poll = self._shared_poll()
        self._clogged: list[Node] = []
        self._connecting: dict[int, threading.Thread] = {}
        self._closing = threading.Event()
        self._started = self._ready = False

    def connect(
        self, timeout: float = FIRST_CONNECT_S, rest: float = REST_S, hung: float | None = None
    ) -> None:
        """Connect to all nodes, in parallel; return when a quorum is up or hope is gone.

        Args:
            timeout: Seconds to wait at most; 0 only starts connecting.
            rest: Seconds of these to wait for the other nodes once a quorum is up.
            hung: Seconds, once one is up, after which the others are taken to hang; None for no
                less than `timeout`. More, if the first is far away: see `FAR_FACTOR`.

        Raises:
            ConfigurationError: So many cannot be nodes that there is no quorum; of two that say
                that they are one server, neither counts. Not raised again once all went well. A
                minority that cannot be nodes is silent: so neither a failover, which makes a
                replica of one, nor a node that lies stops anybody.
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
            # With a quorum there is no need to wait for the rest, but it is good to have.
            patience = min(timeout, rest) if up >= quorum else timeout
            if not news.wait(start + patience - monotonic()):
                break
        if hurried and up < quorum:
            with self._lock:  # or the first round would wait for them once more
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
        """Close all connections; what is not released is left to its ttl.

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
        """Whether this very thread has the lock: a handler has interrupted it while it asks."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def _settle(self) -> None:
        """Do what had to wait until the lock is given up."""
        while self._later and not self._reentered():
            try:
                call = self._later.popleft()
            except IndexError:
                return  # another thread has done it
            try:
                call()
            except Exception:
                # A log handler's, which raises where it should not: as `logging` itself does it.
                if logging.raiseExceptions:
                    traceback.print_exc()

    def _shared_poll(self) -> SharedPoll:
        """Return what polls the connections."""
        return SharedPoll(self._lock, self._read_nodes)

    def _read_nodes(self, ready: Sequence[int]) -> None:
        """Read from these nodes; `ready` is empty if the poll has timed out."""
        for index in ready:
            self.nodes[index].receive()
        if self.nodes[0].leaves and not ready:
            self.nodes[0].tend(monotonic())
        for node in self._clogged:
            node.flush()
        self._reconnect()

    # -- In the background

    def _reconnect(self) -> None:
        """Make new connections in the background where there are none, unless that is being done.

        The loop is here and not in the callers: CPython 3.12 and 3.13 forget the `with` around an
        `if` that ends a loop's body, and an exception there would keep the lock.
        """
        for node in self.nodes:
            if node.connection is not None:
                continue
            self._poll.forget(node.index)
            running = self._connecting.get(node.index)
            # Alive: a time limit that came before its start left one that never will be.
            if self._closing.is_set() or (running is not None and running.is_alive()):
                continue
            name = f"celery_redlock connect {node.name}"
            thread = threading.Thread(target=self._connect, args=(node,), name=name, daemon=True)
            self._connecting[node.index] = thread
            thread.start()

    def _connect(self, node: Node) -> None:
        connected = False
        while not connected and not self._closing.is_set():
            try:
                connected = self._attempt(node)
            finally:
                self._settle()

    def _attempt(self, node: Node) -> bool:
        """Try to connect, after a pause if that has failed before; return whether to stop."""
        if node.failures:
            # Full jitter: a fleet of workers must not knock in step at a node that is back.
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
                    return True  # nobody is told any more: listeners are of the whole process
                node.unreachable(str(error))
                self._poll.wake()
            return False
        with self._lock:
            # Two threads connect to one node if a time limit came while one was started.
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
        """Find another node that has a vote and says that it is this same server.

        Which of the two lies cannot be told. The first keeps its vote, so that a liar silences no
        more than one other, and none that has been met before it.
        """
        voting = [None if other.misfit else other.facts for other in self.nodes]
        voting[node.index] = facts
        return self._guard.twin(node.index, voting)


def _same_as(other: Node) -> str:
    return (
        f"it is the same server as {other.name}, and would vote twice; or, if they are two servers,"
        " one of the two lies"
    )
