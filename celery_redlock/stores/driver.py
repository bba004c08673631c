"""Carry rounds to the nodes: one connection per node, one poll, any number of threads.

All threads of a process share the connections. If a thread waits for a round and no other thread is
polling, it polls for all, and hands every answer to its round. The other threads sleep until it
wakes them or they must poll themselves. A lone thread thus goes straight from write to poll to
read, with no other thread to wake, and a thread that waits for a slow quorum blocks no other.

The driver owns the clock. Everything that touches a socket or a queue happens with its lock held;
only the poll itself happens without.

A signal handler or a finalizer that uses a lock may interrupt its own thread in here. If that
thread holds the driver's lock at this moment, the queues and the sockets may be out of step, so
that no request is possible: an attempt is refused, and a release is made as soon as the driver's
lock is released. At any other moment the handler's request works; but if its thread is the one that
polls, the handler must poll by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ..protocol.claim import Claim
from ..protocol.errors import RedlockError
from ..protocol.quorum import extend
from ..protocol.round import Round, Steps, Verb
from ..protocol.values import quorum_of
from ..runtime.blocking import blocking
from ..runtime.clock import monotonic
from .connections import UNWATCHED_POLL_S, Connections
from .node import LEAVE_S

__all__ = ["BATCH", "Driver"]

T = TypeVar("T")

BATCH = 200
"""Maximum leases in one request, so that a node's other clients do not wait for long."""
POLL_S = 0.01
"""Longest single poll, in seconds: a handler that interrupts the poll may read the answer that the
poll waits for."""
CALL_S = 0.25
"""Seconds that we may need to notify a waiter, if the node does not do it by itself."""


class Driver(Connections):
    """The carrier of rounds to the nodes; for its arguments see `Connections`."""

    _unread: tuple[_Unread, ...] = ()

    def run(
        self, operation: Callable[[float], Steps[T]], ahead: Callable[[float], Round] | None = None
    ) -> T:
        """Run one operation to its end, in a thread; see `ask`."""
        return blocking(self.ask(operation, ahead))

    async def ask(
        self, operation: Callable[[float], Steps[T]], ahead: Callable[[float], Round] | None = None
    ) -> T:
        """Run one operation to its end.

        Args:
            operation: Called with the time; returns the steps of the operation.
            ahead: Called with the time; returns a round that is written right before the first
                step, in the same request.

        Raises:
            RedlockError: This thread has been interrupted in the middle of a request to the nodes.
        """
        reentered = self._reentered()
        try:
            steps = operation(monotonic())
            round_ = next(steps)
            # A coroutine that was cancelled waits for nothing more, not even to undo.
            can_wait = self._poll.reads_on and round_.verb.can_wait
            if not (self._ready or reentered or can_wait):
                await self._poll.aside(partial(self.connect, hung=self._node_timeout))
                steps = operation(monotonic())
                round_ = next(steps)
            rounds = [round_] if ahead is None else [ahead(monotonic()), round_]
            while True:
                if reentered:
                    self._put_off(rounds[-1])
                else:
                    await self._carry(rounds)
                rounds = [steps.send(monotonic())]
        except StopIteration as stop:
            result = stop.value
        self._settle()
        return result  # type: ignore[no-any-return]

    def start(self, operation: Callable[[float], Steps[T]], done: Callable[[T], object]) -> None:
        """Write the only round of an operation; call `done` with its result when it is known.

        Its answers are read together with those of the next rounds, or by `read`.
        """
        wakes_waiters = self.nodes[0].kind.can.wakes_waiters or self._poll.reads_on
        if self._reentered() or not wakes_waiters:
            done(self.run(operation))
            return
        steps = operation(monotonic())
        round_ = next(steps)
        with self._lock:
            self._write((round_,))
            self._unread += (_Unread(round_, steps, done),)
        self._look()

    def read(self, wait: float = 0.0) -> bool:
        """Read answers of started operations, for `wait` seconds; return True if all are there."""
        blocking(self._wait([unread.round for unread in self._unread], wait))
        return self.retry_releases() and not self._unread

    def retry_releases(self) -> bool:
        """Repeat releases that too few nodes have confirmed; return True if there are none.

        The same with places in wait queues that a node has not confirmed to be left. If no other
        request is made, nothing else would notice that a node has closed its connection.
        """
        with self._lock:
            now, channels = monotonic(), [(node, node.channel) for node in self.nodes]
            owing = [node for node, of in channels if of.unconfirmed(now) or of.leaving(now)]
            for node in owing:
                node.receive()
            if owing:
                self._reconnect()
        self._settle()
        return not owing

    def is_leaving(self) -> bool:
        """Return True if a node has not confirmed yet that a place in a wait queue was left."""
        with self._lock:
            return any(node.channel.leaving(monotonic()) for node in self.nodes)

    def unconfirmed(self) -> list[Claim]:
        """Return released claims that so few nodes have confirmed that others find them taken."""
        with self._lock:
            owed = [claim for node in self.nodes for claim in node.channel.unconfirmed(monotonic())]
        claims = {claim.token: claim for claim in owed}
        nodes = Counter(claim.token for claim in owed)
        enough = len(self.nodes) - quorum_of(len(self.nodes))
        return [claim for token, claim in claims.items() if nodes[token] > enough]

    def run_all(self, operations: Sequence[Callable[[float], Steps[T]]]) -> list[T]:
        """Run single-round operations together: a write to each node for each, one wait for all."""
        if self._reentered():
            raise _refusal()
        if not self._ready:
            self.connect(hung=self._node_timeout)
        now = monotonic()
        started = [operation(now) for operation in operations]
        blocking(self._carry([next(steps) for steps in started]))
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
        """Extend claims, `BATCH` in a request, and wait `patience` seconds; return the rounds."""
        batches = [claims[i : i + BATCH] for i in range(0, len(claims), BATCH)]
        return self.run_all(
            [partial(extend, batch, patience=patience, verb=verb) for batch in batches]
        )

    def _put_off(self, round_: Round) -> None:
        """Write a round later, when the lock is released, if nobody needs its answers."""
        if not round_.verb.can_wait:
            raise _refusal()
        round_.until = round_.sent
        self._later.append(partial(self._make_up_for, round_))

    def _make_up_for(self, round_: Round) -> None:
        try:
            blocking(self._carry((round_,)))
        except BaseException:
            self._later.append(partial(self._make_up_for, round_))  # a time limit strikes once
            raise

    async def _carry(self, rounds: Sequence[Round]) -> None:
        """Write rounds to their nodes, and hand them answers until each is decided or overdue."""
        if not (self.nodes[0].kind.can.wakes_waiters or self._poll.reads_on):
            for round_ in rounds:
                if round_.verb.notifies:
                    round_.until = max(round_.until, round_.sent + CALL_S)
        with self._lock:
            self._write(rounds)
        await self._wait(rounds, max([round_.until for round_ in rounds]) - monotonic())
        with self._lock:  # skipped after an interruption or a cancellation: no node was late then
            for round_ in rounds:
                self._close(round_)

    def _write(self, rounds: Sequence[Round]) -> None:
        now = monotonic()
        for round_ in rounds:
            more = round_.verb is Verb.ENQUEUE and round_ is not rounds[-1]
            round_.begin()
            payload = self.nodes[0].encode(round_)
            for index in round_.targets:
                self.nodes[index].ask(round_, payload, now, more)
        self._reconnect()

    async def _wait(self, rounds: Sequence[Round], seconds: float) -> None:
        """Hand answers to rounds until each of these is decided, or the time is over."""
        if seconds > LEAVE_S:
            self._poll.read_in(LEAVE_S / 4)
        await self._poll.until(
            lambda: all([round_.decided for round_ in rounds]), seconds, self._most
        )
        if self._unread:
            with self._lock:
                self._conclude()

    def _most(self) -> float:
        """Return the longest single poll of a thread, in seconds."""
        self._flush_soon()
        is_connecting = self._connecting and any([node.channel.waiting for node in self.nodes])
        return UNWATCHED_POLL_S if self._clogged or is_connecting else POLL_S

    def _look(self) -> None:
        if self._unread:
            with self._lock:
                self._conclude()
        super()._look()

    def _conclude(self) -> None:
        """Call `done` for started operations that are decided or overdue, once the lock is free."""
        for unread in self._unread:
            is_overdue = monotonic() >= unread.round.until
            if is_overdue and not unread.round.decided:
                for node in self.nodes:
                    node.receive()  # an unread answer is no silence
            if is_overdue or unread.round.decided:
                self._close(unread.round)
                self._unread = tuple([one for one in self._unread if one is not unread])
                self._later.append(unread.conclude)

    def _close(self, round_: Round) -> None:
        for index in round_.close():
            self.nodes[index].reports.late(round_.verb, round_.details[index])


class _Unread(NamedTuple):
    """A started operation whose answers nobody waits for."""

    round: Round
    steps: Steps[Any]
    done: Callable[[Any], object]

    def conclude(self) -> None:
        try:
            self.steps.send(monotonic())
        except StopIteration as stop:
            self.done(stop.value)


def _refusal() -> RedlockError:
    return RedlockError(
        "the lock was used inside itself: a signal handler or a finalizer has interrupted this"
        " thread while it was writing to the nodes or reading from them, and asks them for"
        " something else. Only a release can be made there. Let the handler set a flag, or put the"
        " work on a queue, and do it outside of the handler; or try again later"
    )
