"""Checks of the keys on the nodes under our prefix."""

from __future__ import annotations

import time
from collections.abc import Iterator
from shlex import quote
from typing import TYPE_CHECKING

from ..protocol.errors import QuorumUnavailable
from ..survey.durations import span
from ..survey.models import KINDS, Entry, NodeLook
from ..survey.snapshot import survey
from .report import KEY_CHECKS, Finding, some, unchecked, warning, wrong

if TYPE_CHECKING:
    from ..locking.pauses import Pause
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
    pauses: tuple[Pause, ...] = ()
    try:
        found = survey(redlock, kinds=KINDS, timeout=timeout)
        entries, looks, pauses = found.entries, found.looks, found.pauses
        silent = [(look.name, look.error) for look in looks if not look.reachable]
    except QuorumUnavailable as error:
        silent = [(vote.node, vote.detail) for vote in error.votes if vote.detail]
    for node, why in silent:
        if why.startswith(CLUSTER_ERRORS):
            continue  # the check of its role reports that
        scan = "+scan" if "scan" in why else "+scan +zcard +zrange"
        rights = f"ACL SETUSER ... {scan}; locks need none of them"
        what, fix = f"its keys could not be read: {why}", rights if "NOPERM" in why else "see above"
        yield unchecked(what, fix, node, "leaks", KEY_CHECKS[1:])
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
    for pause in pauses:
        yield _in_force(pause)


def _in_force(pause: Pause) -> Finding:
    """Return the warning about a pause, or an operator's limit: it may have been forgotten."""
    until, since = (_utc(at) for at in (time.time() + pause.ends_in, pause.since))
    age = span(max(0.0, time.time() - pause.since))
    by = f" by {pause.who}" if pause.who else ""
    why = f", because of: {pause.reason}" if pause.reason else ""
    what = (
        f"no more than {pause.limit} bodies of each such key run at a time"
        if pause.limit
        else "no body of such a key begins"
    )
    return warning(
        f"{'limited' if pause.limit else 'paused'}{by} for {age}, since {since}{why}; {what}"
        f" until {until}",
        f"celery redlock resume {quote(pause.pattern)}, unless it is still needed",
        where=pause.pattern,
        check="pauses",
    )


def _utc(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _keys(entries: list[Entry]) -> str:
    long = MAX_KEY_CHARS
    keys = [entry.key for entry in entries]
    return some([key if len(key) <= long else f"{key[:long]}..." for key in keys])
