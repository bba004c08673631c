"""Parse the URL of a PostgreSQL database: how to connect, and a name without secrets."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import psycopg
from psycopg import conninfo

from ...protocol.errors import ConfigurationError, NodeError
from ...protocol.texts import printable
from ..secrecy import PLAIN, Exposed, is_clear, is_here

__all__ = ["PostgresAddress", "parse", "reason"]

CONNECT_TIMEOUT_S = 2
"""Seconds to connect to each host, unless the URL sets others: libpq accepts no less."""
DEFAULTS = {
    "application_name": "celery_redlock",
    "target_session_attrs": "read-write",  # chooses the primary of a cluster's hosts
    # The kernel gives up a host that does not even acknowledge packets within ten seconds.
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
CHOICES = {
    "channel_binding": "disable, prefer, require",
    "gssencmode": "disable, prefer, require",
    "load_balance_hosts": "disable, random",
    "sslcertmode": "disable, allow, require",
    "sslmode": "disable, allow, prefer, require, verify-ca, verify-full",
    "sslnegotiation": "postgres, direct",
    "target_session_attrs": "any, read-write, read-only, primary, standby, prefer-standby",
}
"""The values of some options, which libpq checks only when it connects."""
NUMBERS = r"connect_timeout|tcp_user_timeout|keepalives(_idle|_interval|_count)?"
"""Pattern of the options that are whole numbers; likewise."""


@dataclass(frozen=True)
class PostgresAddress:
    """The address of one database.

    Attributes:
        name: `host:port/database`; never a credential.
        arguments: The arguments to connect with. They contain the password: never log or show them.
        unverified: If TLS accepts any certificate or name: the setting that makes it check them.
            Else empty.
    """

    name: str
    arguments: Mapping[str, Any] = field(repr=False)
    store: ClassVar[str] = "PostgreSQL"
    least_timeout: ClassVar[float] = 0.0
    moves: ClassVar[bool] = True

    @property
    def unverified(self) -> str:
        return "sslmode" if self._setting("sslmode") in ("require", "verify-ca") else ""

    @property
    def exposed(self) -> Exposed:
        """The way in which others can learn the password that is sent there, if there is one.

        Without `sslmode`, or with `prefer`, libpq accepts a server that claims not to support TLS,
        and sends the password in the form that the server asks for.
        """
        hosts = (self._setting("host") or self._setting("hostaddr")).split(",")
        passwords = ("password", "passfile")
        if (
            self._setting("sslmode") in ("require", "verify-ca", "verify-full")
            or all(map(is_here, hosts))
            or not (
                any(map(self._setting, passwords))
                or os.path.exists(os.path.expanduser("~/.pgpass"))
            )
        ):
            return None
        return PLAIN, "add ?sslmode=verify-full&sslrootcert=PATH to its URL"

    def _setting(self, name: str) -> str:
        return str(self.arguments.get(name) or os.environ.get(f"PG{name.upper()}") or "")

    def connect(self, **changed: Any) -> psycopg.Connection[tuple[Any, ...]]:
        """Return a new connection that commits each statement; `changed` replaces some arguments.

        Raises:
            NodeError: The server cannot be reached, or it refuses us.
        """
        try:
            return psycopg.connect(**{**self.arguments, **changed}, autocommit=True)
        except Exception as error:
            raise NodeError(reason(error), node=self.name) from None


def parse(url: str, where: str) -> PostgresAddress:
    """Return the address that a URL names.

    Args:
        url: `postgresql://user:password@host:port/database?option=value`, as libpq reads it; parts
            that are missing come from libpq's environment variables and password file.
        where: Name of the URL in errors.

    Raises:
        ConfigurationError: libpq cannot parse it, or an option is invalid.
    """
    given = None
    if is_clear(url):
        with contextlib.suppress(psycopg.Error, ValueError):  # their text may quote the password
            given = conninfo.conninfo_to_dict(url)
    ports = str((given or {}).get("port") or 5432).split(",")
    if given is None or not all(re.fullmatch("[0-9]{0,5}", port) for port in ports):
        raise ConfigurationError(
            f"{where}: not a PostgreSQL URL that libpq understands; write"
            " postgresql://user:password@host:5432/database (@, :, / and % in a password are"
            " written %40, %3A, %2F and %25)"
        )
    _check(given, where)
    arguments = {**DEFAULTS, **given}
    arguments["client_encoding"] = "utf8"  # names are sent in it, whatever the server's encoding
    arguments.setdefault("connect_timeout", CONNECT_TIMEOUT_S)
    hosts = str(given.get("host") or given.get("hostaddr") or "localhost").split(",")
    ports *= len(hosts) if len(ports) == 1 else 1
    places = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=False)]
    name = f"{','.join(places)}/{given.get('dbname') or given.get('user') or ''}"
    return PostgresAddress(printable(name), arguments)


def _check(given: Mapping[str, Any], where: str) -> None:
    """Raise an error for an option that libpq would refuse at each connection."""
    for name, value in given.items():  # which is not shown: it may be part of a password
        if name in CHOICES and value not in CHOICES[name].split(", "):
            raise ConfigurationError(f"{where}: its {name} is none of {CHOICES[name]}")
        if re.fullmatch(NUMBERS, name) and not re.fullmatch("-?[0-9]{1,9}", value):
            raise ConfigurationError(f"{where}: its {name} is not a whole number")


def reason(error: BaseException) -> str:
    """Return the reason of an error, in one line without secrets."""
    if isinstance(error, psycopg.Error):
        said = error.diag.message_primary or str(error)
    elif isinstance(error, (NodeError, OSError)):
        said = str(error)
    else:
        return f"{type(error).__name__} while connecting"
    return printable(" ".join(said.split())[:200]) or type(error).__name__
