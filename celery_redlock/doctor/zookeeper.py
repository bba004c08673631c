"""Checks of one ZooKeeper ensemble."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..protocol.node_info import NodeInfo
from ..stores.kinds import named
from ..stores.plain import FOREVER_S
from ..stores.tls import context_of
from .plain import tried
from .report import KEY_CHECKS, Finding, unchecked, warning, wrong
from .report import ZOOKEEPER_CHECKS as CHECKS
from .tls import secrecy

if TYPE_CHECKING:
    from ..stores.plain import PlainReader

__all__ = ["CHECKS", "COMMON", "NODE_CHECKS", "SILENT_CHECKS", "Details", "visit"]

ASK_S = 1.0
"""Seconds for the answer of one server to `srvr`."""
SHORT_TTL_S = 1.0
"""A ttl that is shorter than a URL can name. What the servers grant for it shows their tick."""
SHARED = "*"
"""Stands for a server that serves and does not answer `srvr`, because an operator forbids it."""


@dataclass(frozen=True)
class Details:
    """The answers of an ensemble.

    Attributes:
        info: Its `server_version`, as for other kinds of store.
        facts: The facts that count for the restart guard.
        peer: Empty.
        fails: The error of a trial lock; empty if it worked, or there was no trial.
        members: Each server in the URL, with its mode; "" if it does not serve.
        shortest: Seconds of the shortest session that it grants; at least `SHORT_TTL_S` twice.
        strangers: Nodes of other programs under the chroot.
        open: True if everybody may delete locks although we have a user.
    """

    info: Mapping[str, str]
    facts: NodeInfo
    peer: str
    fails: str
    members: Mapping[str, str]
    shortest: float
    strangers: tuple[str, ...]
    open: bool


def visit(reader: PlainReader, *, tries: bool) -> Details:
    """Query an ensemble and each of its servers; if `tries`, also acquire a lock and release it."""
    store: Any = reader.connection
    members, version = {}, ""
    for member in store.address.members:
        said = _srvr(member, store.address.tls)
        mode = re.search(r"^Mode: (\w+)", said, re.MULTILINE)
        members[member] = mode[1] if mode else SHARED if "whitelist" in said else ""
        found = re.search(r"Zookeeper version: ([\w.]+)", said)
        version = version or (found[1] if found else "")
        reader.heard_now()  # the ensemble is not silent while a server is asked
    strangers, everybody = store.around()
    brief: Any = named(reader.store).part("store")(replace(store.address, longest_ttl=SHORT_TTL_S))
    try:
        brief.connect()
    finally:
        brief.close()
    reader.heard_now()
    return Details(
        {"server_version": version},
        NodeInfo(run_id=reader.run_id, uptime=FOREVER_S, role="master"),
        "",
        tried(reader) if tries else "",
        members,
        brief.granted,
        tuple(sorted(strangers)),
        everybody,
    )


def _srvr(member: str, tls: Mapping[str, str] | None) -> str:
    host, _, port = member.rpartition(":")
    host, said = host.strip("[]"), b""
    try:
        connection = socket.create_connection((host, int(port)), ASK_S)
        if tls is not None:
            connection = context_of(tls).wrap_socket(connection, server_hostname=host)
        with connection:
            connection.sendall(b"srvr")
            while len(said) < 4096 and (data := connection.recv(4096)):
                said += data
    except OSError:
        pass
    return said.decode("utf-8", "replace")


def _reachable(probe: Any, *_: Any) -> Iterator[Finding]:
    why = probe.look.error or "it does not answer in time"
    what, fix = f"no server can be asked: {why}", "start it, or correct the URL"
    if "sessions of" in why or "let us make" in why:
        what, fix = why.split(": ", 1)
    elif "ACL" in why or "Auth" in why:
        what, fix = f"it refuses us: {why}", "put the right user and password into its URL"
    elif "older than" in why:
        what, fix = why, "upgrade it"
    elif len(probe.address.members) > 1:
        fix += "; more than half of the servers must run"
    yield wrong(what, fix, hides=(*NODE_CHECKS, *COMMON, *KEY_CHECKS))


def _members(probe: Any, *_: Any) -> Iterator[Finding]:
    members = probe.details.members
    for name in [name for name, mode in members.items() if not mode]:
        yield warning(
            f"its server {name} does not serve",
            "start it: without a majority of the servers nothing can be locked",
        )
    if any(mode == SHARED for mode in members.values()):
        yield unchecked(
            "some servers do not tell their mode", "add srvr to 4lw.commands.whitelist there"
        )
    if list(members.values()).count("standalone") and len(members) > 1:
        yield wrong(
            "the URL names several servers, and one of them is an ensemble of its own",
            "name the servers of one ensemble",
        )
    elif len(members) == 1:
        yield warning(
            "the URL names one server: nothing can be locked while that one is away",
            "name all servers of the ensemble, as zookeeper://one:2181,two:2181,three:2181",
        )


def _session(probe: Any, *_: Any) -> Iterator[Finding]:
    shortest, asked = probe.details.shortest, probe.address.session
    if why := probe.address.too_slow(shortest):
        what, _, fix = why.partition(": ")
        longer = f", and are held for {shortest:g} s after a process has died"
        yield warning(
            f"it grants no session of less than {shortest:g} s, which is two ticks unless"
            f" minSessionTimeout is set: {what}, and locks may be granted again while their holder"
            f" relies on them{longer if shortest > asked else ''}",
            fix,
        )


def _chroot(probe: Any, *_: Any) -> Iterator[Finding]:
    if probe.details.strangers:
        named = ", ".join(probe.details.strangers[:5])
        yield warning(
            f"another program has nodes under {probe.address.chroot}: {named}",
            "let the URL end in a path that nothing else uses",
        )


def _acl(probe: Any, *_: Any) -> Iterator[Finding]:
    if probe.details.open:
        yield warning(
            f"everybody may delete locks: {probe.address.chroot} was made without a user",
            "set the ACL of its nodes to auth::cdrwa, or name another path in the URL",
        )


def _writes(probe: Any, *_: Any) -> Iterator[Finding]:
    if probe.details.fails:
        yield wrong(f"a trial lock failed: {probe.details.fails}", "see to that on its side")


SILENT_CHECKS = {"reachable": _reachable}
NODE_CHECKS = {
    "writes": _writes,
    "members": _members,
    "session": _session,
    "chroot": _chroot,
    "acl": _acl,
    "tls": secrecy,
}
COMMON = ("restart", "ttl")
