"""Carries rounds to the nodes: one connection per node, one poll loop, any number of threads.

All threads of a process share the connections. Whoever waits for a round and finds nobody polling
polls for all, and hands every answer to its round; the others sleep until that wakes them or it
becomes their turn to poll. A lone thread thus goes straight from write to poll to read, with no
other thread to wake, and a thread stuck waiting for a slow quorum holds up nobody.

The driver owns the clock. Everything that touches a socket or a queue happens with the *turn*
held; only the poll itself happens without.

A signal handler, or a finalizer, that uses the lock may find its own thread in here. Where that
thread has the turn, queue and wire may differ just then, and nothing can be asked: an attempt is
refused, a release is made as soon as the turn is given up. Anywhere else all is in order, and it
works; but if its thread is the one that polls, it must poll by itself. What is to be logged or told
to listeners is kept until the turn is given up as well: nobody else's code runs with it held.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from ...protocol.claim import Claim
from ...protocol.commands import encode
from ...protocol.errors import ConfigurationError, NodeError, RedlockError
from ...protocol.quorum import extend
from ...protocol.restart_guard import NodeInfo, RestartGuard
from ...protocol.round import Round, Steps, Verb
from ...protocol.values import quorum_of
from ...runtime.clock import monotonic
from ...runtime.event import SafeEvent
from ...runtime.polling import Poll
from .address import Address
from .node import Node

__all__ = ["Driver"]

logger = logging.getLogger("celery_redlock.node")

T = TypeVar("T")

FIRST_CONNECT = 1.5
"""Seconds the first operation waits for a quorum of connections. No later one waits for any."""
REST = 0.02
"""Seconds of these that it waits for the other nodes once it has a quorum."""
FAR = 10
"""How many times as long as for the first connection it waits for the others at least: they may be
further away."""
BACKOFF, BACKOFF_MAX = 0.05, 1.0
"""Seconds between attempts to connect to a node that cannot be reached: full jitter up to these."""
JITTER = random.SystemRandom()
"""Not the module's own generator: that one is the application's, which may have seeded it."""
BATCH = 200
"""Leases in one request: keeps a node's other clients from waiting a whole tick."""
STRIDE = 0.01
"""Seconds of polling at a time at most: a handler that interrupts the poll may read the answer that
it is for."""
SLICE = 0.002
"""Seconds of polling at a time for what the poll set lacks: a connection that is being made, room
in a socket's buffer."""


LEAVING = (Verb.RELEASE, Verb.UNDO, Verb.DEQUEUE, Verb.HAND_ON)
"""What can be asked later as well, and its answer be done without."""


class Driver:
    """The nodes as this process reaches them. Not to be used after a fork.

    Args:
        addresses: Where they are.
        prefix: What keys begin with.
        guard: Knows which of them may vote; None for all.
        strict: Refuse to begin where a node cannot be one; else it is silent. May be changed.
        node_timeout: How long the first operation waits for nodes that hang; seconds.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        prefix: str,
        guard: RestartGuard | None = None,
        *,
        strict: bool = True,
        node_timeout: float = FIRST_CONNECT,
    ) -> None:
        self._node_timeout = node_timeout
        self._guard = guard = guard or RestartGuard(False, 0.0, logger.debug)
        self.strict = strict
        self._later: deque[Callable[[], object]] = deque()
        nonces = [f"{prefix}nonce:{secrets.token_hex(16)}" for _ in addresses]
        self.nodes = [
            Node(
                *(index, address, prefix, guard, nonces),
                clock=monotonic,
                later=self._later.append,
            )
            for index, address in enumerate(addresses)
        ]
        self._prefix = prefix
        # `with` on a lock written in C cannot be interrupted between taking it and owing to give it
        # back; on a Condition it can: a time limit that struck there would leave it taken for good.
        self._turn = threading.RLock()
        self._bells: list[SafeEvent] = []
        self._poller: int | None = None
        self._poll = Poll()
        self._connecting: dict[int, threading.Thread] = {}
        self._closing = threading.Event()
        self._started = self._ready = False

    def connect(
        self, timeout: float = FIRST_CONNECT, rest: float = REST, hung: float | None = None
    ) -> None:
        """Connect to all nodes, in parallel; return when a quorum is up or hope is gone.

        Args:
            timeout: Seconds to wait at most; 0 only starts connecting.
            rest: Seconds of these to wait for the other nodes once a quorum is up.
            hung: Seconds, once one is up, after which the others are taken to hang; None for no
                less than `timeout`. More, if the first is far away: see `FAR`.

        Raises:
            ConfigurationError: So many cannot be nodes that there is no quorum; of two that say
                that they are one server, neither counts. Not raised again once all went well. A
                minority that cannot be nodes is silent: so neither a failover, which makes a
                replica of one, nor a node that lies stops anybody.
        """
        with self._turn:
            if not self._started:
                self._started = True
                for node in self.nodes:
                    self._reconnect(node)
        start, hurried = monotonic(), hung is not None
        while True:
            with self._turn:
                up = sum(node.channel.up for node in self.nodes)
                if all(node.channel.up or node.channel.down for node in self.nodes):
                    break
                bell = self._bell()
            # With a quorum there is no need to wait for the rest, but it is good to have.
            if up and hung is not None:
                timeout, hung = min(timeout, max(hung, FAR * (monotonic() - start))), None
            patience = min(timeout, rest) if up >= quorum_of(len(self.nodes)) else timeout
            if not bell.wait(start + patience - monotonic()):
                break
        if hurried and up < quorum_of(len(self.nodes)):
            with self._turn:  # or the first round would wait for them once more
                for node in self.nodes:
                    if not (node.channel.up or node.channel.down):
                        node.channel.unreachable("no connection yet")
        if timeout > 0:
            misfits = [node for node in self.nodes if node.misfit]
            if self.strict and not self._ready:
                unfit = {node.index for node in misfits} | {node.twin for node in misfits} - {None}
                if len(self.nodes) - len(unfit) < quorum_of(len(self.nodes)):
                    self._settle()
                    whys = [f"node {node.name} cannot be one: {node.misfit}" for node in misfits]
                    raise ConfigurationError("; ".join(whys))
            self._ready = True
        self._settle()

    def run(
        self, operation: Callable[[float], Steps[T]], ahead: Callable[[float], Round] | None = None
    ) -> T:
        """Run one operation to its end.

        Args:
            operation: Makes its steps, given the time; seconds.
            ahead: Makes a round, likewise, that is written along with the first, and ahead of it.

        Raises:
            RedlockError: This thread has been interrupted in the midst of a request to the nodes.
        """
        reentered = self._reentered()
        if not self._ready and not reentered:
            self.connect(hung=self._node_timeout)
        try:
            first = () if ahead is None else (ahead(monotonic()),)
            steps = operation(monotonic())
            round_ = next(steps)
            while True:
                if reentered:
                    self._put_off(round_)
                else:
                    self._carry((*first, round_))
                first = ()
                round_ = steps.send(monotonic())
        except StopIteration as stop:
            result = stop.value
        self._settle()
        return result  # type: ignore[no-any-return]

    def run_all(self, operations: Sequence[Callable[[float], Steps[T]]]) -> list[T]:
        """Run single-round operations side by side: one write per node each, one wait for all."""
        if self._reentered():
            raise _refusal()
        if not self._ready:
            self.connect(hung=self._node_timeout)
        now = monotonic()
        started = [operation(now) for operation in operations]
        self._carry([next(steps) for steps in started])
        results = []
        for steps in started:
            try:
                steps.send(monotonic())
            except StopIteration as stop:
                results.append(stop.value)
        self._settle()
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
        if self._reentered():
            self._later.append(self.close)
            return
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
        self._settle()

    def _reentered(self) -> bool:
        """Whether this very thread has the turn: a handler has interrupted it while it asks."""
        return self._turn._is_owned()  # type: ignore[attr-defined, no-any-return]

    def _put_off(self, round_: Round) -> None:
        """Have a round written when the turn is given up, if nobody needs to know its answers."""
        if round_.verb not in LEAVING:
            raise _refusal()
        round_.until = round_.sent
        self._later.append(partial(self._make_up_for, round_))

    def _make_up_for(self, round_: Round) -> None:
        try:
            self._carry((round_,))
        except BaseException:
            self._later.append(partial(self._make_up_for, round_))  # struck; it strikes once
            raise

    def _settle(self) -> None:
        """Do what had to wait until the turn is given up."""
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
                    node.ask(round_, payload, now, round_.verb is Verb.ENQUEUE and not last)
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
                for index in round_.close(f"no answer within {waited:.3f} s"):
                    self.nodes[index].late(round_.verb, f"no answer within {waited:.3f} s")

    def _wait(self, rounds: Sequence[Round], timeout: float) -> None:
        """Let answers come in: poll for everybody, or sleep while another thread does."""
        if self._connecting and any(node.channel.awaited for node in self.nodes):
            timeout = min(timeout, SLICE)
        clogged = [node for node in self.nodes if node.unsent]
        if clogged:
            timeout = min(timeout, SLICE)
        me, mine, bell, poll = threading.get_ident(), False, None, self._poll
        try:
            with self._turn:
                if all([round_.decided for round_ in rounds]):
                    return  # by the thread that has just polled: nothing would wake us
                if self._poller is None:
                    mine, self._poller = True, me
                elif self._poller == me:
                    poll = poll.copy()  # we have interrupted ourselves: nobody polls for us
                else:
                    bell = self._bell()
            if bell is not None:
                bell.wait(timeout)
                return
            ready = poll.wait(min(timeout, STRIDE))
            with self._turn:
                if mine:
                    mine, self._poller = False, None
                for index in ready:
                    node = self.nodes[index]
                    node.receive()
                    self._reconnect(node)
                for node in clogged:
                    node.flush()
                self._ring()
        except BaseException:
            with self._turn:
                if mine:
                    self._poller = None
                self._ring()  # somebody else must poll
            raise

    def _bell(self) -> SafeEvent:
        """Rung when answers or connections have come, or when somebody else must poll."""
        bell = SafeEvent()
        self._bells.append(bell)
        return bell

    def _ring(self) -> None:
        bells, self._bells = self._bells, []
        for bell in bells:
            bell.set()

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
        try:
            self._connect_to(node)
        finally:
            self._settle()

    def _connect_to(self, node: Node) -> None:
        while not self._closing.is_set():
            self._settle()  # what the last attempt had to say
            if node.failures:
                # Full jitter: a fleet of workers must not knock in step at a node that is back.
                ceiling = min(BACKOFF_MAX, BACKOFF * 2.0 ** min(node.failures, 16))
                if self._closing.wait(JITTER.uniform(0, ceiling)):
                    return
            node.failures += 1
            asked = monotonic()
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
                twin = self._twin(node, facts)
                why = facts.misfit if twin is None else _same_as(self.nodes[twin])
                if why:
                    node.refuse(connection, why, twin)
                    self._ring()
                    continue
                node.opened(connection, facts, monotonic(), asked)
                if node.connection is not None:
                    self._connecting.pop(node.index, None)
                    self._poll.watch(node.index, connection._sock.fileno())
                    self._ring()
                    return

    def _twin(self, node: Node, facts: NodeInfo) -> int | None:
        """Another node that has a vote and says that it is this same server.

        Who lies cannot be told. The first keeps its vote, so that a liar silences no more than one
        other, and none that has been met before it.
        """
        voting = [
            facts if other is node else None if other.misfit else other.facts
            for other in self.nodes
        ]
        return self._guard.twin(node.index, voting)


def _same_as(other: Node) -> str:
    return (
        f"it is the same server as {other.name}, and would vote twice; or, if they are two servers,"
        " one of the two lies"
    )


def _refusal() -> RedlockError:
    return RedlockError(
        "the lock was used inside itself: a signal handler or a finalizer has interrupted this"
        " thread while it was writing to the nodes or reading from them, and asks them for"
        " something else. Only a release can be made there. Let the handler set a flag, or put the"
        " work on a queue, and do it outside of the handler; or try again later"
    )
