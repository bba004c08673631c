"""Addresses of nodes: how to connect, and a name without secrets, from what a user gives.

A node may be given as a URL, as a `redis.Redis` client or as a mapping of connection arguments. The
connection arguments of each are used, but never its retries: a library that silently sends a
timed-out SET again breaks a lock (redis-py 8 does it ten times by default).
"""

from __future__ import annotations

import copy
import inspect
import re
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, SentinelConnectionPool

from ...protocol.errors import ConfigurationError, NodeError
from ...protocol.texts import printable
from ..secrecy import PLAIN, Exposed, is_among, is_here, options_in, parted
from .resp import Parser, reason
from .sentinel import pool_of

__all__ = ["Address", "parse_nodes"]

T = TypeVar("T")

SENTINEL = "sentinel://"
CONNECT_TIMEOUT = 1.0
"""Seconds to connect and to authenticate, unless the node's arguments set others."""
GONE_AFTER = 10.0
"""Seconds after which the kernel gives up a peer host that does not even acknowledge packets. A
process that hangs must not break the connection."""
_KEEPALIVE = {
    getattr(socket, name): int(value)
    for name, value in (
        ("TCP_KEEPIDLE", GONE_AFTER / 2),
        ("TCP_KEEPINTVL", GONE_AFTER / 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", GONE_AFTER * 1000),
    )
    if hasattr(socket, name)
}


@dataclass(frozen=True)
class Address:
    """The address of one node.

    Attributes:
        name: `host:port` or the path of a socket; never a credential.
        connection_class: redis-py's class for this kind of connection.
        arguments: The arguments of that class. They contain the password: never log or show them.
        unverified: If TLS accepts any certificate or name: the settings that make it check them.
            Else empty.
    """

    name: str
    connection_class: type[AbstractConnection]
    arguments: Mapping[str, Any] = field(repr=False)
    unverified: str = ""
    store: ClassVar[str] = "Redis"
    least_timeout: ClassVar[float] = 0.0
    moves: ClassVar[bool] = False

    @property
    def identity(self) -> str:
        return f"{self.name}/{self.arguments.get('db') or 0}"

    @property
    def exposed(self) -> Exposed:
        """The way in which others can learn the password that is sent there, if there is one."""
        if not self._has_password or self.speaks_tls or is_here(self.arguments.get("host", "")):
            return None
        return PLAIN, "write rediss://"

    @property
    def speaks_tls(self) -> bool:
        """True if the connection to the node uses TLS."""
        return issubclass(self.connection_class, SSLConnection)

    @property
    def _has_password(self) -> bool:
        return bool({"password", "credential_provider"} & _given(self.arguments))

    def connection(self, **changed: Any) -> Any:
        """Make a connection of redis-py, without connecting it.

        `changed` replaces some arguments. redis-py's classes have no types.
        """
        return self.made(**changed)

    def made(self, **changed: Any) -> Any:
        """Make the same, without asking Sentinels where the node is."""
        return self.connection_class(**{**self.arguments, **changed})

    def connect(self, greet: Callable[[Any], T], **changed: Any) -> tuple[Any, T]:
        """Return a new connection that does not block, and the result of `greet` on it before that.

        `changed`: Arguments to replace; see `connection`.

        Raises:
            NodeError: The node cannot be reached, or it refuses us.
        """
        connection = None
        try:
            connection = self.connection(**changed)
            connection.connect()
            result = greet(connection)
            if connection.can_read():
                raise NodeError("it sent a reply without a request")
            connection._sock.setblocking(False)
        except Exception as error:  # including those of a credential provider
            if connection is not None:
                connection.disconnect()
            raise NodeError(reason(error), node=self.name) from None
        return connection, result


@dataclass(frozen=True)
class SentinelAddress(Address):
    """The address of the master of a service that Sentinels watch.

    It is one node whose address moves, not several nodes. Sentinel promotes a replica, and locks
    that had not reached it are forgotten. So the new master has no vote for a ttl
    (`restart_guard.py`, rule 2).

    Attributes:
        sentinel: redis-py's client for the Sentinels, with connections of its own.
        service: The service's name in the Sentinels' configuration.
        sentinels: The Sentinels' own addresses.
        masters: The hosts that they may name; see `is_among`. Empty: any host.
    """

    sentinel: Any = field(default=None, repr=False)
    service: str = ""
    sentinels: tuple[Address, ...] = ()
    masters: Sequence[str] = ()
    moves: ClassVar[bool] = True

    def connection(self, **changed: Any) -> Any:
        """Make a connection to the master; ask who it is, unless the arguments have its host.

        Raises:
            redis.RedisError: No Sentinel answers, or none has a master that is up.
        """
        if "host" not in changed:
            changed = {**changed, **self.at(*self._discovered())}
        return self.made(**changed)

    def _discovered(self) -> tuple[str, int]:
        """Ask one Sentinel after the other, over connections with the same limits as all others."""
        manager = copy.copy(self.sentinel)
        for one in self.sentinels:
            arguments = {**one.arguments, "client_name": None}
            pool = redis.ConnectionPool(connection_class=one.connection_class, **arguments)
            manager.sentinels = [redis.Redis(connection_pool=pool)]
            try:
                return manager.discover_master(self.service)  # type: ignore[no-any-return]
            except Exception:
                continue  # whatever the error is; its text may contain the Sentinels' password
            finally:
                pool.disconnect()
        which = " among its `masters`" if self.masters else ""
        raise MasterNotFoundError(f"No master found for {self.service!r}{which}")

    def at(self, host: str, port: int) -> dict[str, Any]:
        """Return the connection arguments for a master that Sentinels have named.

        Raises:
            NodeError: The node's URL does not list it.
        """
        if not is_among(host, self.masters):
            why = f"a Sentinel names {host!r}, which `masters` does not list"
            raise NodeError(why, node=self.name)
        return {"host": getattr(self.sentinel, "_force_master_ip", None) or host, "port": port}

    @property
    def exposed(self) -> Exposed:
        """The way in which others can learn the master's or the Sentinels' password, if any."""
        if any(one.exposed for one in self.sentinels):
            return PLAIN, "add sentinel_ssl=true to its URL"
        if not self._has_password:
            return None
        own = {"ssl_ca_certs", "ssl_ca_path", "ssl_ca_data"} & _given(self.arguments)
        if not self.masters and not (self.speaks_tls and own):
            return (
                "its password goes to whatever server a Sentinel names",
                "add masters=HOST,HOST to its URL, or ssl=true&ssl_ca_certs=PATH",
            )
        if self.speaks_tls or all(map(is_here, self.masters)):
            return None
        return PLAIN, "add ssl=true to its URL"

    @classmethod
    def of(cls, address: Address, pool: SentinelConnectionPool) -> SentinelAddress:
        """Return the address that a pool of `Sentinel.master_for` leads to.

        `address` is made from the arguments of the pool's connections.
        """
        clients = pool.sentinel_manager.sentinels
        pools = [client.connection_pool for client in clients]
        sentinels = [_address(one.connection_class, one.connection_kwargs) for one in pools]
        places = ",".join(sentinel.name for sentinel in sentinels)
        tls = issubclass(pool.connection_class, SSLConnection)
        arguments = {k: v for k, v in address.arguments.items() if k != "connection_pool"}
        return cls(
            printable(f"{pool.service_name}@{places}"),
            *(SSLConnection if tls else Connection, arguments),
            unverified=max(one.unverified for one in (address, *sentinels)),
            sentinel=pool.sentinel_manager,
            service=pool.service_name,
            sentinels=tuple(sentinels),
            masters=getattr(pool.sentinel_manager, "masters", ()),
        )


def parse_nodes(specs: Sequence[Any], setting: str = "nodes") -> tuple[Address, ...]:
    """Return the addresses of a set of independent masters.

    Args:
        specs: URLs, clients or mappings of connection arguments; one or more.
        setting: Name of `specs` in errors.

    Raises:
        ConfigurationError: None is given, some are invalid (the text names each of them), or two
            are the same server.
    """
    if isinstance(specs, (str, bytes, Mapping)) or not isinstance(specs, Sequence):
        raise ConfigurationError(
            f"{setting} must be a list of Redis URLs, clients or mappings of connection"
            f" arguments, not {type(specs).__name__}; for one node give a list of one"
        )
    if not specs:
        raise ConfigurationError(f"{setting} is empty: name one or more independent Redis masters")
    addresses, wrong = [], []
    for index, spec in enumerate(specs):
        try:
            addresses.append(_parse(spec, f"{setting}[{index}]"))
        except ConfigurationError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigurationError("; ".join(wrong))
    seen: dict[str, int] = {}
    for index, address in enumerate(addresses):
        first = seen.setdefault(_same_server(address), index)
        if first != index:
            raise ConfigurationError(
                f"{setting}[{first}] and {setting}[{index}] are the same server,"
                f" {address.name}: it would vote twice; name each master once"
            )
    return tuple(addresses)


def _parse(spec: object, where: str) -> Address:
    try:
        if isinstance(spec, str):
            url = _as_redis_py_writes(spec)
            _check_url(url)
            watched = url.startswith(SENTINEL)
            pool = pool_of(url, CONNECT_TIMEOUT) if watched else redis.ConnectionPool.from_url(url)
        elif isinstance(spec, redis.Redis):
            pool = spec.connection_pool
        elif isinstance(spec, Mapping):
            pool = redis.Redis(**dict(spec)).connection_pool
        else:
            raise TypeError(
                f"a {type(spec).__module__}.{type(spec).__qualname__} is not a Redis URL, a"
                " redis.Redis client or a mapping of connection arguments"
            )
        given = dict(pool.connection_kwargs)
        if isinstance(spec, Mapping) and "socket_connect_timeout" not in spec:
            given.pop("socket_connect_timeout", None)  # redis-py's default, not the user's
        if not isinstance(spec, redis.Redis) and issubclass(pool.connection_class, SSLConnection):
            said = given if isinstance(spec, str) else spec
            if "ssl_check_hostname" not in said and _certified(given):
                given["ssl_check_hostname"] = True  # redis-py's default since 6.0
        address = _address(pool.connection_class, given)
        if isinstance(pool, SentinelConnectionPool):
            address = SentinelAddress.of(address, pool)
        address.made()  # does not connect, but raises for bad arguments now
    except (TypeError, ValueError, redis.RedisError) as error:
        text = str(error)
        if isinstance(spec, str) and isinstance(error, TypeError) and "password=" in spec:
            # After an unquoted & the rest of a password looks like an argument; the error names it.
            text = "an argument is none of a Redis connection; & in a password is written %26"
        raise ConfigurationError(f"{where}: {text}") from None
    return address


def _as_redis_py_writes(url: str) -> str:
    """Return a URL in redis-py's spelling, if it is in Celery's."""
    if url.startswith("redis+socket://"):
        url = "unix://" + url.removeprefix("redis+socket://")
        url = re.sub(r"(?<=[?&])virtual_host=([^&]*)", lambda m: f"db={m[1] or 0}", url)
    return re.sub(r"(?<=ssl_cert_reqs=)CERT_\w+", lambda m: m[0][5:].lower(), url)


def _check_url(url: str) -> None:
    """Raise an error for parts that redis-py would ignore silently, or quote in full."""
    if re.fullmatch(r"[\w.-]+(:\d+)?(/\d*)?", url):  # no part of it can be a secret
        raise ValueError(f"{url!r} has no scheme; write redis://{url}, or rediss:// for TLS")
    scheme = re.match("[a-z+]+://", url)
    if scheme is None or scheme[0] not in ("redis://", "rediss://", "unix://", SENTINEL):
        from ..kinds import schemes  # imported here: it imports this module

        if scheme is None:
            raise ValueError(f"no scheme: a node's URL begins with one of {schemes()}")
        raise ValueError(f"the scheme {scheme[0][:-3]!r} is none of {schemes()}")
    parts = parted(url)
    options_in(parts.query)
    if parts.scheme == "unix" and (host := parts.netloc.rpartition("@")[2]):
        path = f":///{host}{parts.path}"
        raise ValueError(
            f"the path of a socket begins with the third slash: write unix{path}, or as a broker's"
            f" URL redis+socket{path}"
        )
    if parts.scheme in ("unix", "sentinel"):
        return
    if re.search("[,;]", parts.netloc.rpartition("@")[2]):
        raise ValueError(
            f"a {parts.scheme}:// URL names one host; write each node with its scheme:"
            " redis://10.0.0.1:6379/0,redis://10.0.0.2:6379/0"
        )
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError("the port is not a number from 1 to 65535")
    if parts.path.strip("/") and not parts.path.strip("/").isdecimal():
        # Its text is not shown: it may be part of a password.
        raise ValueError("what follows the port is no database number")


def _address(kind: type[AbstractConnection], given: Mapping[str, Any]) -> Address:
    ours = ("retry", "maint_notifications", "oss_cluster", "lib_name", "lib_version")
    arguments = {name: value for name, value in given.items() if not name.startswith(ours)}
    timeout = arguments.get("socket_connect_timeout") or CONNECT_TIMEOUT
    arguments.update(
        # Nothing may be sent twice, and nothing that we did not ask for.
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        parser_class=Parser,
        health_check_interval=0,
        decode_responses=False,
        client_name="celery_redlock",  # TLS 1.3 needs some command in the handshake
        socket_connect_timeout=timeout,
        socket_timeout=timeout,
    )
    if issubclass(kind, UnixDomainSocketConnection):
        name = str(arguments.get("path", ""))
    else:
        if re.search("[@/]", str(arguments.get("host", ""))):
            raise ValueError("what is given as its host is a URL or a path: name the host alone")
        name = f"{arguments.get('host', 'localhost')}:{arguments.get('port', 6379)}"
        arguments.update(socket_keepalive=True, socket_keepalive_options=_KEEPALIVE)
    known = inspect.signature(AbstractConnection.__init__).parameters
    if "driver_info" in known:
        arguments["driver_info"] = None
    else:
        arguments.update(lib_name=None, lib_version=None)
    if "maint_notifications_config" in known:
        from redis.maint_notifications import MaintNotificationsConfig

        arguments["maint_notifications_config"] = MaintNotificationsConfig(enabled=False)
    tls = issubclass(kind, SSLConnection)
    named = bool(arguments.get("ssl_check_hostname", True))
    checked = not tls or (named and _certified(arguments))
    return Address(
        printable(name), kind, arguments, "" if checked else "ssl_cert_reqs, ssl_check_hostname"
    )


def _given(arguments: Mapping[str, Any]) -> set[str]:
    return {name for name, value in arguments.items() if value}


def _certified(arguments: Mapping[str, Any]) -> bool:
    """Return True if a TLS connection requires a certificate that it can trust."""
    return arguments.get("ssl_cert_reqs", "required") not in (None, "none", ssl.CERT_NONE)


def _same_server(address: Address) -> str:
    host, colon, port = address.name.rpartition(":")
    if colon and host in ("localhost", "::1", "127.0.0.1"):
        return f"localhost:{port}"
    return address.name.lower()
