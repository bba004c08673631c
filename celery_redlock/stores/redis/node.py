"""One Redis master: its connection, what is written to it, whom its answers belong to.

The connection is redis-py's own, for TLS, ACL and all the rest of making one. But we write to all
nodes before we read from any, and never wait for one of them: once it is connected, its socket is
ours. What is written and read on it stands in `commands.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import redis
from redis.exceptions import NoPermissionError, NoScriptError, ReadOnlyError, ResponseError

from ...events import heard_nodes
from ...protocol.commands import FOREIGN, decode, encode
from ...protocol.errors import NodeError
from ...protocol.node_info import NodeInfo
from ...protocol.pipeline import Pipeline
from ...protocol.quorum import look, mark
from ...protocol.restart_guard import ALWAYS, Memory, RestartGuard, Trust
from ...protocol.round import Round, Verb
from ...runtime.complaints import refuses
from ...runtime.polling import WAITS
from .address import Address
from .handshake import introduce
from .reports import Reports
from .resp import SIZE, Replies, reason

__all__ = ["Node"]

MAX_UNSENT_BYTES = 8 * 2**20
"""What a node may leave unread before it is asked nothing new, though it goes on reading: as much
as 30 000 extensions."""
SETTLED_S = 1.0
"""How long a connection must live, if nothing was answered on it, to have been a good one."""


class Node:
    """One node of a lock; all calls but `connect` are made with the driver's lock held.

    Attributes:
        channel: What it has been asked and has not answered.
        failures: Attempts to connect since it last proved to work; sets the backoff.
        facts: What it last said of itself, or None before it has.
        unsent: What is yet to be written to the connection.
        misfit: Why it cannot be a node, as it was last seen; empty if it can.
        twin: The index of the node that it is as well, where that is why; else None.
    """

    def __init__(
        self,
        index: int,
        address: Address,
        prefix: str,
        guard: RestartGuard,
        nonces: Sequence[str],
        *,
        clock: Callable[[], float],
        later: Callable[[Callable[[], object]], object],
    ) -> None:
        self.index = index
        self.name = address.name
        self.channel = Pipeline(index)
        self.connection: Any = None
        self.unsent: bytes | bytearray = b""
        self.facts: NodeInfo | None = None
        self.misfit = ""
        self.twin: int | None = None
        self.failures = 0
        self.reports = Reports(address.name, clock, later)
        self._clock = clock
        self._later = later
        self._guard = guard
        self._trust = Trust(guard, index)
        self._nonces = nonces
        self._address = address
        self._prefix = prefix
        self._plain: set[Verb] = set()  # what it would not understand in the usual words
        self._replies = Replies()
        self._proven = self._flaps = False
        self._opened = 0.0

    # -- Connections

    def connect(self) -> tuple[Any, NodeInfo]:
        """Return a new connection and what is at its end; see `Address.connect`.

        It blocks: call it without the driver's lock.
        """
        return self._address.connect(
            partial(
                introduce,
                index=self.index,
                nonces=self._nonces,
                prefix=self._prefix,
                guarded=self._guard.on,
            )
        )

    def refuse(self, connection: Any, why: str, twin: int | None) -> None:
        """Keep it silent because it is no node, or the `twin` of another, until it is one."""
        connection.disconnect()
        if why != self.misfit:
            self.reports.log(logging.ERROR, f"node {self.name} is not usable: {why}")
        self.misfit, self.twin = why, twin
        self.channel.unreachable(why)
        self.reports.failed("unsuitable")

    def opened(self, connection: Any, facts: NodeInfo, now: float, asked: float) -> None:
        """Take a connection into use; what is owed and what waits is written to it first.

        `asked` is a time before `facts` were asked for.
        """
        self._finish_drop()
        self._trust.connected(facts, asked, now)
        self._welcome(self._trust.memory, now)
        self.facts, self.misfit, self.twin = facts, "", None
        self.connection = connection
        self._replies = Replies()
        # By its digest, a release that the server does not know is answered NOSCRIPT, perhaps when
        # nobody reads any more, and the key would stay until its ttl. The text loads it.
        self._plain.add(Verb.RELEASE)
        self._proven, self._opened = False, now
        if not self._flaps:
            self.reports.works(None, now)
        for round_ in self.channel.connected(now):
            if self.connection is None:
                return
            self._write(round_)

    def unreachable(self, reason: str) -> None:
        """Connecting failed; the node is silent until it succeeds."""
        self.channel.unreachable(reason)
        self.reports.complain(None, reason)
        self.reports.failed("refused" if refuses(reason) else "unreachable")

    def close(self) -> None:
        """Close the connection, if there is one."""
        connection, self.connection, self.unsent = self.connection, None, b""
        if connection is not None:
            connection.disconnect()

    def _broke(self, error: Exception) -> None:
        """A read or a write failed: the node's fault, or a time limit's that interrupted it."""
        if isinstance(error, OSError) and error.errno is None:
            # No system call raises without a number; a handler's `raise TimeoutError` does.
            self._drop("interrupted", blame=False)
            raise error
        self._drop(reason(error))
        self.reports.failed("disconnected")

    def _drop(self, reason: str, *, blame: bool = True) -> None:
        """Give up a connection that is of no use any more; `blame` the node, or ourselves."""
        if self.connection is None:
            return
        self.close()
        self._finish_drop()
        if not blame or self._proven or self._clock() - self._opened > SETTLED_S:
            self.failures = 0
        else:
            # It connects and breaks, over and over: as good as unreachable, until it has answered.
            self._flaps = True
            self.channel.unreachable(reason)
            self.reports.complain(None, reason)

    def _finish_drop(self) -> None:
        # Apart: an exception may come between closing the connection and knowing that it is down.
        if self.channel.up:
            self.channel.dropped()

    # -- Requests

    def ask(self, round_: Round, payload: bytes, now: float, more: bool = False) -> None:
        """Write a round's request, or vote SILENT for it; `more`: along with the next one's."""
        channel, verb = self.channel, round_.verb
        try:
            if self.connection is None:
                self._finish_drop()
            if channel.unanswered and (verb.extends or channel.stalled(now)):
                self.receive()  # unread answers are no silence, and count before newer ones
            if verb.needs_memory and self._trust.to_ask_again(now):
                self._look_again(now)
            if channel.ask(round_, now):
                self.unsent += self._in_its_words(round_, payload) if self._plain else payload
                if not more:
                    self.flush()
            elif channel.up:
                self.reports.late(verb, str(round_.details[self.index]))
        except BaseException:
            # Interrupted between the queue and the socket (a time limit, a KeyboardInterrupt): the
            # next answer might be taken for another round's.
            self._drop("interrupted", blame=False)
            raise

    def _write(self, round_: Round) -> None:
        self.unsent += self._in_its_words(round_, b"") or encode(round_, self._prefix)
        self.flush()

    def _in_its_words(self, round_: Round, payload: bytes) -> bytes:
        verb = round_.verb
        if verb not in self._plain:
            return payload
        if verb is Verb.RELEASE:
            self._plain.discard(verb)
        return encode(round_, self._prefix, plain=True)

    def flush(self) -> None:
        """Write what the socket takes: on a real network less than many extensions have.

        How much can wait is bounded by the channel, which asks no stalled node.
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
                self.unsent = bytearray(self.unsent)  # to which much may be added
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

    # -- Answers

    def receive(self) -> None:
        """Read what has arrived, and hand each answer to its round."""
        if self.connection is None:
            return
        try:
            # No more than one read, however much there is: the poll tells of the rest, TLS hands
            # out no less than a record at a time, and others may go in between.
            data = self.connection._sock.recv(SIZE)
            # Behind it: a thread that is stopped between a look at the clock and the answer would
            # take one that came too late for one that came in time.
            self._take(data, self._clock())
        except WAITS:
            return
        except (redis.RedisError, OSError, NodeError) as error:
            self._broke(error)
        except BaseException:
            self._drop("interrupted", blame=False)
            raise

    def _take(self, data: bytes, now: float) -> None:
        """Hand the replies in `data` to their rounds."""
        if not data:
            raise NodeError("connection closed by the server")
        self._trust.heard = now
        unanswered = self.channel.unanswered
        for reply in self._replies.feed(data, now):
            if self.connection is None:
                return  # it broke when one of the replies was followed up
            if not unanswered:
                raise NodeError("it sent what nobody asked for")
            round_ = unanswered.popleft()
            if isinstance(reply, ResponseError):
                self._refused(round_, reply, now)
                continue
            try:
                answer = decode(round_, reply)
            except NodeError as error:
                round_.silence(self.index, str(error))
                raise
            if round_.verb is Verb.LOOK:
                self._looked(round_.sent, answer, now)
            else:
                self._answer(round_, answer, now)

    def _answer(self, round_: Round, answer: Any, now: float) -> None:
        verb = round_.verb
        if heard_nodes():
            self._tell(round_, now)
        doubt = self._trust.doubt(now) if verb.needs_memory else ""
        round_.answer(self.index, answer, now, doubt)
        self._proven, self._flaps = True, False
        written = verb.wrote(answer)
        reports = self.reports
        reports.answers += 1
        if reports.failing or now >= reports.page:
            reports.did(verb, written, now)
        if round_.amnesiac:
            self.reports.log(
                logging.WARNING,
                f"node {self.name} has forgotten {len(round_.amnesiac)} locks before their time:"
                " was it restarted or flushed, does it evict keys, or was one released by hand"
                " (celery redlock release)?",
            )
            round_.amnesiac.clear()
            self.reports.failed("data_loss")
        if written:
            self._trust.wrote(round_.sent)
            if self.channel.owed:
                for owed in self.channel.due(verb, now):
                    if self.connection is not None:
                        self._write(owed)

    def _refused(self, round_: Round, error: ResponseError, now: float) -> None:
        """Make what is to be made of an error that the node has answered with."""
        text, verb = str(error), round_.verb
        if verb is Verb.LOOK:
            # Where our rights were taken away there is no guard from now on, as without them.
            why, forbidden = reason(error), isinstance(error, NoPermissionError)
            self._trust.not_told(
                f"does not tell if it still is a master: {why}", forbidden=forbidden
            )
            if forbidden:
                self._welcome(Memory(NodeInfo(denied=why)), now)
            return
        self._tell(round_, now)
        if verb is Verb.ACQUIRE and "WRONGTYPE" in text:
            round_.answer(self.index, FOREIGN, now)
            return
        # Neither of these has done anything: asking in other words is the same request. But not of
        # an attempt that has been given up, or it would run behind its own undoing.
        again = verb is Verb.RELEASE and isinstance(error, NoScriptError)
        if verb is Verb.ACQUIRE and "syntax error" in text:  # Redis 6.2
            self._plain.add(verb)
            again = not round_.closed and not round_.claims[0].ended
        if again:
            self._plain.add(verb)
            self.channel.unanswered.append(round_)
            self._write(round_)
            return
        why = reason(error)
        round_.silence(self.index, why)
        self.channel.owe(round_)
        self.reports.complain(verb, why)
        self.reports.failed("refused")
        if isinstance(error, ReadOnlyError):
            # It has become a replica. Should it be promoted again, it is another node, which may
            # have forgotten locks: what it is, is asked on a new connection.
            self._drop(why)

    def _tell(self, round_: Round, now: float) -> None:
        # Once nobody waits for a round its answers are read whenever somebody reads: when they came
        # is not known. Nor is how long a node took that first had to be connected to.
        if heard_nodes() and not round_.closed and round_.waits and round_.sent >= self._opened:
            self.reports.answered(now - round_.sent)

    # -- What it is: rule 4 of the guard

    def _look_again(self, now: float) -> None:
        if self.channel.up and not self.channel.stalled(now):
            self._trust.asked_again(now)
            rounds = [look(self.index, now)]
            if text := self._trust.to_mark(now):
                rounds.append(mark(self.index, now, text))
            self.channel.unanswered += rounds
            self.unsent += b"".join([encode(round_, self._prefix) for round_ in rounds])

    def _looked(self, sent: float, text: str, now: float) -> None:
        if self._trust.still(sent, text, now):
            return
        misfit = self._trust.told(sent, NodeInfo.of(text), now)
        if misfit:
            self.reports.complain(None, misfit)
            self._drop(misfit)  # what it is, is asked on a new connection
        else:
            self._welcome(self._trust.memory, now)

    def _welcome(self, memory: Memory, now: float) -> None:
        self._later(partial(self._guard.welcome, self.name, memory, now))
