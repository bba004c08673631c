"""One Redis master: its connection, what is written to it, whom its answers belong to.

The connection is redis-py's own, for TLS, ACL and all the rest of making one. But we write to all
nodes before we read from any, and never wait for one of them: once it is connected, its socket is
ours. What is written and read on it stands in `commands.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import redis
from redis.exceptions import NoPermissionError, NoScriptError, ReadOnlyError, ResponseError

from ...events import emit_node, heard_nodes
from ...protocol.commands import FOREIGN, decode, encode
from ...protocol.errors import NodeError
from ...protocol.pipeline import FREEING, Pipeline
from ...protocol.quorum import look
from ...protocol.restart_guard import ALWAYS, LOOK_AFTER, Memory, NodeInfo, RestartGuard
from ...protocol.round import EXTENDING, LINING, VOTING, Round, Verb, wrote
from ...runtime.complaints import Complaints, refuses
from ...runtime.polling import WAITS
from .address import Address
from .handshake import introduce
from .resp import SIZE, Replies, reason

__all__ = ["Node"]

logger = logging.getLogger("celery_redlock.node")

UNSENT = 8 * 2**20
"""Bytes that a node may leave unread before it is asked nothing new, though it goes on reading: as
much as 30 000 extensions."""
SETTLED = 1.0
"""Seconds a connection must live, if nothing was answered on it, to have been a good one."""


class Node:
    """One node of a lock; all calls are made with the driver's turn held.

    It calls nobody else's code with the turn held: what is to be logged, or told to listeners, is
    given to `later`. A slow log handler would keep all threads waiting, and one that uses a lock
    would find this one in the midst of a request.

    Attributes:
        name: Its address, without credentials.
        channel: What it has been asked and has not answered.
        connection: The connection, or None while there is none.
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
        self._clock = clock
        self._later = later
        self._guard = guard
        self._memory = Memory(NodeInfo())
        self._heard = ALWAYS  # when it last answered
        self._proved = math.inf  # when it was last asked for what only a master does
        self._looked_at = ALWAYS
        self._unsure = ""  # why it could not be looked at again
        self._nonces = nonces
        self._address = address
        self._prefix = prefix
        self._old_server = False
        self.failures = 0
        self._replies: Replies | None = None
        self._proven = self._flaps = self._loaded = False
        self._opened = self._seen = 0.0
        self._complaints = Complaints(self.name, self._log)

    def connect(self) -> tuple[Any, NodeInfo]:
        """A new connection, ready and non-blocking, and who is at its end.

        Blocks: call it without the turn.

        Raises:
            NodeError: It cannot be reached, or it refuses us.
        """
        connection = self._address.connection()
        try:
            connection.connect()
            facts = introduce(
                connection, guarded=self._guard.on, index=self.index, nonces=self._nonces
            )
            if connection.can_read():
                raise NodeError("it sent what nobody asked for")
            connection._sock.setblocking(False)
        except Exception as error:  # a credential provider's, too
            connection.disconnect()
            raise NodeError(reason(error), node=self.name) from None
        return connection, facts

    def refuse(self, connection: Any, why: str, twin: int | None) -> None:
        """It is no node, or the `twin` of another; it is silent until it turns out to be one."""
        connection.disconnect()
        if why != self.misfit:
            self._log(logging.ERROR, f"node {self.name} cannot be one: {why}")
        self.misfit, self.twin = why, twin
        self.channel.unreachable(why)
        self._failed("unsuitable")

    def opened(self, connection: Any, facts: NodeInfo, now: float, asked: float) -> None:
        """Take a connection into use; what is owed and what waits is written to it first.

        Args:
            connection: See `connect`.
            facts: Who is at its end.
            now: The time; seconds.
            asked: A time before `facts` were asked for.
        """
        self._finish_drop()
        guard = self._guard
        if self.facts is not None:
            guard.heard(self.index, self._memory, self._heard)
        self._memory = memory = guard.meet(self.index, facts, asked, now)
        self._later(partial(guard.welcome, self.name, memory, now))
        self._heard, self._looked_at, self._unsure = now, ALWAYS, ""
        self._proved = asked if guard.on and facts.uptime is not None else math.inf
        self.facts, self.misfit, self.twin = facts, "", None
        self.connection = connection
        self._replies = Replies()
        self._proven = self._loaded = False
        self._opened = self._seen = now
        if not self._flaps:
            self._complaints.works(None, now)
        for round_ in self.channel.connected(now):
            if self.connection is None:
                return
            self._write(self._in_words_for_it(round_) or encode(round_, self._prefix))

    def unreachable(self, reason: str) -> None:
        """Connecting failed; the node is silent until it succeeds."""
        self.channel.unreachable(reason)
        self.complain(None, reason)
        self._failed("refused" if refuses(reason) else "unreachable")

    def ask(self, round_: Round, payload: bytes, now: float, more: bool = False) -> None:
        """Write a round's request, or vote SILENT for it; `more`: along with the next one's."""
        channel = self.channel
        self._seen = now
        try:
            if self.connection is None:
                self._finish_drop()
            if channel.unanswered and (round_.verb in EXTENDING or channel.stalled(now)):
                self.receive()  # unread answers are no silence, and count before newer ones
            if now > self._proved + LOOK_AFTER and round_.verb in VOTING:
                self._look_again(now)
            if channel.ask(round_, now):
                self.unsent += self._in_words_for_it(round_) or payload
                if not more:
                    self.flush()
            elif channel.up:
                self.late(round_.verb, str(round_.details[self.index]))
        except BaseException:
            # Struck between the queue and the socket (a time limit, a KeyboardInterrupt): the next
            # answer might be taken for another round's.
            self._drop("interrupted", blame=False)
            raise

    def _look_again(self, now: float) -> None:
        """Ask, ahead of a request, whether it still is what it was (rule 4 of the guard)."""
        under_way = now <= self._looked_at + LOOK_AFTER
        if self.channel.up and not under_way and not self.channel.stalled(now):
            self._looked_at = now
            round_ = look(self.index, now)
            self.channel.unanswered.append(round_)
            self.unsent += encode(round_, self._prefix)

    def _looked(self, round_: Round, info: str, now: float) -> None:
        """What it said to that. Answers come in order: its vote has not been read yet."""
        said = NodeInfo.of(info)
        facts = replace(
            self._memory.facts,
            role=said.role,
            master=said.master,
            history=said.history,
            replication=said.replication,
        )
        self._proved, self._unsure = max(self._proved, round_.sent), ""
        if facts.misfit:
            self.complain(None, facts.misfit)
            self._drop(facts.misfit)  # who it is, is asked on a new connection
            return
        self._memory = self._guard.meet(self.index, facts, now, now)
        self._later(partial(self._guard.welcome, self.name, self._memory, now))

    def _in_words_for_it(self, round_: Round) -> bytes | None:
        """The request as text, where this server would not know it by its usual words."""
        release = round_.verb is Verb.RELEASE and round_.claims[0].mark is None
        if (release and not self._loaded) or (self._old_server and round_.verb is Verb.ACQUIRE):
            # The text loads the script. To the digest it might answer NOSCRIPT, which may come when
            # nobody is left to hear it: and the key would stay until its ttl.
            self._loaded = self._loaded or release
            return encode(round_, self._prefix, plain=True)
        return None

    def receive(self) -> None:
        """Read what has arrived, and hand each answer to its round."""
        try:
            if self.connection is None:
                return
            # No more than one read, however much there is: the poll tells of the rest, TLS hands
            # out no less than a record at a time, and others have their turn in between.
            data = self.connection._sock.recv(SIZE)
            # Behind it: whoever is stopped between a look at the clock and the answer would take
            # one that came too late for one that came in time.
            now = self._seen = self._clock()
            if not data:
                raise NodeError("connection closed by the server")
            self._take(data, now)
        except WAITS:
            return
        except (redis.RedisError, OSError, NodeError) as error:
            self._broke(error)
        except BaseException:
            self._drop("interrupted", blame=False)
            raise

    def late(self, verb: Verb, reason: str) -> None:
        """It has not answered in time."""
        self._complaints.fails(verb, reason, self._clock(), late=True)
        self._failed("timeout")

    def complain(self, verb: Verb | None, reason: str) -> None:
        """Log that the node fails, once until it works again or fails in another way."""
        self._complaints.fails(verb, reason, self._clock())

    def close(self) -> None:
        """Close the connection, if there is one."""
        connection, self.connection, self.unsent = self.connection, None, b""
        if connection is not None:
            connection.disconnect()

    def _take(self, data: bytes, now: float) -> None:
        """Hand the replies in `data` to their rounds."""
        assert self._replies is not None
        self._heard = now
        unanswered = self.channel.unanswered
        # A shortcut for the replies that nearly all are: parsing them costs as much as the rest.
        lining = unanswered and unanswered[0].verb in LINING and not self._replies.partial
        if lining and data.startswith((b":1\r\n", b":0\r\n")):
            self._answer(unanswered.popleft(), data.startswith(b":1"), now)
            data = data[4:]
            if not data:
                return
        if len(unanswered) == 1 and not self._replies.partial:
            verb = unanswered[0].verb
            if verb is Verb.ACQUIRE:
                if data == b"$-1\r\n":
                    self._answer(unanswered.popleft(), None, now)
                    return
            elif verb in FREEING and (data == b":1\r\n" or data == b":0\r\n"):
                self._answer(unanswered.popleft(), data == b":1\r\n", now)
                return
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
                self._looked(round_, answer, now)
            else:
                self._answer(round_, answer, now)

    def _answer(self, round_: Round, answer: Any, now: float) -> None:
        doubt = self._unsure
        if now < self._memory.began + self._guard.span:
            doubt = self._guard.doubt(self._memory, now) or doubt
        if heard_nodes():
            self._answered(round_, now)
        round_.answer(self.index, answer, now, doubt)
        self._proven, self._flaps = True, False
        written = wrote(round_.verb, answer)
        if written and round_.sent > self._proved and not self._unsure:
            self._proved = round_.sent
        complaints = self._complaints
        complaints.answers += 1
        if complaints:
            if written or round_.verb is Verb.PEEK:
                complaints.works(round_.verb, now)
            complaints.works(None, now)
        elif now >= complaints.page:
            complaints.look(now)
        if round_.amnesiac:
            self._log(
                logging.WARNING,
                f"node {self.name} has forgotten {len(round_.amnesiac)} locks before their time:"
                " was it restarted or flushed, does it evict keys, or was one released by hand"
                " (celery redlock release)?",
            )
            round_.amnesiac.clear()
            self._failed("data_loss")
        for owed in self.channel.due(round_.verb, now) if written else ():
            if self.connection is not None:
                self._write(encode(owed, self._prefix, plain=self._old_server))

    def _refused(self, round_: Round, error: ResponseError, now: float) -> None:
        """The node answered with an error."""
        text = str(error)
        if round_.verb is Verb.LOOK:
            # Whose rights were taken away has no guard from now on, as if it had never had them.
            if isinstance(error, NoPermissionError):
                self._proved, denied = math.inf, NodeInfo(denied=reason(error))
                self._later(partial(self._guard.welcome, self.name, Memory(denied), now))
            else:
                self._unsure = f"does not tell if it still is a master: {reason(error)}"
                self._looked_at = ALWAYS  # the next request asks again
            return
        self._answered(round_, now)
        if "WRONGTYPE" in text and round_.verb is Verb.ACQUIRE:
            round_.answer(self.index, FOREIGN, now)
            return
        # Neither of these has done anything: asking in other words is the same request. But not of
        # an attempt that has been given up, or it would run behind its own undoing.
        again = round_.verb is Verb.RELEASE and isinstance(error, NoScriptError)
        if round_.verb is Verb.ACQUIRE and "syntax error" in text:
            self._old_server = True  # Redis 6.2
            again = not round_.closed and not round_.claims[0].ended
        if again:
            self.channel.unanswered.append(round_)
            self._write(encode(round_, self._prefix, plain=True))
            return
        why = reason(error)
        round_.silence(self.index, why)
        self.channel.refused(round_)
        self.complain(round_.verb, why)
        self._failed("refused")
        if isinstance(error, ReadOnlyError):
            # It has become a replica. Should it be promoted again, it is another node, which may
            # have forgotten locks: who it is, is asked on a new connection.
            self._drop(why)

    def _write(self, payload: bytes) -> None:
        # The socket takes at once what its buffer has room for: on a real network less than many
        # extensions have. How much can wait is bounded by the channel, which asks no stalled node.
        self.unsent += payload
        self.flush()

    def flush(self) -> None:
        """Write what the socket has not taken yet."""
        if self.connection is None:
            return
        sent = 0
        try:
            sent = self.connection._sock.send(self.unsent)
            if sent == len(self.unsent):
                self.unsent, self.channel.clogged = b"", None
            elif isinstance(self.unsent, bytearray):
                del self.unsent[:sent]
            else:
                self.unsent = bytearray(self.unsent[sent:])  # to which much may be added
        except WAITS:
            pass
        except OSError as error:
            self._broke(error)
        except BaseException:
            self._drop("interrupted", blame=False)
            raise
        if self.unsent and (sent or self.channel.clogged is None):
            self.channel.clogged = self._clock() if len(self.unsent) < UNSENT else ALWAYS

    def _broke(self, error: Exception) -> None:
        """A read or a write failed: the node's fault, or a time limit's that struck in it."""
        if isinstance(error, OSError) and error.errno is None:
            # No system call raises without a number; a handler's `raise TimeoutError` does.
            self._drop("interrupted", blame=False)
            raise error
        self._drop(reason(error))
        self._failed("disconnected")

    def _answered(self, round_: Round, now: float) -> None:
        # Once nobody waits for a round its answers are read whenever somebody reads: when they came
        # is not known. Nor is how long a node took that first had to be connected to.
        if not round_.closed and round_.waits and round_.sent >= self._opened:
            self._later(partial(emit_node, "node_answered", self.name, now - round_.sent))

    def _failed(self, kind: str) -> None:
        if heard_nodes():
            self._later(partial(emit_node, "node_failed", self.name, kind))

    def _drop(self, reason: str, *, blame: bool = True) -> None:
        """The connection is of no use any more; `blame` the node, or ourselves."""
        if self.connection is None:
            return
        self.close()
        self._finish_drop()
        if not blame or self._proven or self._seen - self._opened > SETTLED:
            self.failures = 0
        else:
            # It connects and breaks, over and over: as good as unreachable, until it has answered.
            self._flaps = True
            self.channel.unreachable(reason)
            self.complain(None, reason)

    def _finish_drop(self) -> None:
        # By itself: a strike may come between closing the connection and knowing that it is down.
        if self.channel.up:
            self.channel.dropped()

    def _log(self, level: int, line: str) -> None:
        self._later(partial(logger.log, level, "%s", line))
