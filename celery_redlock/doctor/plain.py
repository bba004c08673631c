"""Checks of a server of a kind that has no checks of its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..protocol.node_info import NodeInfo
from ..stores.contract import Wanted
from ..stores.plain import FOREVER_S
from .report import KEY_CHECKS, Finding, wrong
from .report import PLAIN_CHECKS as CHECKS
from .tls import secrecy

if TYPE_CHECKING:
    from ..stores.plain import PlainReader

__all__ = ["CHECKS", "COMMON", "NODE_CHECKS", "SILENT_CHECKS", "Details", "tried", "visit"]

TRY_S = 5.0
"""Ttl of the trial lock; seconds."""


@dataclass(frozen=True)
class Details:
    """The answers of a server.

    Attributes:
        info: Its `server_version`, as for other kinds of store.
        facts: The facts that count for the restart guard.
        peer: The IP address that answered; empty if it is not known.
        fails: The error of a trial lock; empty if it worked, or there was no trial.
    """

    info: Mapping[str, str]
    facts: NodeInfo
    peer: str
    fails: str


def visit(reader: PlainReader, *, tries: bool) -> Details:
    """Query a server; if `tries`, also acquire a lock with a random name and release it."""
    facts = NodeInfo(run_id=reader.run_id, uptime=FOREVER_S, role="master")
    fails = tried(reader) if tries else ""
    return Details({"server_version": ""}, facts, reader.peer, fails)


def tried(reader: PlainReader) -> str:
    """Acquire a lock with a random name and release it; return what failed."""
    wanted = Wanted((f"{reader.prefix}doctor:{secrets.token_hex(16)}",), "doctor", TRY_S)
    store = reader.connection
    try:
        held = store.acquire(wanted).holder is None and store.extend(wanted)
        if not store.release(wanted) or not held:
            return "it granted a lock and did not keep it"
    except Exception as error:
        return reader.why(error)
    return ""


def _reachable(probe: Any, *_: Any) -> Iterator[Finding]:
    why = probe.look.error or "it does not answer in time"
    hidden = (*NODE_CHECKS, *COMMON, *KEY_CHECKS)
    yield wrong(f"it cannot be asked: {why}", "start it, or correct the URL", hides=hidden)


def _writes(probe: Any, *_: Any) -> Iterator[Finding]:
    if probe.details.fails:
        yield wrong(f"a trial lock failed: {probe.details.fails}", "see to that on its side")


SILENT_CHECKS = {"reachable": _reachable}
NODE_CHECKS = {"writes": _writes, "tls": secrecy}
COMMON = ("restart", "ttl")
