"""Parse the URL of a Redis whose address moves: the master of a service that Sentinels watch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from redis.backoff import NoBackoff
from redis.connection import parse_url, to_bool
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from ..secrecy import is_among

__all__ = ["pool_of"]

PORT = 26379
"""Port of a Sentinel, unless the URL has another."""
SENTINEL_PREFIX = "sentinel_"
"""Prefix of a URL's arguments for the connections to the Sentinels."""


class Watching(Sentinel):
    """A client for some Sentinels.

    Attributes:
        masters: The hosts that they may name, see `is_among`; empty for any host.
    """

    masters: Sequence[str] = ()

    def check_master_state(self, state: Any, service_name: str) -> bool:
        """Return False for an answer that must not count, so that the next Sentinel is asked."""
        ours = super().check_master_state(state, service_name)  # type: ignore[no-untyped-call]
        return bool(ours) and is_among(str(state["ip"]), self.masters)


def pool_of(url: str, timeout: float) -> SentinelConnectionPool:
    """Return the pool that a URL names: `sentinel://user:password@one:26379,two/service?db=0`.

    User and password are the master's. Arguments that begin with `sentinel_` are for the Sentinels
    (`sentinel_password`), all others for the master, as in a URL of redis-py; `ssl=true` for TLS.
    `masters=10.0.0.0/24,db.example`: the hosts that Sentinels may name. `timeout`: seconds to wait
    for each Sentinel.

    Raises:
        ValueError: It names no service, or no host, or `masters` is invalid.
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
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    masters = given.pop("masters").lower().split(",") if "masters" in given else []
    is_among("", masters)  # raises ValueError if they are invalid
    asking = {k: v for k, v in given.items() if k.startswith(SENTINEL_PREFIX)}
    master = _arguments(credentials, {k: v for k, v in given.items() if k not in asking})
    asking = _arguments("", {k.removeprefix(SENTINEL_PREFIX): v for k, v in asking.items()})
    manager = Watching(  # type: ignore[no-untyped-call]
        sentinels,
        sentinel_kwargs={
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": Retry(NoBackoff(), 0),
            **asking,
        },
    )
    manager.masters = masters
    return SentinelConnectionPool(service, manager, **master)


def _arguments(credentials: str, given: dict[str, str]) -> dict[str, Any]:
    """Return the arguments of a connection: parsed by redis-py, which knows no `ssl`, and `ssl`."""
    url = f"redis://{credentials}{'@' if credentials else ''}-?{urlencode(given)}"
    arguments = {name: value for name, value in parse_url(url).items() if name != "host"}
    if to_bool(arguments.pop("ssl", "")):
        arguments["ssl"] = True
        # redis-py's default since 6.0.
        certified = arguments.get("ssl_cert_reqs") != "none"
        arguments.setdefault("ssl_check_hostname", certified)
    return arguments


def _place(host: str) -> tuple[str, int]:
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        name, port = host, str(PORT)
    name = name.removeprefix("[").removesuffix("]")
    if not name or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError("a Sentinel's address is not host:port, with a port from 1 to 65535")
    return name, int(port)
