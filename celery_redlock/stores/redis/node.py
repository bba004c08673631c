"""One Redis master: its connection, the requests to it, and their answers.

The connection is redis-py's own, because it supports TLS, ACL and all else that connecting needs.
But we write to all nodes before we read from any, and never wait for one of them: once connected,
we use its socket directly. `requests.py` has the encoding.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, ClassVar

import redis
from redis.exceptions import NoPermissionError, NoScriptError, ReadOnlyError, ResponseError

from ...protocol.errors import NodeError
from ...protocol.node_info import NodeInfo
from ...protocol.quorum import look, mark
from ...protocol.replies import FOREIGN, decode
from ...protocol.restart_guard import Memory, Trust
from ...protocol.round import Round, Verb
from ...runtime.polling import SIZE
from ..node import StreamNode
from .address import Address, SentinelAddress
from .handshake import introduce
from .kind import KIND
from .master_watch import MasterWatch
from .requests import encode
from .resp import Replies, reason

__all__ = ["RedisNode"]


class RedisNode(StreamNode):
    """One Redis master of a lock."""

    broken: ClassVar[tuple[type[Exception], ...]] = (redis.RedisError, OSError, NodeError)
    kind = KIND
    _reason = staticmethod(reason)

    _address: Address

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._plain: set[Verb] = set()  # verbs for which it rejects the usual request
        self._replies = Replies()
        address = self._address
        self._watch = MasterWatch(address) if isinstance(address, SentinelAddress) else None
        self._trust = Trust(self._guard, self.index, moves=address.moves)

    def connect(self) -> tuple[Any, NodeInfo]:
        """Return a new connection and the facts of its node; see `Node.connect`."""
        return self._address.connect(
            partial(
                introduce,
                index=self.index,
                nonces=self._nonces,
                prefix=self._prefix,
                guarded=self._guard.on,
            ),
            **(self._watch.master() if self._watch is not None else {}),
        )

    def close(self) -> None:
        """Close the connection, if there is one; and those to its Sentinels."""
        super().close()
        if self._watch is not None:
            self._watch.close()

    def encode(self, round_: Round) -> bytes:
        """Return a round's request in RESP."""
        return encode(round_, self._prefix)

    def _begin(self) -> None:
        self._replies = Replies()
        # If a release is sent by its digest and the server does not have the script, it answers
        # NOSCRIPT, perhaps when no thread reads that any more, and the key would stay until its
        # ttl. So the first release on a connection sends the text, which loads the script.
        self._plain.add(Verb.RELEASE)

    # -- Requests

    def ask(self, round_: Round, payload: Any, now: float, more: bool = False) -> None:
        """Write a round's request, or vote SILENT for it; see `Node.ask`."""
        watch = self._watch
        if watch is not None and self.connection is not None and watch.moved(now):
            why = "the Sentinels have named another master"
            line = f"node {self.name} gets a new connection: {why}"
            self.reports.log(logging.INFO, "node_left", line)
            self._drop(why, blame=False)
        super().ask(round_, payload, now, more)

    def _put(self, round_: Round, payload: bytes) -> None:
        self.unsent += self._adapted(round_, payload) if self._plain else payload

    def _adapted(self, round_: Round, payload: bytes) -> bytes:
        verb = round_.verb
        if verb not in self._plain:
            return payload
        if verb is Verb.RELEASE:
            self._plain.discard(verb)
        return encode(round_, self._prefix, plain=True)

    # -- Answers

    def _read(self) -> None:
        # Only one read, however much there is: the poll reports the rest, TLS returns no less than
        # a record at a time, and other nodes may be read in between.
        data = self.connection._sock.recv(SIZE)
        # The clock is read after the data. If it were read before, and the thread was stopped in
        # between, an answer that came too late would count as in time.
        self._take(data, self._clock())

    def _take(self, data: bytes, now: float) -> None:
        """Pass the replies in `data` to their rounds."""
        if not data:
            raise NodeError("connection closed by the server")
        unanswered = self.channel.unanswered
        for reply in self._replies.feed(data, now):
            if self.connection is None:
                return  # it was dropped while one of the replies was handled
            if not unanswered:
                raise NodeError("it sent a reply without a request")
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

    def _refused(self, round_: Round, error: ResponseError, now: float) -> None:
        """Handle an error reply of the node."""
        text, verb = str(error), round_.verb
        if verb is Verb.LOOK:
            # If our right to ask was withdrawn, there is no guard from now on, as without it.
            why, forbidden = reason(error), isinstance(error, NoPermissionError)
            self._trust.unanswered(
                f"did not answer if it still is a master: {why}", forbidden=forbidden
            )
            if forbidden:
                self._welcome(Memory(NodeInfo(denied=why)), now)
            return
        self._report_time(round_, now)
        if verb is Verb.ACQUIRE and "WRONGTYPE" in text:
            round_.answer(self.index, FOREIGN, now)
            return
        # Neither error has changed anything: the other wording is the same request. But an
        # abandoned attempt is not repeated, because it would run after its own undo.
        again = verb is Verb.RELEASE and isinstance(error, NoScriptError)
        if verb is Verb.ACQUIRE and "syntax error" in text:  # Redis 6.2
            self._plain.add(verb)
            again = not round_.closed and not round_.claims[0].ended
        if again:
            self._plain.add(verb)
            self.channel.unanswered.append(round_)
            self.write(round_)
            return
        why = reason(error)
        self._failed(round_, why)
        if isinstance(error, ReadOnlyError):
            # It has become a replica. If it is promoted again, it is another node, which may have
            # forgotten locks: a new connection asks for its role.
            self._drop(why)

    # -- Its role: rule 4 of the guard

    def _look_again(self, now: float) -> None:
        if self.channel.up and not self.channel.stalled(now):
            self._trust.asked_again(now)
            rounds = [look(self.index, now)]
            if text := self._trust.to_mark(now):
                rounds.append(mark(self.index, now, text))
            self.channel.unanswered += rounds
            self.unsent += b"".join([self.encode(round_) for round_ in rounds])

    def _looked(self, sent: float, text: str, now: float) -> None:
        if self._trust.still(sent, text):
            return
        misfit = self._trust.told(sent, NodeInfo.of(text), now)
        if misfit:
            self.reports.complain(None, misfit)
            self._drop(misfit)  # a new connection asks for its role
        else:
            self._welcome(self._trust.memory, now)
