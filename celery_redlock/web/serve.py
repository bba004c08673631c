"""Serves the page by itself: with waitress, on an address that was looked at first."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ConfigurationError

__all__ = ["LOOPBACK", "check_bind", "is_loopback", "names_for", "serve"]

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""The names that a browser on this machine has for it."""

THREADS = 8
"""Pages made at a time; each waits for the nodes for a second or two at most."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. A name is what it says only if it is ours."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_bind(host: str, token: str | None, public: bool) -> None:
    """Whether the page may be served there.

    Raises:
        ConfigurationError: Other machines can reach it, and that is not asked for; or it is, and
            there is no token.
    """
    if not public and not is_loopback(host):
        raise ConfigurationError(
            f"other machines can reach {host}: if they are to, say --public, with a token; else"
            " listen on 127.0.0.1"
        )
    if public and not token:
        raise ConfigurationError(
            "other machines are to reach the page (--public), and there is no token: set"
            " REDLOCK_WEB_TOKEN"
        )


def names_for(host: str, names: Sequence[str]) -> list[str]:
    """The host names under which it is served: loopback's, the address itself, and those given."""
    return list(
        dict.fromkeys([*LOOPBACK, *([host] if host not in ("0.0.0.0", "::") else []), *names])
    )


def serve(page: Any, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until interrupted.

    Args:
        page: The WSGI app.
        host: The address to bind to.
        port: The port; 0 for a free one.
        ready: Called once with the page's address.

    Raises:
        ConfigurationError: waitress is not installed, or the address cannot be bound to.
    """
    try:
        from waitress.server import create_server  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise ConfigurationError(
            'serving the page needs waitress: pip install "celery-redlock[web]"'
        ) from None
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # a burst is no news
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), port), family=family)
    except OSError as error:
        raise ConfigurationError(
            f"cannot serve on {host} port {port}: {error.strerror or error}"
        ) from None
    server = create_server(
        page,
        sockets=[listener],
        threads=THREADS,
        ident="",
        clear_untrusted_proxy_headers=True,
    )
    try:
        name = f"[{host.strip('[]')}]" if family == socket.AF_INET6 else host
        ready(f"http://{name}:{listener.getsockname()[1]}/")
        server.run()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
        page.close()
