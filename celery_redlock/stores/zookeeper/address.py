"""Parse the URL of a ZooKeeper ensemble; a name for it without secrets."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar
from urllib.parse import unquote

from ...protocol.errors import ConfigurationError
from ..secrecy import PLAIN, Exposed, is_here, parted_members
from ..tls import OPTIONS, check_options, unverified

__all__ = ["QUIET", "SESSION_FACTOR", "ZooKeeperAddress", "parse"]

PORT = 2181
CHROOT = "/celery_redlock"
TTL_S, MIN_TTL_S = 20.0, 5.0
"""Default of the longest ttl of a lock, and the least that a URL may set; seconds. A session lasts
twice as long (`SESSION_FACTOR`): with the usual tick of 2 s a server grants at most 20 ticks."""
SESSION_FACTOR = 2
"""A session must outlast the ttl of the locks in it. The leader counts it from the last request
that it has heard of. A server that froze after an answer has not told it of that request: then it
is the one before. Neither is older than `QUIET` ttls than the next (`Session._refresh`), and a
server reports after half a tick. So the session ends 2 ttl - 2 * 0.4 ttl - tick/2 after a request
at the earliest, which is no less than the ttl for ticks of up to 0.4 ttl."""
QUIET = 0.4
"""Part of the ttl after which a connection without a transaction is made anew before the next one:
the leader hears of a new connection at once. Extensions come each third of the ttl."""
LONGEST_TICK = 2 * (SESSION_FACTOR - 1 - 2 * QUIET)
"""The longest tick for which a session outlasts the ttl, as a part of the ttl."""


@dataclass(frozen=True)
class ZooKeeperAddress:
    """The address of one ensemble.

    Attributes:
        name: `host:port,host:port/chroot`; never a credential.
        members: Host and port of each server in the URL, as `host:port`.
        chroot: The node under which all of ours are.
        longest_ttl: Seconds that a lock is held at most without an extension.
        user: `user:password`, for the scheme `digest`; None without.
        tls: The options for the TLS context; None for no TLS.
    """

    name: str
    members: tuple[str, ...]
    chroot: str
    longest_ttl: float
    user: str | None = field(repr=False)
    tls: Mapping[str, str] | None = field(repr=False)
    store: ClassVar[str] = "ZooKeeper"
    least_timeout: ClassVar[float] = 2.0
    """Minimum seconds to wait for an answer, so that another server can give it."""
    moves: ClassVar[bool] = False

    @property
    def identity(self) -> str:
        return ",".join(sorted(self.members)) + self.chroot

    @property
    def unverified(self) -> str:
        return unverified(self.tls)

    @property
    def session(self) -> float:
        """The seconds that a session must last."""
        return SESSION_FACTOR * self.longest_ttl

    def too_slow(self, shortest: float) -> str:
        """Return what is wrong if this is the shortest session that the servers grant, in seconds.

        It is two ticks, unless `minSessionTimeout` is set. Empty if nothing is wrong.
        """
        if (tick := shortest / 2) <= (longest := round(LONGEST_TICK * self.longest_ttl, 3)):
            return ""
        return (
            f"a tickTime of {tick:g} s is too long for the ttl: write"
            f" ?ttl={math.ceil(tick / LONGEST_TICK)} at the end of its URL, or let tickTime be at"
            f" most {longest:g} s"
        )

    @property
    def exposed(self) -> Exposed:
        """The way in which others can learn the password that is sent there, if there is one."""
        hosts = (member.rpartition(":")[0].strip("[]") for member in self.members)
        if self.user is None or self.tls is not None or all(map(is_here, hosts)):
            return None
        return PLAIN, "write zookeepers://, and name the secureClientPort of the servers"


def parse(url: str, where: str) -> ZooKeeperAddress:
    """Return the address that a URL names.

    Args:
        url: `zookeeper://user:password@host:port,host:port/chroot?ttl=20`, or `zookeepers://` with
            TLS, and then also the options of `tls.py`.
        where: Name of the URL in errors.

    Raises:
        ConfigurationError: It is invalid.
    """
    forms = (
        "its servers cannot be understood; write zookeeper://host:2181,host:2181/chroot, or"
        " zookeeper://user:password@host:2181"
    )
    parts, credentials, members, options = parted_members(url, where, forms, _member)
    if len(set(members)) < len(members):
        raise ConfigurationError(f"{where}: it names a server twice; name each once")
    chroot = unquote(parts.path).rstrip("/") or CHROOT
    if not re.fullmatch(r"(/(?!\.{1,2}(/|$))[!-.0-~]+)+", chroot):
        raise ConfigurationError(f"{where}: its path is no node of ZooKeeper; write /one/two")
    try:
        ttl = float(options.pop("ttl", TTL_S))
    except ValueError:
        ttl = 0.0
    secure = parts.scheme == "zookeepers"
    if any(not secure or name not in OPTIONS for name in options):
        raise ConfigurationError(
            f"{where}: a zookeeper:// URL takes the option ttl, and no other; zookeepers:// also"
            f" takes {', '.join(OPTIONS)}"
        )
    if secure:
        check_options(options, where)
    if not MIN_TTL_S <= ttl <= 86_400:
        raise ConfigurationError(
            f"{where}: ttl is the longest ttl of a lock in seconds, {MIN_TTL_S:g} or more; a"
            " session lasts twice as long"
        )
    name = ",".join(members) + chroot
    user, tls = unquote(credentials) or None, options if secure else None
    return ZooKeeperAddress(name, tuple(members), chroot, ttl, user, tls)


def _member(host: str) -> str:
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::(\d{1,5}))?", host)
    if found is None or not 0 < int(found[2] or PORT) < 65_536:
        raise ValueError
    return f"{found[1]}:{found[2] or PORT}"
