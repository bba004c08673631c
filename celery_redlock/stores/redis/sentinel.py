"""Reads the URL of a Redis whose address moves: the master of a service that Sentinels watch."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

__all__ = ["pool_of"]

PORT = 26379
"""Where a Sentinel listens, unless the URL says otherwise."""
OF_SENTINELS = "sentinel_"
"""Begins the arguments of a URL that are for the connections to the Sentinels."""


def pool_of(url: str, timeout: float) -> SentinelConnectionPool:
    """Return the pool that a URL names: `sentinel://user:password@one:26379,two/service?db=0`.

    User and password are the master's. Arguments that begin with `sentinel_` are for the Sentinels
    (`sentinel_password`), all others for the master, as in a URL of redis-py. `timeout`: seconds
    to wait for each Sentinel.

    Raises:
        ValueError: It names no service, or no host.
    """
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    service = unquote(parts.path.strip("/"))
    sentinels = [_place(host) for host in hosts.split(",")]
    if re.search("@.*,", credentials):
        raise ValueError("its user and password stand once, before its first Sentinel")
    if not service:
        raise ValueError(
            "a Sentinel URL ends with the name of the master that it watches:"
            " sentinel://one:26379,two:26379/mymaster"
        )
    given = parse_qsl(parts.query)
    rest = urlencode([(k, v) for k, v in given if not k.startswith(OF_SENTINELS)])
    master = parse_url(f"redis://{credentials}{'@' if credentials else ''}-?{rest}")
    master.pop("host", None)
    asking = {k.removeprefix(OF_SENTINELS): v for k, v in given if k.startswith(OF_SENTINELS)}
    manager = Sentinel(
        sentinels,
        sentinel_kwargs={
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": Retry(NoBackoff(), 0),
            **asking,
        },
    )
    return SentinelConnectionPool(service, manager, **master)


def _place(host: str) -> tuple[str, int]:
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        name, port = host, str(PORT)
    name = name.removeprefix("[").removesuffix("]")
    if not name or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError("a Sentinel's address is not host:port, with a port from 1 to 65535")
    return name, int(port)
