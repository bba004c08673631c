"""Checks of the keys on the nodes under our prefix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..protocol.errors import QuorumUnavailable
from ..survey.models import KINDS, Entry, NodeLook
from ..survey.snapshot import survey
from .report import Finding, some, unchecked, warning, wrong

if TYPE_CHECKING:
    from ..locking.redlock import Redlock

__all__ = ["examine_keys"]

CLUSTER_ERRORS = ("CLUSTERDOWN", "MOVED", "CROSSSLOT")
"""First words of errors from a member of a Redis Cluster."""
MAX_KEY_CHARS = 60
"""Characters of a key in a finding: enough to search for it."""


def examine_keys(redlock: Redlock, timeout: float) -> Iterator[Finding]:
    """Check all keys under the prefix; a node that is silent for `timeout` seconds is skipped."""
    entries: tuple[Entry, ...] = ()
    looks: tuple[NodeLook, ...] = ()
    try:
        found = survey(redlock, kinds=KINDS, timeout=timeout)
        entries, looks = found.entries, found.looks
        silent = [(look.name, look.error) for look in looks if not look.reachable]
    except QuorumUnavailable as error:
        silent = [(vote.node, vote.detail) for vote in error.votes if vote.detail]
    for node, why in silent:
        if why.startswith(CLUSTER_ERRORS):
            continue  # the check of its role reports that
        scan = "+scan" if "scan" in why else "+scan +zcard +zrange"
        rights = f"ACL SETUSER ... {scan}; locks need none of them"
        what, fix = f"its keys could not be read: {why}", rights if "NOPERM" in why else "see above"
        yield unchecked(what, fix, node, "leaks", ("prefix",))
    if leaked := [entry for entry in entries if entry.leaked]:
        of_nodes = enumerate(looks)
        nodes = [look.name for n, look in of_nodes if any(entry.leaked_on(n) for entry in leaked)]
        yield wrong(
            f"{len(leaked)} under {redlock.prefix!r} without a ttl, on {', '.join(nodes)}: no lock"
            " of ours is, and what they name is locked forever",
            "see whose they are (show KEY), and delete them on these nodes; they never expire",
            where=_keys(leaked),
            check="leaks",
        )
    if foreign := [entry for entry in entries if entry.kind == "foreign"]:
        yield warning(
            f"{len(foreign)} under {redlock.prefix!r} that no release of this library has written:"
            " they keep locks of these names from being taken",
            "give locks a redlock_prefix, or a database, that no other program uses",
            where=_keys(foreign),
            check="prefix",
        )


def _keys(entries: list[Entry]) -> str:
    long = MAX_KEY_CHARS
    keys = [entry.key for entry in entries]
    return some([key if len(key) <= long else f"{key[:long]}..." for key in keys])
