"""An etcd cluster as the one node of a lock: the requests to one of its members, and the answers.

There is one connection to one member, on which requests are written one after another: a release
can never be overtaken by the request that it undoes. A member that is silent, or reports that it
has no leader, is left for the next one.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...protocol.errors import NodeError
from ...protocol.node_info import NodeInfo
from ...protocol.replies import decode
from ...protocol.round import Round
from ...runtime.polling import SIZE
from ..node import LEAVE_S, StreamNode
from .address import NO_ANSWER, TIMEOUT_S, EtcdAddress, reason
from .handshake import cluster_of, introduce
from .kind import KIND
from .questions import TTL_SHIFT, Conversation, conversation, granted_for, lease_id, shared_for
from .wire import MALFORMED, Keys, Replies, Request, answer, refusal, request

__all__ = ["EtcdNode"]

HANDSHAKE_TIMEOUTS = 3
"""Maximum duration of a handshake with one member, in timeouts."""


class _Exchange(NamedTuple):
    """A round under way: the steps still to send, and the answers so far."""

    round: Round
    steps: Conversation
    grants: int  # how many of the answers are to grants of leases, which were sent first
    asked: int
    answers: list[dict[str, Any]]


class EtcdNode(StreamNode):
    """The one node of a lock that is kept in etcd."""

    kind = KIND
    _reason = staticmethod(reason)

    _address: EtcdAddress

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._keys = Keys(self._prefix)
        self._first = secrets.randbelow(len(self._address.members))
        self._cluster = ""
        self._replies = Replies()
        self._exchanges: deque[_Exchange] = deque()
        self._leases: dict[float, tuple[float, str]] = {}
        self._now = self._heard = 0.0
        self._granting: list[Request] = []

    def connect(self) -> tuple[Any, NodeInfo]:
        """Return a new connection and the facts of its node; see `Node.connect`."""
        count = len(self._address.members)
        first, connection = self._first, None
        self._first = (first + 1) % count  # if this one fails
        try:
            connection = self._address.connect(first, life=HANDSHAKE_TIMEOUTS * TIMEOUT_S)
            self._first = (connection.at + 1) % count
            facts = introduce(connection, self._keys)
            connection._sock.setblocking(False)
        except Exception as error:
            if connection is not None:
                connection.disconnect()
            raise NodeError(reason(error), node=self.name) from None
        if not facts.unfit:
            clusters = {self._cluster or facts.run_id, facts.run_id}
            if not self._cluster:  # only once; two processes may have begun with different members
                others = [at for at in range(count) if at != connection.at]
                clusters |= {cluster_of(self._address, at) for at in others} - {""}
            if len(clusters) > 1:
                why = "its members are of several clusters, which do not know each other's locks"
                return connection, NodeInfo(unfit=why)
            self._cluster = facts.run_id
        return connection, facts

    def encode(self, round_: Round) -> None:
        """Return None: the lease id is only known when the request is written."""

    def _begin(self) -> None:
        self._replies = Replies()
        self._exchanges.clear()
        self._leases.clear()

    # -- Requests

    def ask(self, round_: Round, payload: Any, now: float, more: bool = False) -> None:
        """Write a round's request, to another member if this one has not answered for too long."""
        if self.channel.stalled(now, LEAVE_S):
            self.receive()
        super().ask(round_, payload, now, more)

    def receive(self) -> None:
        """Read what has arrived, and leave a member that has not answered for too long.

        Its unanswered requests go to the next member, as long as a caller waits for them.
        """
        super().receive()
        now = self._clock()
        # Do not leave a member that is making progress: the next one would start from scratch.
        silent = self.channel.stalled(now, LEAVE_S) and now > self._heard + LEAVE_S
        if silent and self.connection is not None and len(self._address.members) > 1:
            self._drop("it does not answer", blame=False)

    def _put(self, round_: Round, payload: Any) -> None:
        self._now = self._clock()
        steps = conversation(round_, self._keys, self._lease)
        self._write_step(round_, steps, next(steps))

    def _write_step(self, round_: Round, steps: Conversation, asked: Sequence[Request]) -> None:
        grants, self._granting = self._granting, []
        if self.connection is None:
            return
        self._exchanges.append(_Exchange(round_, steps, len(grants), len(grants) + len(asked), []))
        head = self.connection.head
        self.unsent += b"".join([request(one, head) for one in (*grants, *asked)])

    def _lease(self, ttl: float) -> str:
        """Return a lease that lasts for a ttl from now on, and request its grant if it is new.

        The grant is sent before the request that needs it. All requests written at the same time,
        or shortly afterwards, share the lease.
        """
        shared = shared_for(ttl)
        until, lease = self._leases.get(ttl, (-1.0, ""))
        if self._now > until:
            lease = str(lease_id(ttl, secrets.randbits(TTL_SHIFT)))
            seconds = str(granted_for(ttl + shared))
            self._granting.append(Request("lease/grant", {"ID": lease, "TTL": seconds}))
            self._leases = {one: it for one, it in self._leases.items() if it[0] >= self._now}
            self._leases[ttl] = self._now + shared, lease
        return lease

    # -- Answers

    def _read(self) -> None:
        data = self.connection._sock.recv(SIZE)
        now = self._clock()  # read after the data: see `RedisNode._read`
        if not data:
            raise NodeError("connection closed by the server")
        for status, body in self._replies.feed(data, now):
            if self.connection is None:
                return  # the connection was dropped while an answer was handled
            self._heard = now  # not at each byte: a member whose answer drips is left, too
            if not self._exchanges:
                raise NodeError("it sent a reply without a request")
            exchange = self._exchanges[0]
            exchange.answers.append(answer(status, body))
            if len(exchange.answers) == exchange.asked:
                self._take(exchange, now)

    def _take(self, exchange: _Exchange, now: float) -> None:
        round_ = exchange.round
        why = "".join([refusal(said) for said in exchange.answers][exchange.grants :])
        for said in exchange.answers[: exchange.grants]:
            if refusal(said) or "ID" not in said:
                # The id may be another's lease: no request that was written after the grant counts.
                raise NodeError(f"it grants no lease: {refusal(said)}")
        self._exchanges.popleft()
        self.channel.unanswered.popleft()
        if why:
            exchange.steps.close()
            self._failed(round_, why)
            return
        try:
            self._now = self._clock()
            asked = exchange.steps.send(exchange.answers[exchange.grants :])
            self.channel.unanswered.append(round_)
            self._write_step(round_, exchange.steps, asked)
            self.flush()
            return
        except StopIteration as stop:
            reply = stop.value
        except MALFORMED:
            round_.silence(self.index, NO_ANSWER)
            raise NodeError(NO_ANSWER) from None
        try:
            decoded = decode(round_, reply)
        except NodeError as error:
            round_.silence(self.index, str(error))
            raise
        self._answer(round_, decoded, now)
