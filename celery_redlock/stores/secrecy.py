"""Keep a node's password secret, in all output and on its way to the node."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from ipaddress import ip_address, ip_network
from typing import TypeAlias, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ..protocol.errors import ConfigurationError

__all__ = ["PLAIN", "Exposed", "is_among", "is_clear", "is_here", "options_in", "parted"]
__all__ += ["parted_members"]

T = TypeVar("T")

Exposed: TypeAlias = "tuple[str, str] | None"
"""The way in which others can learn a node's password, and the remedy; None if there is no way."""
PLAIN = "its password goes over the network as plain text"

_URL = r"[\w+]+://(?:[^/?#]*@)?([^@?#]*)(\?[^@#]*)?"
"""Pattern of a URL whose host and database cannot belong to an unquoted password: no @ follows."""
_URL_OF_LIBPQ = r"\w+://(?:[^/@]*@)?([^@?#]*)(\?[^@]*)?"
"""The same as libpq reads it: its user and password end at the first @, and may hold ? and #."""


def is_clear(url: str, shape: str = _URL_OF_LIBPQ) -> bool:
    """Return True if it is clear where the user and the password of a URL end."""
    found = re.fullmatch(shape, url)
    # Parsers drop line ends, or stop at a NUL. A quoted @ before a host is a URL quoted as a whole.
    return url.isprintable() and found is not None and "@" not in unquote(found[1])


def parted(url: str) -> SplitResult:
    """Return the parts of a URL, as its parsers see them.

    Raises:
        ValueError: It is not clear where its user and password end. Neither the error nor its
            context contains any part of the URL.
    """
    parts = None
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
    if parts is None or not is_clear(url, _URL):
        raise ValueError(
            "it is not clear where its password ends, so it is not shown; in a user and a password"
            " write @ as %40, / as %2F, : as %3A, ? as %3F, # as %23 and % as %25, and what cannot"
            " be printed likewise"
        )
    return parts


def options_in(query: str) -> dict[str, str]:
    """Return the options in the query of a URL.

    Raises:
        ValueError: An option is there twice. The error names none: it may be part of a password.
    """
    given = parse_qsl(query, keep_blank_values=True)
    options = dict(given)
    if len(options) < len(given):
        raise ValueError("an option of its URL is there twice; give each once")
    return options


def parted_members(
    url: str, where: str, forms: str, member: Callable[[str], T]
) -> tuple[SplitResult, str, list[T], dict[str, str]]:
    """Return the parts of a URL of several servers, its credentials, the servers and its options.

    Args:
        url: `scheme://user:password@host:port,host:port`.
        where: Name of the URL in errors.
        forms: The forms that it may have, for the error.
        member: Function that returns one server; it raises ValueError if there is none.

    Raises:
        ConfigurationError: It is invalid. Neither the error nor its context contains any part of
            the URL.
    """
    credentials, members = "@", list[T]()
    with contextlib.suppress(ValueError):  # its text may quote the password
        parts = parted(url)
        credentials, _, hosts = parts.netloc.rpartition("@")
        members = [member(host) for host in hosts.split(",")]
    if not members or "@" in credentials:
        raise ConfigurationError(
            f"{where}: {forms} (@, :, /, ? and # in a password are written %40, %3A, %2F, %3F and"
            " %23)"
        )
    try:
        return parts, credentials, members, options_in(parts.query)
    except ValueError as error:
        raise ConfigurationError(f"{where}: {error}") from None


def is_here(host: str) -> bool:
    """Return True if a host is this machine, so that nothing sent to it is on a network.

    host: A name, an address, a network of addresses or the path of a socket.
    """
    try:
        return ip_network(host).is_loopback
    except ValueError:
        return host in ("", "localhost") or host.startswith(("/", "@"))


def is_among(host: str, named: Sequence[str]) -> bool:
    """Return True if a host matches `named`: names, `*.domain`, addresses and networks.

    If none is named, every host matches.

    Raises:
        ValueError: One of `named` cannot be understood.
    """
    name = host.lower()
    found = not named
    for one in named:
        if re.fullmatch(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*", one):
            found |= name.endswith(one[1:]) if one[0] == "*" else name == one
            continue
        try:
            network = ip_network(one)
        except ValueError:
            raise ValueError(
                f"{one!r} is no host in small letters, no *.domain and no network such as"
                " 10.0.0.0/24"
            ) from None
        with contextlib.suppress(ValueError):  # the host is a name
            found |= ip_address(host) in network
    return found
