"""Stand-alone server for the page and the exporter: waitress, on a checked address."""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..protocol.errors import ConfigurationError

__all__ = ["LOOPBACK", "check_bind", "host_in", "is_known", "is_loopback", "names_for", "serve"]

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""Names under which a browser on this machine reaches it."""

THREADS = 8
"""Pages rendered at a time; each waits for the nodes for a second or two at most."""
MAX_IDLE_CONNECTIONS = 100
"""Connections that may be open without a whole request; beyond it, the oldest are closed."""
MAX_CONNECTIONS = 500
"""Connections in all: leaves room for those that arrive within the second between two checks."""
IDLE_TIMEOUT_S = 30
"""Seconds without a byte after which a connection is closed."""

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[0-9a-z._-]+)(?::[0-9]{1,5})?")


def host_in(header: str) -> str:
    """Return the name in a Host header, without its port; empty if the header is invalid."""
    found = HOST.fullmatch(header.lower())
    return found[1] if found is not None else ""


def is_known(name: str, known: Iterable[str]) -> bool:
    """Return True if a host name is in `known`; ".example.org" stands for all names below it."""
    return bool(name) and any(
        name.endswith(one) if one.startswith(".") else name == one for one in known
    )


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach an address. Of names, only localhost counts."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_bind(host: str, token: str | None, public: bool) -> None:
    """Check that the page may be served on this address.

    Raises:
        ConfigurationError: Other machines can reach it without --public, or with it and without a
            token.
    """
    if not public and not is_loopback(host):
        raise ConfigurationError(
            f"other machines can reach {host}: listen on 127.0.0.1, or allow them with --public and"
            " a token"
        )
    if public and not token:
        raise ConfigurationError(
            "--public lets other machines reach the dashboard, so it needs a token: set"
            " REDLOCK_WEB_TOKEN"
        )


def names_for(host: str, names: Sequence[str]) -> list[str]:
    """Return the host names of the page: loopback's, the address itself, and the given ones."""
    address = [] if host in ("0.0.0.0", "::") else [host]
    return list(dict.fromkeys([*LOOPBACK, *address, *names]))


def serve(app: Any, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until interrupted.

    Args:
        app: The WSGI app.
        host: The address to bind to.
        port: The port; 0 for a free one.
        ready: Called once with the address of the server.

    Raises:
        ConfigurationError: waitress is not installed, or the address cannot be bound to.
    """
    try:
        from waitress.server import create_server  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise ConfigurationError(
            'serving needs waitress: pip install "celery-redlock[web]", or [prometheus] for the'
            " exporter alone"
        ) from None
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # a burst needs no warning
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        raise ConfigurationError(
            f"cannot serve on {host} port {port}: {error.strerror or error}"
        ) from None
    server = create_server(
        app,
        sockets=[listener],
        threads=THREADS,
        ident="",
        clear_untrusted_proxy_headers=True,
        connection_limit=MAX_CONNECTIONS,
        channel_timeout=IDLE_TIMEOUT_S,
        cleanup_interval=1,
        asyncore_use_poll=True,  # select() fails from descriptor 1024 of the process on
    )
    _make_room(server)
    try:
        name = f"[{host.strip('[]')}]" if family == socket.AF_INET6 else host
        ready(f"http://{name}:{listener.getsockname()[1]}/")
        server.run()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()


def _make_room(server: Any) -> None:
    """Close the oldest idle connections beyond the limit, so that they cannot block the page."""
    maintain = server.maintenance

    def maintenance(now: float) -> None:
        maintain(now)
        idle = [channel for channel in server.active_channels.values() if not channel.requests]
        idle.sort(key=lambda channel: channel.creation_time)
        for channel in idle[: max(0, len(idle) - MAX_IDLE_CONNECTIONS)]:
            channel.will_close = True

    server.maintenance = maintenance
