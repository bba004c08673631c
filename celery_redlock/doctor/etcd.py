"""Checks of one etcd cluster."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..protocol.errors import NodeError
from ..protocol.node_info import NodeInfo
from .report import ETCD_CHECKS as CHECKS
from .report import KEY_CHECKS, Finding, warning, wrong
from .tls import secrecy

if TYPE_CHECKING:
    from ..stores.etcd.reader import EtcdReader

__all__ = ["CHECKS", "COMMON", "NODE_CHECKS", "SILENT_CHECKS", "Details", "visit"]

TRY_S = 5
"""Ttl of the key of the trial, in whole seconds."""


@dataclass(frozen=True)
class Details:
    """The answers of a cluster.

    Attributes:
        info: Its `server_version`, as for other kinds of store.
        facts: The facts that count for the restart guard.
        peer: The IP address that answered.
        members: Each member in the URL, with the reason if it cannot be asked; empty if it can.
        clusters: The ids of the clusters that the members belong to.
        alarms: The alarms it raises.
        fails: The error of a trial put; empty if it worked, or there was no trial.
    """

    info: Mapping[str, str]
    facts: NodeInfo
    peer: str
    members: Mapping[str, str]
    clusters: frozenset[str]
    alarms: tuple[str, ...]
    fails: str


def visit(reader: EtcdReader, *, tries: bool) -> Details:
    """Query a cluster and each of its members; if `tries`, also put a key and delete it."""
    from ..stores.etcd.address import reason
    from ..stores.etcd.handshake import introduce
    from ..stores.etcd.wire import text

    facts = introduce(reader.connection, reader.keys)
    alarms: list[str] = []
    fails = ""
    if tries:
        key = text(reader.prefix.encode() + b"doctor:" + secrets.token_hex(16).encode())
        with contextlib.suppress(NodeError):  # reading alarms is a right of administrators
            said = reader.ask("maintenance/alarm")
            alarms = [str(one.get("alarm")) for one in said.get("alarms", ())]
        try:
            lease = reader.ask("lease/grant", TTL=str(TRY_S))["ID"]
            reader.ask("kv/put", key=key, lease=lease)
            reader.ask("kv/deleterange", key=key)
        except Exception as error:
            fails = reason(error)
    members, clusters = reader.members()
    info = {"server_version": reader.connection.version}
    return Details(info, facts, reader.peer, members, clusters, tuple(alarms), fails)


def _reachable(probe: Any, *_: Any) -> Iterator[Finding]:
    why = probe.look.error or "it does not answer in time"
    what, fix = f"no member can be asked: {why}", "start it, or correct the URL"
    if "user name is empty" in why or "authentication" in why:
        what, fix = f"it requires a login: {why}", "write etcd://user:password@host:2379"
    elif "HTTP status" in why:
        what = f"the server is not etcd 3.4 or newer: {why}"
        fix = "name such members"
    elif "wants TLS" in why:
        fix = "write etcds://"
    elif len(probe.address.members) > 1:
        fix += "; more than half of the members must run"
    yield wrong(what, fix, hides=(*NODE_CHECKS, *COMMON, *KEY_CHECKS))


def _members(probe: Any, *_: Any) -> Iterator[Finding]:
    away = {name: why for name, why in probe.details.members.items() if why}
    for name, why in away.items():
        yield warning(
            f"its member {name} cannot be asked: {why}",
            "start it: without a majority of the members nothing can be locked",
        )
    if len(probe.details.clusters) > 1:
        yield wrong(
            "the members in the URL are of several clusters, which do not know each other's locks",
            "name the members of one",
        )
    if len(probe.details.members) == 1:
        yield warning(
            "the URL names one member: nothing can be locked while that one is away",
            "name all members of the cluster, as etcd://one:2379,two:2379,three:2379",
        )


def _version(probe: Any, *_: Any) -> Iterator[Finding]:
    if "is needed" in probe.details.facts.unfit:
        yield wrong(probe.details.facts.unfit, "upgrade it: older ones answer under another path")


def _rights(probe: Any, *_: Any) -> Iterator[Finding]:
    why = probe.details.facts.unfit if "refuses us" in probe.details.facts.unfit else ""
    if not why and "permission denied" in probe.details.fails:
        why = probe.details.fails
    if why:
        yield wrong(f"its user lacks a right: {why}", "grant it the role of docs/etcd.md")


def _writes(probe: Any, *_: Any) -> Iterator[Finding]:
    if "NOSPACE" in probe.details.alarms or "space exceeded" in probe.details.fails:
        yield wrong(
            "it takes no writes, as its space is used up (alarm NOSPACE)",
            "compact and defragment it, then etcdctl alarm disarm; set --auto-compaction-retention",
        )
    elif probe.details.fails and "permission denied" not in probe.details.fails:
        yield wrong(f"it takes no writes: {probe.details.fails}", "see to that on its side")


SILENT_CHECKS = {"reachable": _reachable}
COMMON = ("restart", "ttl")
NODE_CHECKS = {
    "version": _version,
    "rights": _rights,
    "writes": _writes,
    "members": _members,
    "tls": secrecy,
}
