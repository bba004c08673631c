"""One session of kazoo: how it is made, how it is asked, and how it ends."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    ConnectionLoss,
    NoAuthError,
    NoNodeError,
    OperationTimeoutError,
    RolledBackError,
    RuntimeInconsistency,
    SessionExpiredError,
    SessionMovedError,
    UnimplementedError,
)
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.states import KazooState
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL

from ...protocol.errors import ConfigurationError, NodeError
from ...protocol.texts import event
from ...runtime.clock import monotonic
from ..contract import Store
from ..tls import context_of
from .address import QUIET, SESSION_FACTOR, ZooKeeperAddress

__all__ = ["ACQUIRED", "CALLS", "FREED", "LINES", "LOCKS", "Session", "failed_in", "place_in"]

logger = logging.getLogger("celery_redlock.node")
quiet = logging.Logger("kazoo", logging.CRITICAL)  # each loss of a connection has a line of ours

LOCKS, ACQUIRED, FREED, LINES, CALLS = "/locks", "/acquired", "/freed", "/line", "/calls"
LEAVE_S = 1.0
"""Seconds without an answer after which a server is left for another; kazoo waits for a third of
the session."""
CONNECT_S = 5.0
"""Seconds to connect to the first server that answers."""
RETRY_S = 0.05
"""Seconds until a request is repeated whose connection was lost."""
REFRESH_S = 0.01
"""Seconds between two looks for a new connection, and before kazoo first tries again."""
SOON = (ConnectionLoss, OperationTimeoutError, SessionMovedError)


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """Threads of kazoo that leave a host that does not accept connections soon.

    Args:
        context: The TLS context; None without TLS. That of kazoo trusts more, and hides its errors.

    Attributes:
        refused: Why the last connection could not be made; empty if there is one.
    """

    def __init__(self, context: ssl.SSLContext | None) -> None:
        super().__init__()
        self._context = context
        self.refused = ""

    def create_connection(self, *args: Any, **options: Any) -> Any:
        try:
            made = super().create_connection(*args, **{**options, "timeout": LEAVE_S})
            if self._context is not None:
                made.settimeout(LEAVE_S)
                made = self._context.wrap_socket(made, server_hostname=options["hostname"])
        except OSError as error:
            self.refused = Session.reason(error)
            raise
        self.refused = ""
        return made

    def select(self, reading: Any, *more: Any) -> Any:
        """Return what can be read; also what TLS has decrypted already, which kazoo forgets."""
        found = [one for one in reading if isinstance(one, ssl.SSLSocket) and one.pending()]
        return (found, [], []) if found else super().select(reading, *more)


class Session(Store):
    """One session, without what locks need."""

    broken: ClassVar[tuple[type[Exception], ...]] = (SessionExpiredError, AuthFailedError)

    def __init__(self, address: ZooKeeperAddress) -> None:
        self.address = address
        self._client: Any = None
        self._own: dict[str, str] = {}  # tokens by the paths of the nodes of this session
        self._freed = -1  # the version of `FREED` for which they are
        self._over = self._closing = self._refreshing = False
        self._heard = -math.inf  # when the last transaction that was done was sent
        self.granted = 0.0  # seconds that the session lasts, once it is known
        self._known = threading.Event()

    def connect(self) -> str:
        address = self.address
        user = {}
        handler = _Handler(None if address.tls is None else context_of(address.tls))
        if address.user is not None:
            user = {"auth_data": [("digest", address.user)], "default_acl": CREATOR_ALL_ACL}
        self._client = client = KazooClient(
            hosts=",".join(address.members),
            timeout=address.session,
            connection_retry=KazooRetry(max_tries=-1, delay=REFRESH_S, max_delay=1.0),
            handler=handler,
            logger=quiet,
            **user,
        )
        self._watch_connections(client)
        client.add_listener(self._changed)
        client.start_async()
        # kazoo reports a connection before it has logged in, and before we know of its session.
        if not self._known.wait(CONNECT_S) or not client.connected:
            why = f" ({handler.refused})" if handler.refused else ""
            raise NodeError(f"no server of it answers, or they have no majority{why}")
        if self.granted < address.session:
            longest = self.granted / SESSION_FACTOR
            raise ConfigurationError(
                f"it grants sessions of {self.granted:g} s at most, and locks with a ttl of"
                f" {address.longest_ttl:g} s need {address.session:g} s: write ?ttl={longest:g} at"
                " the end of its URL, or let its maxSessionTimeout be more"
            )
        self._make_root()
        try:
            for path in (LOCKS, ACQUIRED, FREED, LINES, CALLS):
                self._do(client.ensure_path_async, path)
            _data, stat = self._do(client.get_async, FREED)
        except NoAuthError:
            raise ConfigurationError(
                f"its ACL refuses us: this user needs all rights on {address.chroot}; see"
                " docs/zookeeper.md"
            ) from None
        self._freed = stat.version
        if self.granted > address.session:
            self.remark = (
                f"its servers grant no session of less than {self.granted:g} s, and"
                f" {address.session:g} s were asked for: the locks of a dead process stay held for"
                f" {self.granted:g} s, and {address.too_slow(self.granted)}"
            )
        return f"{stat.czxid:x}"

    def _make_root(self) -> None:
        """Make the node under which all of ours are, and its parents; then use no other nodes.

        Raises:
            ConfigurationError: We lack the right to make one of them.
        """
        client, chroot = self._client, self.address.chroot
        try:
            self._do(client.ensure_path_async, chroot)
        except NoAuthError:
            paths = [chroot[: found.start()] for found in re.finditer("/|$", chroot)][1:]
            missing = [path for path in paths if self._do(client.exists_async, path) is None]
            raise ConfigurationError(
                f"its ACL does not let us make {missing[0]}: let a user who may do so run"
                f" {', '.join(f'create {path}' for path in missing)} in zkCli.sh, and give all"
                f" rights on {chroot} to us; see docs/zookeeper.md"
            ) from None
        client.chroot = chroot

    def close(self) -> None:
        self._closing = True
        if self._client is not None:
            with contextlib.suppress(Exception):
                self._client.stop()
            with contextlib.suppress(Exception):
                self._client.close()

    @staticmethod
    def reason(error: BaseException) -> str:
        said = " ".join(str(error).split())[:200]
        return said or type(error).__name__.removesuffix("Error")

    def _get(self, path: str) -> Any:
        """Return the token in a node and its state; None if there is none."""
        try:
            data, stat = self._do(self._client.get_async, path)
        except NoNodeError:
            return None
        return data.decode("utf-8", "replace"), stat

    def _is_ours(self, stat: Any) -> bool:
        return bool(stat.ephemeralOwner == self._client._session_id)

    def _delete(self, path: str) -> bool:
        with contextlib.suppress(NoNodeError):
            return bool(path) and bool(self._do(self._client.delete_async, path))
        return False

    # -- Requests

    def _commit(self, *operations: tuple[Any, ...], freed: bool = True) -> list[Any]:
        """Return the results of a transaction; with `freed`, nothing of ours may be freed since."""
        sent = 0.0

        def commit() -> Any:
            nonlocal sent
            self._refresh()
            sent = monotonic()
            transaction = self._client.transaction()
            if freed:
                transaction.check(FREED, self._freed)
            for name, *arguments in operations:
                getattr(transaction, name)(*arguments)
            return transaction.commit_async()

        results: list[Any] = self._do(commit)
        self._heard = max(self._heard, sent)
        return results

    def _refresh(self) -> None:
        """Make the connection anew if the leader may have heard of the session too long ago.

        Raises:
            ConnectionLoss: It cannot be made in time.
        """
        oldest = monotonic() - QUIET * self.address.longest_ttl
        if self._heard >= oldest:
            return
        self._refreshing = True
        self._leave()
        until = monotonic() + LEAVE_S
        while self._heard < oldest and monotonic() < until and not self._over:
            time.sleep(REFRESH_S)
        self._refreshing = False
        if self._heard < oldest:
            raise ConnectionLoss

    def _do(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """Return the answer to a request, which is repeated until the session answers or is over.

        Raises:
            SessionExpiredError: It is over, or was silent for as long as it lasts.
        """
        until = monotonic() + self.address.session
        while not (self._over or self._closing) and monotonic() < until:
            try:
                asked = ask(*arguments)
                while not asked.ready() and monotonic() < until and not self._closing:
                    asked.wait(LEAVE_S)
                    if not asked.ready():
                        self._leave()
                if asked.ready():
                    return asked.get(block=False)
            except SOON:
                time.sleep(RETRY_S)
            except UnimplementedError:
                raise ConfigurationError("it is older than ZooKeeper 3.5") from None
        raise SessionExpiredError("its session is over")

    def _leave(self) -> None:
        """Hang up on a server that does not answer, so that kazoo asks another."""
        with contextlib.suppress(Exception):
            # Not that of an `SSLSocket`, which kazoo may be reading in another thread.
            socket.socket.shutdown(self._client._connection._socket, socket.SHUT_RDWR)

    def _watch_connections(self, client: Any) -> None:
        """Note how long a session each server grants, and leave one that does not grant it soon.

        kazoo keeps the one to itself, and waits for the other for a part of the session.
        """
        connect, invoke = client._connection._connect, client._connection._invoke

        def invoking(timeout: float, *arguments: Any, **named: Any) -> Any:
            return invoke(min(timeout, LEAVE_S), *arguments, **named)

        def noting(*arguments: Any) -> Any:
            began = monotonic()
            read_timeout, connect_timeout = connect(*arguments)
            self._heard = max(self._heard, began)  # its server has told the leader
            self.granted = read_timeout * 3 / 2 / 1000
            self._known.set()
            if self.granted < self.address.session and self._freed >= 0:
                self._over = True  # another server grants less: this session is not long enough
            return read_timeout, connect_timeout

        client._connection._connect, client._connection._invoke = noting, invoking

    def _changed(self, state: str) -> None:
        """Handle a change of the session. A thread of kazoo calls it."""
        if self._closing or (self._refreshing and state != KazooState.LOST):
            return
        name, own = self.address.name, len(self._own)
        if state == KazooState.SUSPENDED:
            logger.log(
                logging.WARNING if own else logging.INFO,
                "node %s: the connection is lost; unless a server answers in time, the %d locks"
                " in its session end by the clocks of their holders",
                *(name, own),
                extra=event("session_suspended"),
            )
        elif state == KazooState.LOST:
            self._over = True
            if own:
                logger.error(
                    "node %s: the session is over, and with it all %d locks that were taken in it",
                    *(name, own),
                    extra=event("session_lost"),
                )
            else:  # an idle process has lost nothing: it goes on in a new session
                logger.info(
                    "node %s: the session is over; no lock was taken in it",
                    name,
                    extra=event("session_lost"),
                )
        elif self._freed >= 0:
            logger.info("node %s: the session goes on", name, extra=event("session_resumed"))


def place_in(results: list[Any]) -> int:
    """Return the place of the operation that failed."""
    errors = [n for n, one in enumerate(results) if isinstance(one, Exception)]
    blamed = [
        n for n in errors if not isinstance(results[n], (RolledBackError, RuntimeInconsistency))
    ]
    return (blamed or errors or [0])[0]


def failed_in(results: list[Any]) -> Exception | None:
    """Return the error of the operation that failed; None if the transaction was done."""
    one = results[place_in(results)] if results else NodeError("it answers with nothing")
    return one if isinstance(one, Exception) else None
