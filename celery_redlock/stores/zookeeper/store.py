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
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import quote, unquote

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError

from ...protocol.errors import NodeError
from ...protocol.names import MAX_DEAD_WAITERS, base_of
from ...runtime.clock import monotonic
from ..contract import Granted, Wanted
from .address import ZooKeeperAddress
from .session import ACQUIRED, CALLS, FREED, LINES, LOCKS, Session, failed_in, place_in

__all__ = ["ZooKeeperStore", "call_path", "calls_in"]

KEPT = 50
"""Maximum number of notifications that a process can get between two of its reads."""
TRIES = 20
"""Maximum attempts of an operation that fails if another process is faster."""


class ZooKeeperStore(Session):
    """The locks and the wait queues in one session."""

    def __init__(self, address: ZooKeeperAddress) -> None:
        super().__init__(address)
        self._lines: dict[tuple[str, str], str] = {}  # places of our waiters in queues
        self._ends: dict[str, tuple[float, str]] = {}  # end of the ttl, and name, by path

    def acquire(self, wanted: Wanted) -> Granted:
        paths = [_path(name) for name in wanted.names]
        for _ in range(TRIES):
            results = self._commit(
                *[("create", path, wanted.token.encode(), None, True) for path in paths],
                ("set_data", ACQUIRED, b""),
                freed=False,
            )
            if (failed := failed_in(results)) is None:
                self._own.update(dict.fromkeys(paths, wanted.token))
                self._prolong(wanted)
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
                self._prolong(wanted)
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
            if (failed := failed_in(results)) is None:
                for one, ours in zip(wanted, held, strict=True):
                    if ours:
                        self._prolong(one)
                return held
            self._look_again(failed, results, checked)
        raise NodeError("its locks are freed faster than we can ask")

    def _prolong(self, wanted: Wanted) -> None:
        # The holder counts from before it asked, and so has stopped by then.
        end = monotonic() + wanted.ttl
        self._ends.update((_path(name), (end, name)) for name in wanted.names)

    def tidy(self) -> None:
        for path, (end, name) in list(self._ends.items()):
            token = self._own.get(path)
            if token is not None and monotonic() < end:
                continue
            if token is not None and self._release_own(path, token):
                self.wake(base_of(name))
            self._ends.pop(path, None)

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

    # -- Wait queues

    def join(self, names: Sequence[str], member: str, since: int) -> None:
        for name in names:
            path = f"{_line(name)}{since:020d}!{_quoted(member)}"
            self._lines[name, member] = path
            with contextlib.suppress(NodeExistsError):
                self._do(self._client.create_async, path, b"", None, True)

    def leave(self, names: Sequence[str], member: str) -> list[bool]:
        return [self._delete(self._lines.pop((name, member), "")) for name in names]

    def wake(self, name: str) -> bool:
        # We have just deleted the lock, or read that it is free: whoever has joined before it tried
        # is seen by the server that did so.
        head = _line(name)[len(LINES) + 1 :]
        for _ in range(MAX_DEAD_WAITERS):
            there = self._do(self._client.get_children_async, LINES)
            first = min((one for one in there if one.startswith(head)), default="")
            if not first:
                break
            process, _, waiter = unquote(first[len(head) :].partition("!")[2]).rpartition(":")
            call, place = call_path(process), f"{LINES}/{first}"
            found = self._get(call)
            if found is None:  # its process is dead
                self._delete(place)
                continue
            known = list(calls_in(found[0].encode()))[-KEPT:]
            known.append((known[-1][0] + 1 if known else 1, waiter))
            data = "\n".join(f"{number} {one}" for number, one in known).encode()
            calls = ("set_data", call, data, found[1].version)
            if failed_in(self._commit(("delete", place, -1), calls, freed=False)) is None:
                return True
        return False

    def listen(self, path: str) -> None:
        """Make the node in which the notifications of a process are listed."""
        self._delete(path)  # of an earlier session of ours
        self._do(self._client.create_async, path, b"", None, True)

    def watch(self, path: str, changed: Callable[..., None], take: Callable[..., None]) -> None:
        """Read a node without waiting for it: `take` gets the answer, `changed` the next event."""
        self._client.get_async(path, changed).rawlink(take)

    # -- For the commands

    def around(self) -> tuple[set[str], bool]:
        """Return the nodes beside ours, and whether everybody may free locks although we log in."""
        there = self._do(self._client.get_children_async, "/")
        acl, _stat = self._do(self._client.get_acls_async, LOCKS)
        anybody = any(one.id.scheme == "world" for one in acl)
        ours = {path[1:] for path in (LOCKS, ACQUIRED, FREED, LINES, CALLS)}
        return set(there) - ours, anybody and self.address.user is not None

    # -- Nodes of ours and of others

    def _release_own(self, path: str, token: str) -> bool:
        for _ in range(TRIES):
            if self._own.get(path) != token:
                return False
            results = self._commit(("delete", path, 0))
            if (failed := failed_in(results)) is None:
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
            if (failed := failed_in(results)) is None:
                return True
            if not isinstance(failed, (BadVersionError, NoNodeError)):
                raise failed
        raise NodeError("its locks are acquired faster than we can ask")

    def _look_again(self, failed: Exception, results: list[Any], paths: list[str]) -> None:
        """Find out which nodes are still ours, after a transaction that named them has failed."""
        if isinstance(failed, NoNodeError):
            self._own.pop(paths[place_in(results) - 1], None)
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


def calls_in(data: bytes) -> Iterator[tuple[int, str]]:
    """Yield the number and the waiter of each notification in a node."""
    for line in data.decode().splitlines():
        number, _, name = line.partition(" ")
        yield int(number), name


def call_path(process: str) -> str:
    """Return the path of the node with the notifications of a process."""
    return f"{CALLS}/{_quoted(process)}"


def _path(name: str) -> str:
    return f"{LOCKS}/{_quoted(name)}"


def _line(name: str) -> str:
    """Return the beginning of the paths of all waiters for a name."""
    return f"{LINES}/{_quoted(name)}!"


def _quoted(name: str) -> str:
    """Return text as the component of a path: not a dot or two, without a slash or our mark `!`."""
    quoted = quote(name.encode("utf-8", "surrogatepass"), safe="$&'()*+,:;=@#|<>{}~ ")
    return quoted.replace(".", "%2E") if set(quoted) <= {"."} else quoted
