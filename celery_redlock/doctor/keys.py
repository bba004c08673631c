"""What is wrong with what lies on the nodes under our prefix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..protocol.errors import QuorumUnavailable
from ..survey.models import KINDS, Entry
from ..survey.snapshot import survey
from .report import MANY, Finding

if TYPE_CHECKING:
    from ..locking.redlock import Redlock

__all__ = ["examine_keys"]


def examine_keys(redlock: Redlock, timeout: float) -> Iterator[Finding]:
    """Look at all keys under the prefix.

    Args:
        redlock: Whose nodes and prefix.
        timeout: Seconds after which a node counts as away.
    """
    try:
        found = survey(redlock, kinds=KINDS, timeout=timeout)
    except QuorumUnavailable as error:
        yield from (_unchecked(vote.node, vote.detail) for vote in error.votes if vote.detail)
        return
    for look in found.looks:
        if not look.reachable:
            yield _unchecked(look.name, look.error)
    leaked = [entry for entry in found.entries if entry.leaked]
    if leaked:
        where = [
            look.name for n, look in enumerate(found.looks) if any(_for_ever(e, n) for e in leaked)
        ]
        yield Finding(
            "wrong",
            "leaks",
            _keys(leaked),
            f"{len(leaked)} under {redlock.prefix!r} without a ttl, on {', '.join(where)}: no lock"
            " of ours is, and what they name is locked for ever",
            "see whose they are (show KEY), and delete them on these nodes; nothing expires them",
        )
    foreign = [entry for entry in found.entries if entry.kind == "foreign"]
    if foreign:
        yield Finding(
            "warning",
            "prefix",
            _keys(foreign),
            f"{len(foreign)} under {redlock.prefix!r} that no release of this library has written:"
            " they keep locks of these names from being taken",
            "give locks a redlock_prefix, or a database, that no other program uses",
        )


def _for_ever(entry: Entry, node: int) -> bool:
    """Whether a node has it without a ttl."""
    return any(ttls[node] == math.inf for ttls in (entry.ttls, *(r.ttls for r in entry.rivals)))


def _unchecked(node: str, why: str) -> Finding:
    scan = "+scan" if "scan" in why else "+scan +zcard +zrange"
    fix = f"ACL SETUSER ... {scan}; locks need none of them" if "NOPERM" in why else "see above"
    what = f"its keys could not be read: {why}"
    return Finding("unchecked", "leaks", node, what, fix, ("prefix",))


def _keys(entries: list[Entry]) -> str:
    names = [entry.key if len(entry.key) <= 60 else entry.key[:60] + "..." for entry in entries]
    more = len(names) - MANY
    return ", ".join(names[:MANY]) + (f" and {more} more" if more > 0 else "")
