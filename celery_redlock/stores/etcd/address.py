"""Parse the URL of an etcd cluster, and connect to its members; a name for it without secrets.

No client of etcd is needed: requests go to its JSON gateway over a socket.
"""

from __future__ import annotations

import contextlib
import math
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from ...protocol.errors import ConfigurationError, NodeError
from ...protocol.texts import printable
from ...runtime.polling import SIZE
from ..secrecy import PLAIN, Exposed, is_here, parted_members
from ..tls import OPTIONS, check_options, context_of, unverified
from .wire import MALFORMED, MAX_REPLY_BYTES, Replies, Request, answer, number, refusal, request

__all__ = ["Connection", "EtcdAddress", "parse", "reason"]

PORT = 2379
TIMEOUT_S = 1.0
"""Seconds to connect to a member, and for each of its answers to the handshake."""
MIN_TIMEOUT_S = 2.0
"""Minimum seconds to wait for an answer if there is another member, so that it can still answer
once the first one is left (`LEAVE_S`)."""
NO_ANSWER = "its response is malformed"
TOKEN = re.compile(rb"[ -~]{1,8192}")
"""The login token that a member may give us, for the head of each request."""
VERSION = re.compile(r"\d{1,9}\.\d{1,9}[\w.+-]{0,40}", re.ASCII)


@dataclass(frozen=True)
class EtcdAddress:
    """The address of one cluster.

    Attributes:
        name: `host:port,host:port`; never a credential.
        members: Host and port of each member in the URL.
        user: Our user and the password; None if the cluster has no users.
        tls: The options for the TLS context; None for no TLS.
        unverified: If TLS accepts any certificate or name: the option that makes it check them.
            Else empty.
    """

    name: str
    members: tuple[tuple[str, int], ...]
    user: tuple[str, str] | None = field(repr=False)
    tls: Mapping[str, str] | None = field(repr=False)
    store: ClassVar[str] = "etcd"
    moves: ClassVar[bool] = False
    """A member that takes the place of another has forgotten nothing: a majority answers."""

    @property
    def least_timeout(self) -> float:
        """Minimum seconds to wait for an answer."""
        return MIN_TIMEOUT_S if len(self.members) > 1 else 0.0

    @property
    def identity(self) -> str:
        return ",".join(sorted(self.name.split(",")))  # in whichever order they are named

    @property
    def unverified(self) -> str:
        return unverified(self.tls)

    @property
    def exposed(self) -> Exposed:
        """The way in which others can learn the password that is sent there, if there is one."""
        if (
            self.user is None
            or self.tls is not None
            or all(is_here(host) for host, _ in self.members)
        ):
            return None
        return PLAIN, "write etcds://"

    def connect(self, first: int = 0, timeout: float = TIMEOUT_S, **limits: Any) -> Connection:
        """Return a new connection to the first member that answers, in order from `first` on.

        Args:
            first: Index of the member to ask first.
            timeout, limits: See `Connection`.

        Raises:
            NodeError: None can be reached, or it refuses us.
        """
        whys = []
        for at in range(len(self.members)):
            at = (first + at) % len(self.members)
            try:
                return Connection(self, at, timeout, **limits)
            except (NodeError, OSError) as error:
                whys.append(f"{':'.join(map(str, self.members[at]))}: {reason(error)}")
        # Sorted, whichever was asked first, because the text is logged whenever it changes.
        raise NodeError(whys[0].partition(": ")[2] if len(whys) == 1 else "; ".join(sorted(whys)))


class Connection:
    """A connection to one member; it waits for each answer until it is set not to block.

    A member that hangs still accepts connections, so its status is asked for at once.

    Args:
        address: The cluster.
        at: Index of the member.
        timeout: Seconds to wait for each whole answer; in the handshake at most `TIMEOUT_S`.
        life: Seconds for all answers together.
        largest: Bytes of the longest answer.
        budget: Bytes of all answers together.

    Attributes:
        at: Index of the member.
        head: The header fields of each request.
        cluster: Id of the cluster, as the member reports it.
        version: Version of the member, as it reports it.
        leads: True if the member reports that the cluster has a leader.
    """

    def __init__(
        self,
        address: EtcdAddress,
        at: int,
        timeout: float,
        *,
        life: float = math.inf,
        largest: int = MAX_REPLY_BYTES,
        budget: float = math.inf,
    ) -> None:
        self.at = at
        self._end, self._budget, self._replies = monotonic() + life, budget, Replies(largest)
        self._timeout = min(timeout, TIMEOUT_S)
        host, port = address.members[at]
        context = None if address.tls is None else context_of(address.tls)
        self._sock = socket.create_connection((host, port), min(self._timeout, life))
        name = f"[{host}]" if ":" in host else host
        self.head = b"Host: %b:%d\r\n" % (name.encode("idna"), port)
        self.head += b"Content-Type: application/json\r\n"
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is not None:
                self._sock = context.wrap_socket(self._sock, server_hostname=host)
            if address.user is not None:
                self._log_in(*address.user)
            said = self.ask("maintenance/status", {})
            self.cluster = str(number(said["header"]["cluster_id"]))
            self.leads = number(said.get("leader", 0)) != 0
            (self.version,) = VERSION.findall(said["version"])
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) or not isinstance(error, MALFORMED):
                raise  # an error about a certificate is both an OSError and a ValueError
            raise NodeError(NO_ANSWER) from None
        self._timeout = timeout

    def _log_in(self, name: str, password: str) -> None:
        try:
            said = self.ask("auth/authenticate", {"name": name, "password": password})
        except NodeError as error:
            # Authentication may be enabled while all runs: first all clients get a password.
            if "authentication is not enabled" not in str(error):
                raise
        else:
            token = said["token"].encode("ascii")
            if not TOKEN.fullmatch(token):
                raise ValueError
            self.head += b"Authorization: %b\r\n" % token

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send one request, and wait for the answer.

        Raises:
            NodeError: It refuses, or the answer is malformed.
            OSError: There is no whole answer in time, or the connection has ended.
        """
        until = min(monotonic() + self._timeout, self._end)
        self._sock.settimeout(self._timeout)
        self._sock.sendall(request(Request(path, body), self.head))
        found: list[tuple[int, bytes]] = []
        while not found:
            if (left := until - monotonic()) <= 0:
                raise TimeoutError
            self._sock.settimeout(left)
            data = self._sock.recv(SIZE)
            if not data:
                raise NodeError("connection closed by the server")
            self._budget -= len(data)
            if self._budget < 0:
                raise NodeError("more than is read of one node")
            found += self._replies.feed(data)
        if len(found) > 1 or self._replies.partial:
            raise NodeError("it sent a reply without a request")
        said = answer(*found[0])
        if why := refusal(said):
            raise NodeError(why)
        return said

    @property
    def peer(self) -> str:
        """The IP address at the other end."""
        return str(self._sock.getpeername()[0])

    def close(self) -> None:
        """Close it."""
        self._sock.close()

    disconnect = close

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # runs in forks, and when its owner is collected
            self.close()


def parse(url: str, where: str) -> EtcdAddress:
    """Return the address that a URL names.

    Args:
        url: `etcd://user:password@host:port,host:port`, or `etcds://` with TLS, and then
            `?ca=file&cert=file&key=file`; `verify=no` checks no certificate.
        where: Name of the URL in errors.

    Raises:
        ConfigurationError: It is invalid.
    """
    forms = (
        "its members cannot be understood; write etcd://host:2379,host:2379, or"
        " etcd://user:password@host:2379,host:2379"
    )
    parts, credentials, members, options = parted_members(url, where, forms, _member)
    user, _, password = map(unquote, credentials.partition(":"))
    secure = parts.scheme == "etcds"
    if unknown := [name for name in options if not secure or name not in OPTIONS]:
        raise ConfigurationError(
            f"{where}: {printable(unknown[0])!r} is no option of an {parts.scheme}:// URL;"
            f" etcds:// takes {', '.join(OPTIONS)}, etcd:// none"
        )
    if parts.path.strip("/"):
        raise ConfigurationError(
            f"{where}: {parts.path!r} stands behind its members, and etcd has no"
            " databases; redlock_prefix sets what the keys begin with"
        )
    if len(set(members)) < len(members):
        raise ConfigurationError(f"{where}: it names a member twice; name each once")
    if secure:
        check_options(options, where)
    name = ",".join(f"{host}:{port}" for host, port in members)
    return EtcdAddress(
        name, tuple(members), (user, password) if user else None, options if secure else None
    )


def reason(error: BaseException) -> str:
    """Return the reason of an error, in one line without secrets."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, (NodeError, OSError)):
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return printable(" ".join(said.split())[:200])
    return NO_ANSWER


def _member(host: str) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    if not parts.hostname or parts.port == 0:
        raise ValueError
    return parts.hostname, parts.port or PORT
