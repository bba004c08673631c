"""What is wrong with the keys on the nodes under our prefix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..protocol.errors import QuorumUnavailable
from ..survey.models import KINDS, Entry, Survey
from ..survey.snapshot import survey
from .report import Finding, run, some, unchecked, warning, wrong

if TYPE_CHECKING:
    from ..locking.redlock import Redlock

__all__ = ["examine_keys"]

MAX_KEY_CHARS = 60
"""Of a key that a finding names: enough to search for it."""


def examine_keys(redlock: Redlock, timeout: float) -> Iterator[Finding]:
    """Look at all keys under the prefix; a node that is silent for `timeout` seconds is away."""
    found: Survey | None = None
    try:
        found = survey(redlock, kinds=KINDS, timeout=timeout)
        silent = [(look.name, look.error) for look in found.looks if not look.reachable]
    except QuorumUnavailable as error:
        silent = [(vote.node, vote.detail) for vote in error.votes if vote.detail]
    for node, why in silent:
        yield from run({"leaks": _unread}, node, why)
    if found is not None:
        yield from run({"leaks": _leaks, "prefix": _foreign}, "", found, redlock.prefix)


def _unread(why: str) -> Iterator[Finding]:
    scan = "+scan" if "scan" in why else "+scan +zcard +zrange"
    fix = f"ACL SETUSER ... {scan}; locks need none of them" if "NOPERM" in why else "see above"
    yield unchecked(f"its keys could not be read: {why}", fix, hides=("prefix",))


def _leaks(found: Survey, prefix: str) -> Iterator[Finding]:
    leaked = [entry for entry in found.entries if entry.leaked]
    if leaked:
        looks = enumerate(found.looks)
        nodes = [look.name for n, look in looks if any(entry.leaked_on(n) for entry in leaked)]
        yield wrong(
            f"{len(leaked)} under {prefix!r} without a ttl, on {', '.join(nodes)}: no lock of ours"
            " is, and what they name is locked forever",
            "see whose they are (show KEY), and delete them on these nodes; nothing expires them",
            where=_keys(leaked),
        )


def _foreign(found: Survey, prefix: str) -> Iterator[Finding]:
    foreign = [entry for entry in found.entries if entry.kind == "foreign"]
    if foreign:
        yield warning(
            f"{len(foreign)} under {prefix!r} that no release of this library has written: they"
            " keep locks of these names from being taken",
            "give locks a redlock_prefix, or a database, that no other program uses",
            where=_keys(foreign),
        )


def _keys(entries: list[Entry]) -> str:
    long = MAX_KEY_CHARS
    keys = [entry.key for entry in entries]
    return some([key if len(key) <= long else f"{key[:long]}..." for key in keys])
