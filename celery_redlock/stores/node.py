"""One node of a lock: its connection, the requests it has not answered, and its identity.

This module has the code that all kinds of store share. The code that writes requests and reads
answers is with each kind: `redis/node.py`, `postgresql/node.py`, `etcd/node.py`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from ..events import has_node_listeners
from ..protocol.claim import Claim
from ..protocol.errors import NodeError
from ..protocol.node_info import NodeInfo
from ..protocol.pipeline import Pipeline
from ..protocol.restart_guard import ALWAYS, Memory, RestartGuard, Trust
from ..protocol.round import Round
from ..protocol.texts import printable
from ..protocol.values import Owner
from ..runtime.complaints import refuses
from ..runtime.polling import WAITS
from .contract import Kind
from .reports import Reports

__all__ = ["SETTLED_S", "Node", "StreamNode"]

MAX_UNSENT_BYTES = 8 * 2**20
"""Maximum bytes that a node leaves unread before it gets no new requests, even if it goes on
reading slowly: about 30 000 extensions."""
LEAVE_S = 0.7
"""Seconds of silence after which an asked member is left for another, if the node has several."""
SETTLED_S = 1.0
"""Minimum lifetime in seconds of a connection without an answer that does not count as a
failure."""


class Node(ABC):
    """One node of a lock; all calls but `connect` are made with the driver's lock held.

    Attributes:
        channel: The requests that it has not answered.
        connection: The connection to it, or None.
        failures: Attempts to connect since it last proved to work; sets the backoff.
        facts: The last information about its server, or None before the first.
        unsent: Bytes that must still be written to the connection.
        misfit: The reason why its server is not usable as a node; empty if it is.
        twin: The index of another node with the same server, if that is the reason; or None.
    """

    broken: ClassVar[tuple[type[Exception], ...]] = (OSError, NodeError)
    """Exceptions of a connection that is of no use any more."""
    kind: Kind
    """The kind of store; a node of a kind of its own class has it there."""

    def __init__(
        self,
        index: int,
        address: Any,
        prefix: str,
        guard: RestartGuard,
        nonces: Sequence[str],
        *,
        clock: Callable[[], float],
        later: Callable[[Callable[[], object]], object],
    ) -> None:
        self.index = index
        self.name = name = address.name
        self._address, self._prefix, self._nonces = address, prefix, nonces
        self.channel = Pipeline(index, ends_on_time=self.kind.can.ends_on_time)
        self.connection: Any = None
        self.unsent: bytes | bytearray = b""
        self.facts: NodeInfo | None = None
        self.misfit = ""
        self.twin: int | None = None
        self.failures = 0
        self.reports = Reports(name, clock, later)
        self._clock = clock
        self._later = later
        self._guard = guard
        self._trust = Trust(guard, index)
        self._proven = self._flaps = False
        self._opened = 0.0

    # -- What each kind of store does in its own way

    @abstractmethod
    def connect(self) -> tuple[Any, NodeInfo]:
        """Return a new connection and the facts about its server.

        It blocks: call it without the driver's lock.

        Raises:
            NodeError: The node cannot be reached, or it refuses us.
        """

    @abstractmethod
    def fileno(self) -> int:
        """Return the descriptor of the connection, to poll."""

    @abstractmethod
    def encode(self, round_: Round) -> Any:
        """Return a round's request in the protocol of this kind of node; all nodes can share it."""

    @abstractmethod
    def flush(self) -> None:
        """Write as much of the pending requests as the connection takes."""

    @abstractmethod
    def _put(self, round_: Round, payload: Any) -> None:
        """Add a round's request to those that the next `flush` writes."""

    @abstractmethod
    def _read(self) -> None:
        """Read what has arrived, and hand each answer to its round."""

    @abstractmethod
    def _begin(self) -> None:
        """Prepare for a new connection."""

    def _look_again(self, now: float) -> None:
        """Ask the server again for its facts, before a request, if they can change meanwhile."""
        return None  # for most kinds they cannot change during a connection

    def _reason(self, error: Exception) -> str:
        """Describe an error in one line without a secret."""
        return str(error)

    # -- Connections

    def refuse(self, connection: Any, why: str, twin: int | None) -> None:
        """Keep the node silent until its server is usable; `twin` has the same server, if any."""
        connection.disconnect()
        if why != self.misfit:
            self.reports.log(
                logging.ERROR, "node_unusable", f"node {self.name} is not usable: {why}"
            )
        self.misfit, self.twin = why, twin
        self.channel.unreachable(why)
        self.reports.failed("unsuitable")

    def opened(self, connection: Any, facts: NodeInfo, now: float, asked: float) -> None:
        """Take a connection into use; write owed releases and waiting rounds to it first.

        `asked` is a time before the request for `facts`.
        """
        self._finish_drop()
        self._trust.connected(facts, asked, now)
        self._welcome(self._trust.memory, now)
        self.facts, self.misfit, self.twin = facts, "", None
        self.connection = connection
        self._begin()
        self._proven, self._opened = False, now
        if not self._flaps:
            self.reports.works(None, now)
        for round_ in self.channel.connected(now):
            if self.connection is None:
                return
            self.write(round_)

    def unreachable(self, reason: str) -> None:
        """Note that connecting has failed; the node is silent until it succeeds."""
        self.channel.unreachable(reason)
        self.reports.complain(None, reason)
        self.reports.failed("refused" if refuses(reason) else "unreachable")

    def close(self) -> None:
        """Close the connection, if there is one."""
        connection, self.connection, self.unsent = self.connection, None, b""
        if connection is not None:
            self._trust.left()
            connection.disconnect()

    def _broke(self, error: Exception) -> None:
        """Drop the connection after a failed read or write; a time limit may have caused it."""
        if isinstance(error, OSError) and error.errno is None:
            # System calls raise with an errno; a handler's `raise TimeoutError` has none.
            self._drop("interrupted", blame=False)
            raise error
        self._drop(self._reason(error))
        self.reports.failed("disconnected")

    def _drop(self, reason: str, *, blame: bool = True) -> None:
        """Close a connection that is of no use any more; `blame` is False if we caused that."""
        if self.connection is None:
            return
        self.close()
        self._finish_drop()
        if not blame or self._proven or self._clock() - self._opened > SETTLED_S:
            self.failures = 0
        else:
            # It connects and breaks again and again: treat it as unreachable until it has answered.
            self._flaps = True
            self.channel.unreachable(reason)
            self.reports.complain(None, reason)

    def _finish_drop(self) -> None:
        # A step of its own, and repeated: an exception may strike after the connection was closed
        # and before the channel is marked as down.
        if self.channel.up:
            self.channel.dropped()

    # -- Requests

    def ask(self, round_: Round, payload: Any, now: float, more: bool = False) -> None:
        """Write a round's request, or vote SILENT for it; `more`: together with the next one."""
        channel, verb = self.channel, round_.verb
        try:
            if self.connection is None:
                self._finish_drop()
            if channel.unanswered and (verb.extends or channel.stalled(now)):
                self.receive()  # a node with unread answers is not silent, and older ones go first
            if verb.needs_memory and self._trust.to_ask_again(now):
                self._look_again(now)
            if channel.ask(round_, now):
                self._put(round_, payload)
                if not more:
                    self.flush()
            elif channel.up:
                self.reports.late(verb, str(round_.details[self.index]))
                if self.unsent and channel.clogged is None:
                    self.flush()  # the request that was to go with one that never came
        except BaseException:
            # A time limit or a KeyboardInterrupt has struck between the queue and the socket: the
            # next answer might be taken for that of another round.
            self._drop("interrupted", blame=False)
            raise

    def write(self, round_: Round) -> None:
        """Write the request of a round that the channel has accepted."""
        self._put(round_, self.encode(round_))
        self.flush()

    # -- Answers

    def receive(self) -> None:
        """Read what has arrived, and hand each answer to its round."""
        if self.connection is None:
            return
        try:
            self._read()
        except WAITS:
            return
        except self.broken as error:
            self._broke(error)
        except BaseException:
            self._drop("interrupted", blame=False)
            raise

    def _answer(self, round_: Round, answer: Any, now: float) -> None:
        verb = round_.verb
        if has_node_listeners():
            self._report_time(round_, now)
        trust, sent = self._trust, round_.sent
        if sent > trust.heard:
            trust.heard = sent
        doubt = trust.doubt(now, round_.claims[0].recall) if verb.needs_memory else ""
        round_.answer(self.index, answer, now, doubt)
        self._proven, self._flaps = True, False
        written = verb.wrote(answer)
        reports = self.reports
        reports.answers += 1
        if reports.failing or now >= reports.page:
            reports.did(verb, written, now)
        if round_.amnesiac:
            self._log_forgotten(round_.amnesiac)
            round_.amnesiac.clear()
            self.reports.failed("data_loss")
        if written:
            trust.wrote(sent)
            if self.channel.owed:
                for owed in self.channel.due(verb, now):
                    if self.connection is not None:
                        self.write(owed)

    def _log_forgotten(self, claims: Sequence[Claim]) -> None:
        first, more = claims[0], len(claims) - 1
        what = printable(f"{first.resource}, held by {Owner.of(first.token)}")
        self.reports.log(
            logging.WARNING,
            "node_forgot_lock",
            f"node {self.name} has forgotten {what}{f', and {more} more' if more else ''}, before"
            f" the ttl was over: {self.kind.forgets}, or was it released by hand"
            " (celery -A APP redlock release)?",
        )

    def _failed(self, round_: Round, why: str) -> None:
        """Count an error as SILENT, and owe the node the release of keys that it may have set."""
        round_.silence(self.index, why)
        if round_.verb.frees:
            self.channel.owe(round_)
        self.reports.complain(round_.verb, why)
        self.reports.failed("refused")

    def _report_time(self, round_: Round, now: float) -> None:
        # Not of a round that nobody waits for: its answers are read whenever something is read, so
        # the time of their arrival is unknown. Nor of a round that waited for a connection.
        if (
            has_node_listeners()
            and not round_.closed
            and round_.waits
            and round_.sent >= self._opened
        ):
            self.reports.answered(now - round_.sent)

    def _welcome(self, memory: Memory, now: float) -> None:
        self._later(partial(self._guard.welcome, self.name, memory, now))


class StreamNode(Node):
    """A node whose connection has a socket that bytes are written to."""

    def fileno(self) -> int:
        """Return the descriptor of the connection's socket."""
        return self.connection._sock.fileno()  # type: ignore[no-any-return]

    def flush(self) -> None:
        """Write as much as the socket takes, which may be less than the size of many extensions.

        The rest is bounded, because the channel accepts no new request for a stalled node.
        """
        if self.connection is None:
            return
        sent = 0
        try:
            sent = self.connection._sock.send(self.unsent)
            if sent == len(self.unsent):
                self.unsent, self.channel.clogged = b"", None
                return
            if isinstance(self.unsent, bytes):
                self.unsent = bytearray(self.unsent)  # cheap to extend
            del self.unsent[:sent]
        except WAITS:
            pass
        except OSError as error:
            self._broke(error)
        except BaseException:
            self._drop("interrupted", blame=False)
            raise
        if self.unsent and (sent or self.channel.clogged is None):
            full = len(self.unsent) >= MAX_UNSENT_BYTES
            self.channel.clogged = ALWAYS if full else self._clock()
