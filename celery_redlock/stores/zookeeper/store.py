"""Locks as ephemeral nodes of one ZooKeeper session.

A lock is a node that exists as long as the session of the process that made it, with the token as
its data. To acquire is to create it. To extend is to prove, by a transaction that a majority has
stored, that the session and the node still exist: a read could be answered by a server that was
cut off. A transaction can ask for the version of a node, and a node that was made again has the
same version as before. So two nodes count what the versions do not show:

- `/acquired` is written by each acquisition. Whoever deletes the node of another session (a dead
  child's, by its supervisor; by an operator's command) asks for its version: no other process has
  acquired anything since we read whose node it is.
- `/freed` is written by each such deletion. A holder that extends or releases asks for its version:
  no one has deleted a node of ours since we last looked.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar
from urllib.parse import quote, unquote

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    BadVersionError,
    ConnectionLoss,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    OperationTimeoutError,
    RolledBackError,
    RuntimeInconsistency,
    SessionExpiredError,
    SessionMovedError,
    UnimplementedError,
)
from kazoo.protocol.states import KazooState
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL

from ...protocol.errors import ConfigurationError, NodeError
from ...protocol.texts import event
from ..contract import Granted, Store, Wanted
from .address import SESSION_FACTOR, ZooKeeperAddress

__all__ = ["ACQUIRED", "FREED", "LOCKS", "ZooKeeperStore"]

logger = logging.getLogger("celery_redlock.node")
quiet = logging.Logger("kazoo", logging.CRITICAL)  # each loss of a connection has a line of ours

LOCKS, ACQUIRED, FREED = "/locks", "/acquired", "/freed"
LEAVE_S = 1.0
"""Seconds without an answer after which a server is left for another; kazoo waits for a third of
the session."""
CONNECT_S = 5.0
"""Seconds to connect to the first server that answers."""
RETRY_S = 0.05
"""Seconds until a request is repeated whose connection was lost."""
TRIES = 20
"""Attempts of what fails when another process is faster."""
SOON = (ConnectionLoss, OperationTimeoutError, SessionMovedError)


class ZooKeeperStore(Store):
    """One session."""

    broken: ClassVar[tuple[type[Exception], ...]] = (SessionExpiredError, AuthFailedError)

    def __init__(self, address: ZooKeeperAddress) -> None:
        self.address = address
        self._client: Any = None
        self._own: dict[str, str] = {}  # tokens by the paths of the nodes of this session
        self._freed = -1  # the version of `FREED` for which they are
        self._over = self._closing = False
        self.granted = 0.0  # seconds that the session lasts

    def connect(self) -> str:
        address = self.address
        user = {}
        if address.user is not None:
            user = {"auth_data": [("digest", address.user)], "default_acl": CREATOR_ALL_ACL}
        self._client = client = KazooClient(
            hosts=",".join(address.members) + address.chroot,
            timeout=address.session,
            connection_retry=KazooRetry(max_tries=-1, delay=RETRY_S, max_delay=1.0),
            logger=quiet,
            **user,
        )
        self._note_session(client)
        client.add_listener(self._changed)
        client.start_async().wait(CONNECT_S)
        if not client.connected:
            raise NodeError("no server of it answers, or they have no majority")
        if self.granted < address.session:
            longest = self.granted / SESSION_FACTOR
            raise ConfigurationError(
                f"it grants sessions of {self.granted:g} s at most, and locks with a ttl of"
                f" {address.longest_ttl:g} s need {address.session:g} s: write ?ttl={longest:g} at"
                " the end of its URL, or let its maxSessionTimeout be more"
            )
        try:
            for path in (LOCKS, ACQUIRED, FREED):
                self._do(client.ensure_path_async, path)
            _data, stat = self._do(client.get_async, FREED)
        except NoAuthError:
            raise ConfigurationError(
                f"its ACL refuses us: this user needs all rights on {address.chroot}; see"
                " docs/zookeeper.md"
            ) from None
        self._freed = stat.version
        return f"{stat.czxid:x}"

    def close(self) -> None:
        self._closing = True
        if self._client is not None:
            with contextlib.suppress(Exception):
                self._client.stop()
            with contextlib.suppress(Exception):
                self._client.close()

    def acquire(self, wanted: Wanted) -> Granted:
        paths = [_path(name) for name in wanted.names]
        for _ in range(TRIES):
            results = self._commit(
                *[("create", path, wanted.token.encode(), None, True) for path in paths],
                ("set_data", ACQUIRED, b""),
                freed=False,
            )
            if (failed := _failed(results)) is None:
                self._own.update(dict.fromkeys(paths, wanted.token))
                return Granted(fence=results[-1].mzxid)  # of this transaction, as their czxid
            if not isinstance(failed, NodeExistsError):
                raise failed
            seen = [self._get(path) for path in paths]
            others = [place for place, one in enumerate(seen) if one and one[0] != wanted.token]
            if others:
                return Granted(holder=seen[others[0]][0], place=others[0])
            ours = [one for one in seen if one is not None]
            if len(ours) == len(paths) and all(self._is_ours(one) for _token, one in ours):
                self._own.update(dict.fromkeys(paths, wanted.token))
                return Granted(fence=ours[0][1].czxid)
            if ours and not all(self._is_ours(one) for _token, one in ours):
                raise NodeError("the node of an earlier session is still there")
        raise NodeError("it is acquired and released faster than we can ask")

    def extend(self, wanted: Wanted) -> bool:
        return self.extend_all([wanted])[0]

    def extend_all(self, wanted: Sequence[Wanted]) -> list[bool]:
        each = [(one.token, [_path(name) for name in one.names]) for one in wanted]
        for _ in range(TRIES):
            held = [all(self._own.get(path) == token for path in paths) for token, paths in each]
            pairs = zip(each, held, strict=True)
            checked = [path for (_token, paths), ours in pairs if ours for path in paths]
            if not checked:
                return held
            results = self._commit(*[("check", path, 0) for path in checked])
            if (failed := _failed(results)) is None:
                return held
            self._look_again(failed, results, checked)
        raise NodeError("its locks are freed faster than we can ask")

    def release(self, wanted: Wanted) -> bool:
        released = True
        for name in wanted.names:
            path = _path(name)
            if self._own.get(path) == wanted.token:
                released &= self._release_own(path, wanted.token)
            else:
                released &= self._release_other(path, wanted.token)
        return released

    def peek(self, names: Sequence[str]) -> list[tuple[str, float] | None]:
        left = self.address.longest_ttl
        seen = [self._get(_path(name)) for name in names]
        return [None if one is None else (one[0], left) for one in seen]

    def scan(self, head: str) -> Iterator[str]:
        for child in self._do(self._client.get_children_async, LOCKS):
            if (name := unquote(child)).startswith(head):
                yield name

    def around(self) -> tuple[set[str], bool]:
        """Return the nodes beside ours, and whether everybody may free locks although we log in."""
        there = self._do(self._client.get_children_async, "/")
        acl, _stat = self._do(self._client.get_acls_async, LOCKS)
        anybody = any(one.id.scheme == "world" for one in acl)
        ours = {path[1:] for path in (LOCKS, ACQUIRED, FREED)}
        return set(there) - ours, anybody and self.address.user is not None

    def reason(self, error: BaseException) -> str:
        said = " ".join(str(error).split())[:200]
        return said or type(error).__name__.removesuffix("Error")

    # -- Nodes of ours and of others

    def _release_own(self, path: str, token: str) -> bool:
        for _ in range(TRIES):
            if self._own.get(path) != token:
                return False
            results = self._commit(("delete", path, 0))
            if (failed := _failed(results)) is None:
                self._own.pop(path)
                return True
            self._look_again(failed, results, [path])
        raise NodeError("its locks are freed faster than we can ask")

    def _release_other(self, path: str, token: str) -> bool:
        for _ in range(TRIES):
            _data, stat = self._do(self._client.get_async, ACQUIRED)
            found = self._get(path)
            if found is None or found[0] != token:
                return False
            results = self._commit(
                ("check", ACQUIRED, stat.version),
                ("delete", path, 0),
                ("set_data", FREED, b""),
                freed=False,
            )
            if (failed := _failed(results)) is None:
                return True
            if not isinstance(failed, (BadVersionError, NoNodeError)):
                raise failed
        raise NodeError("its locks are acquired faster than we can ask")

    def _look_again(self, failed: Exception, results: list[Any], paths: list[str]) -> None:
        """Find out which nodes are still ours, after a transaction that named them has failed."""
        if isinstance(failed, NoNodeError):
            self._own.pop(paths[_place(results) - 1], None)
            return
        if not isinstance(failed, BadVersionError):
            raise failed
        # First the version, then the nodes, on a server that has what the leader has.
        self._do(self._client.sync_async, FREED)
        _data, stat = self._do(self._client.get_async, FREED)
        for path, token in list(self._own.items()):
            found = self._get(path)
            if found is None or found[0] != token or not self._is_ours(found[1]):
                self._own.pop(path)
        self._freed = stat.version

    def _get(self, path: str) -> Any:
        """Return the token in a node and its state; None if there is none."""
        try:
            data, stat = self._do(self._client.get_async, path)
        except NoNodeError:
            return None
        return data.decode("utf-8", "replace"), stat

    def _is_ours(self, stat: Any) -> bool:
        return bool(stat.ephemeralOwner == self._client._session_id)

    # -- Requests

    def _commit(self, *operations: tuple[Any, ...], freed: bool = True) -> list[Any]:
        """Return the results of a transaction; with `freed`, nothing of ours may be freed since."""

        def commit() -> Any:
            transaction = self._client.transaction()
            if freed:
                transaction.check(FREED, self._freed)
            for name, *arguments in operations:
                getattr(transaction, name)(*arguments)
            return transaction.commit_async()

        results: list[Any] = self._do(commit)
        return results

    def _do(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        """Return the answer to a request, which is repeated until the session answers or is over.

        Raises:
            SessionExpiredError: It is over, or was silent for as long as it lasts.
        """
        until = time.monotonic() + self.address.session
        while not (self._over or self._closing):
            asked = ask(*arguments)
            while not asked.ready() and time.monotonic() < until and not self._closing:
                asked.wait(LEAVE_S)
                if not asked.ready():
                    self._leave()
            if not asked.ready():
                break
            try:
                return asked.get(block=False)
            except SOON:
                time.sleep(RETRY_S)
            except UnimplementedError:
                raise ConfigurationError("it is older than ZooKeeper 3.5") from None
            if time.monotonic() >= until:
                break
        raise SessionExpiredError("its session is over")

    def _leave(self) -> None:
        """Hang up on a server that does not answer, so that kazoo asks another."""
        with contextlib.suppress(Exception):
            self._client._connection._socket.shutdown(2)

    def _note_session(self, client: Any) -> None:
        """Note how long a session each server grants: kazoo keeps that to itself."""
        connect = client._connection._connect

        def noting(*arguments: Any) -> Any:
            read_timeout, connect_timeout = connect(*arguments)
            self.granted = read_timeout * 3 / 2 / 1000
            if self.granted < self.address.session and self._freed >= 0:
                self._over = True  # another server grants less: this session is not long enough
            return read_timeout, connect_timeout

        client._connection._connect = noting

    def _changed(self, state: str) -> None:
        """Handle a change of the session. A thread of kazoo calls it."""
        if self._closing:
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
            logger.error(
                "node %s: the session is over, and with it all %d locks that were taken in it",
                *(name, own),
                extra=event("session_lost"),
            )
        elif self._freed >= 0:
            logger.info("node %s: the session goes on", name, extra=event("session_resumed"))


def _path(name: str) -> str:
    """Return the path of a lock. A component cannot be a dot or two, or have a slash."""
    quoted = quote(name.encode(), safe="!$&'()*+,:;=@#|<>{}~ ")
    return f"{LOCKS}/{quoted.replace('.', '%2E') if set(quoted) <= {'.'} else quoted}"


def _place(results: list[Any]) -> int:
    """Return the place of the operation that failed."""
    errors = [n for n, one in enumerate(results) if isinstance(one, Exception)]
    blamed = [
        n for n in errors if not isinstance(results[n], (RolledBackError, RuntimeInconsistency))
    ]
    return (blamed or errors or [0])[0]


def _failed(results: list[Any]) -> Exception | None:
    """Return the error of the operation that failed; None if the transaction was done."""
    one = results[_place(results)] if results else NodeError("it answers with nothing")
    return one if isinstance(one, Exception) else None
