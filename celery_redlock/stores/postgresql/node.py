"""A PostgreSQL database as the one node of a lock: the requests to it, and their answers.

psycopg makes the connection. After that we use libpq's pipeline without blocking: as on a Redis
node, requests are written one after another and executed in this order, each in a transaction of
its own. So a release can never be overtaken by the request that it undoes.
"""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar

import psycopg
from psycopg import pq

from ...protocol.errors import NodeError
from ...protocol.node_info import NodeInfo
from ...protocol.replies import decode
from ...protocol.restart_guard import ALWAYS
from ...protocol.round import Round
from ...protocol.texts import printable
from ..node import Node
from .address import PostgresAddress, reason
from .handshake import BareConnection, introduce
from .kind import KIND
from .statements import SWEEP, Values, encode, reply_to

__all__ = ["PostgresNode"]

MAX_UNSENT = 10_000
"""Unwritten requests from which on it is asked nothing new, though it goes on reading. A count,
because libpq buffers requests and does not report their bytes."""
SWEEP_EVERY_S = 60.0
"""Seconds between two sweeps of ended rows, for each active process; only one sweep is done."""


class PostgresNode(Node):
    """The one node of a lock that is kept in PostgreSQL."""

    broken: ClassVar[tuple[type[Exception], ...]] = (psycopg.Error, OSError, NodeError)
    kind = KIND
    _reason = staticmethod(reason)

    _address: PostgresAddress

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._swept = self._clock()
        self._sweeps: deque[bool] = deque()  # per unanswered request: True for a sweep, not a round

    def connect(self) -> tuple[Any, NodeInfo]:
        """Return a new connection and the facts of its node; see `Node.connect`."""
        connection = self._address.connect()
        try:
            facts = introduce(connection)
            connection.pgconn.nonblocking = 1
            connection.pgconn.enter_pipeline_mode()
            return BareConnection(connection), facts
        except Exception as error:
            connection.close()
            raise NodeError(reason(error), node=self.name) from None

    def fileno(self) -> int:
        """Return the descriptor of the connection's socket."""
        return int(self.connection.fd)

    def encode(self, round_: Round) -> tuple[bytes, Values]:
        """Return a round's statement and its parameters."""
        return encode(round_, self._prefix)

    def _begin(self) -> None:
        self._sweeps.clear()

    # -- Requests

    def _put(self, round_: Round, payload: tuple[bytes, Values]) -> None:
        now = self._clock()
        if now > self._swept + SWEEP_EVERY_S:
            self._swept = now
            self._send(True, SWEEP, ())
        self._send(False, *payload)

    def _send(self, sweeps: bool, statement: bytes, values: Values) -> None:
        if self.connection is None:
            return  # the connection was lost in the sweep
        pgconn = self.connection.pgconn
        try:
            pgconn.send_query_params(statement, values)
            pgconn.pipeline_sync()
        except psycopg.Error as error:  # libpq may write here, and find that the connection is down
            self._broke(error)
            return
        self._sweeps.append(sweeps)
        self.unsent = b"unsent"

    def flush(self) -> None:
        """Write as much as the connection accepts; libpq keeps the rest."""
        if self.connection is None:
            return
        try:
            if self.connection.pgconn.flush() == 0:
                self.unsent, self.channel.clogged = b"", None
                return
        except psycopg.Error as error:
            self._broke(error)
            return
        except BaseException:
            self._drop("interrupted", blame=False)
            raise
        if self.channel.clogged is None:
            full = len(self.channel.unanswered) >= MAX_UNSENT
            self.channel.clogged = ALWAYS if full else self._clock()

    # -- Answers

    def _read(self) -> None:
        pgconn = self.connection.pgconn
        pgconn.consume_input()
        # Read after the input, so that no answer can be later than this time.
        now = self._clock()
        result: Any = pgconn  # none yet
        while self._sweeps and not pgconn.is_busy():
            before, result = result, pgconn.get_result()
            if result is None and before is None:
                raise NodeError("its response is incomplete")  # or this loop would never end
            if result is None or result.status == pq.ExecStatus.PIPELINE_SYNC:
                continue  # between two requests
            if result.status != pq.ExecStatus.TUPLES_OK and _ends(pgconn, result):
                raise NodeError(_error(result))  # this answers no request: send them again
            if self._sweeps.popleft():
                continue
            round_ = self.channel.unanswered.popleft()
            if result.status != pq.ExecStatus.TUPLES_OK:
                self._failed(round_, _error(result))
                continue
            self._take(round_, result, now)
            if self.connection is None:
                return  # the connection was dropped while the answer was handled
        if self.unsent:
            self.flush()

    def _take(self, round_: Round, result: Any, now: float) -> None:
        try:
            rows = [
                [result.get_value(row, column) for column in range(result.nfields)]
                for row in range(result.ntuples)
            ]
            answer = decode(round_, reply_to(round_, rows))
        except (NodeError, ValueError, TypeError, LookupError) as error:
            round_.silence(self.index, str(error))
            raise NodeError(str(error)) from None
        self._answer(round_, answer, now)


def _ends(pgconn: Any, result: Any) -> bool:
    """Return True if the connection has ended, rather than one request failed."""
    severity = result.error_field(pq.DiagnosticField.SEVERITY_NONLOCALIZED)
    return severity in (b"FATAL", b"PANIC") or pgconn.status != pq.ConnStatus.OK


def _error(result: Any) -> str:
    said = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message
    return printable(" ".join(said.decode("utf-8", "replace").split())[:200])
