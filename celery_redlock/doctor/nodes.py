"""What is wrong with the nodes, from what each has told. Pure: probes come in, findings go out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..protocol.lease import drift
from ..protocol.restart_guard import NodeInfo
from ..protocol.values import quorum_of
from .probe import Probe, Told, refused_by
from .report import Finding

__all__ = ["examine_nodes", "voteless"]

OLDEST = (6, 2)
"""The oldest Redis whose scripts and commands are known to do."""
AHEAD = 1.0
"""Seconds that a clock may differ from ours, besides the round trip."""
TRIPS = 10
"""Round trips that a ttl must be long, at least: no longer than a tenth of it is waited for."""
OF_INFO = ("version", "eviction", "restart")
"""Checks that INFO alone can answer, besides that of the role."""
OF_NODES = ("role", "twins", "hosts", "rights", "writes", "clock", "ttl", *OF_INFO)
"""All that is looked at on a node."""


def examine_nodes(
    probes: Sequence[Probe], prefix: str, ttls: Sequence[float], guard: str | None
) -> Iterator[Finding]:
    """Look at all nodes.

    Args:
        probes: What each has told.
        prefix: What our keys begin with.
        ttls: Those in use, in seconds; none where that is not known.
        guard: `redlock_restart_guard`; None where that is not known.
    """
    yield from _votes(probes, ttls, guard)
    yield from _together(probes)
    for probe in probes:
        if probe.told is None:
            yield _away(probe)
            continue
        yield from _rights(probe, probe.told, prefix)
        if probe.told.denied:
            yield _silent(probe, probe.told)
        else:
            yield from _said(probe, probe.told)
            yield from _restart(probe, probe.told, ttls, guard)
        yield from _clock(probe, probe.told)
        trip = TRIPS * probe.look.rtt
        if ttls and min(ttls) < trip:
            yield Finding(
                "wrong",
                "ttl",
                probe.name,
                f"a ttl of {min(ttls):g} s is shorter than ten round trips ({trip:.3f} s):"
                " it answers too late to count",
                f"set the ttl to {max(1.0, 2 * trip):.0f} s or more, or use a node that is nearer",
            )


# -- All of them -----------------------------------------------------------------------------------


def _votes(probes: Sequence[Probe], ttls: Sequence[float], guard: str | None) -> Iterator[Finding]:
    count, needed = len(probes), quorum_of(len(probes))
    answering = [probe for probe in probes if probe.told is not None]
    doubles = [(probe.index, other.index) for probe in answering for other in _twins(probe, probes)]
    seconds = {second for _first, second in doubles}
    masters = [probe for probe in answering if probe.told and not probe.told.facts.misfit]
    fit = [probe for probe in masters if probe.index not in {n for pair in doubles for n in pair}]
    voting = [probe.told for probe in masters if probe.told and probe.index not in seconds]
    left = sorted(voteless(told.facts, ttls, guard) for told in voting)
    if len(answering) < needed:
        yield Finding(
            "wrong",
            "quorum",
            f"{count} nodes",
            f"no quorum: {len(answering)} of {count} nodes answer, {needed} are needed:"
            " nothing can be locked",
            "bring nodes back until a quorum answers, whichever; tasks then go on by themselves",
        )
    elif len(fit) < needed:
        yield Finding(
            "wrong",
            "quorum",
            f"{count} nodes",
            f"no quorum: {len(fit)} of {count} nodes are masters of their own, {needed} are needed:"
            " no worker starts, and nothing can be locked",
            "name their masters in redlock_nodes, and each server once",
        )
    elif left[needed - 1]:
        yield Finding(
            "wrong",
            "quorum",
            f"{count} nodes",
            f"no quorum: {left.count(0.0)} of {count} nodes have a vote, {needed} are needed:"
            " nothing can be locked, because the others were started a short time ago and may have"
            " forgotten locks",
            f"wait {math.ceil(left[needed - 1])} s; tasks then go on by themselves",
        )


def _together(probes: Sequence[Probe]) -> Iterator[Finding]:
    count = len(probes)
    if count % 2 == 0:
        yield Finding(
            "warning",
            "even",
            f"{count} nodes",
            f"an even number survives no more failures than {count - 1} do",
            "add a node, or take one away: 3 or 5",
        )
    for probe in probes:
        for other in _twins(probe, probes):
            yield Finding(
                "wrong",
                "twins",
                f"{probe.name} and {other.name}",
                "they say that they are one server, which would vote twice: one has no vote",
                "name each server once in redlock_nodes; if they are two, one of them lies:"
                " replace it",
            )
    by_host: dict[str, list[str]] = {}
    for probe in probes:
        if probe.told is not None:
            by_host.setdefault(_host(probe.told.peer), []).append(probe.name)
    for host, names in by_host.items():
        if len(names) > 1:
            fatal = len(names) > count - quorum_of(count)
            yield Finding(
                "warning",
                "hosts",
                ", ".join(names),
                f"they are on one host ({host}): if it fails, {len(names)} of {count} votes are"
                f" gone{', and with them every lock' if fatal else ''}",
                "put each node on a host of its own",
            )


def _host(peer: str) -> str:
    return "this machine" if peer in ("", "::1", "127.0.0.1") else peer


def _twins(probe: Probe, probes: Sequence[Probe]) -> list[Probe]:
    """The nodes behind it in the list that are the same server."""
    if probe.told is None:
        return []
    run = probe.told.facts.run_id
    return [
        other
        for other in probes[probe.index + 1 :]
        if other.told is not None
        and (
            (run and other.told.facts.run_id == run)
            or other.index in probe.twins
            or probe.index in other.twins
        )
    ]


# -- One of them -----------------------------------------------------------------------------------


def _away(probe: Probe) -> Finding:
    why = probe.look.error
    command = refused_by(why)
    if command:
        return Finding(
            "wrong",
            "rights",
            probe.name,
            f"the user {probe.user!r} may not connect as locks do: {why}",
            f"ACL SETUSER {probe.user} +{command}",
            ("reachable", *OF_NODES),
        )
    if why.startswith("AUTH") or "NOAUTH" in why or "WRONGPASS" in why:
        return Finding(
            "wrong",
            "reachable",
            probe.name,
            f"it refuses us: {why}",
            "put the right user and password into its URL in redlock_nodes",
            OF_NODES,
        )
    return Finding(
        "wrong",
        "reachable",
        probe.name,
        f"it gives no answer: {why}",
        "start it, or open the way to it; until then it has no vote",
        OF_NODES,
    )


def _rights(probe: Probe, told: Told, prefix: str) -> Iterator[Finding]:
    words = {
        {"~": f"~{prefix}*", "&": f"&{prefix}*"}.get(word, word): needed
        for word, needed in told.refused.items()
    }
    if words:
        bad = any(words.values())
        yield Finding(
            "wrong" if bad else "warning",
            "rights",
            probe.name,
            f"the user {probe.user!r} lacks {' '.join(words)}: "
            + ("locks cannot be taken and given back" if bad else "waiting is slower without"),
            f"ACL SETUSER {probe.user} {' '.join(words)}",
            ("writes",) if _mute(told) else (),
        )
    if told.renamed:
        yield Finding(
            "wrong",
            "rights",
            probe.name,
            f"it does not know {', '.join(told.renamed)}",
            "take rename-command out of its configuration; restrict users by ACL",
        )
    if told.writes:
        yield Finding(
            "wrong",
            "writes",
            probe.name,
            f"it takes no writes: {told.writes}",
            "give it memory or disk, whichever it lacks",
        )


def _mute(told: Told) -> bool:
    """Whether nothing of ours could be written there."""
    return "+set" in told.refused or "~" in told.refused


def _silent(probe: Probe, told: Told) -> Finding:
    return Finding(
        "unchecked",
        "role",
        probe.name,
        f"it does not tell its role, version, memory and start ({told.denied}): the restart guard"
        " is blind there",
        f"ACL SETUSER {probe.user} +info",
        (*OF_INFO, *(("twins",) if _mute(told) or "+get" in told.refused else ())),
    )


def _said(probe: Probe, told: Told) -> Iterator[Finding]:
    facts, info = told.facts, told.info
    if facts.role not in ("", "master"):
        yield Finding(
            "wrong",
            "role",
            probe.name,
            f"it is a replica of {facts.master}, and has no vote of its own",
            "name its master in redlock_nodes, and no replica",
        )
    if facts.cluster:
        yield Finding(
            "wrong",
            "role",
            probe.name,
            "it is a member of a Redis Cluster",
            "use independent servers with cluster-enabled no",
        )
    version = info.get("redis_version", "")
    numbers = tuple(int(part[:9]) for part in version.split(".")[:2] if part.isdecimal())
    if len(numbers) == 2 and numbers < OLDEST:
        yield Finding(
            "wrong",
            "version",
            probe.name,
            f"it is Redis {version}, which is too old",
            "upgrade it to Redis 6.2 or newer, or to Valkey",
        )
    policy, most = facts.eviction, info.get("maxmemory", "0")
    for check, missing in (("version", len(numbers) < 2), ("eviction", not policy)):
        if missing:
            why = "its INFO does not tell"
            yield Finding("unchecked", check, probe.name, why, "look at its configuration")
    if policy not in ("", "noeviction") and most != "0":
        yield Finding(
            "wrong",
            "eviction",
            probe.name,
            f"it evicts keys when it has {most} bytes (maxmemory-policy {policy}): locks among"
            " them",
            "CONFIG SET maxmemory-policy noeviction, and the same in its configuration file",
        )


def _restart(
    probe: Probe, told: Told, ttls: Sequence[float], guard: str | None
) -> Iterator[Finding]:
    facts = told.facts
    if guard is None or facts.durable:
        return
    if facts.appends and not facts.fsync:
        yield Finding(
            "unchecked",
            "restart",
            probe.name,
            "it has an append-only file, but does not tell when it is written through",
            f"ACL SETUSER {probe.user} +config|get, if that is appendfsync always",
        )
    elif guard == "off":
        yield Finding(
            "warning",
            "restart",
            probe.name,
            "if it restarts it forgets its locks, and votes at once: redlock_restart_guard is off",
            "set redlock_restart_guard to 'uptime', or the node to appendonly yes and appendfsync"
            " always",
        )
    elif facts.uptime is None:
        why = "its INFO does not tell when it was started"
        yield Finding("unchecked", "restart", probe.name, why, "look at its configuration")
    elif ttls:
        left = voteless(facts, ttls, guard)
        if left:
            since = "was a replica once" if facts.history else f"started {facts.uptime:.0f} s ago"
            yield Finding(
                "warning",
                "restart",
                probe.name,
                f"it {since}: it may have forgotten locks, and workers that meet it give it no"
                f" vote for {left:.0f} s",
                "wait; or give nodes appendonly yes and appendfsync always",
            )


def voteless(facts: NodeInfo, ttls: Sequence[float], guard: str | None) -> float:
    """For how long a worker that meets it now gives it no vote; seconds."""
    if guard in (None, "off") or not ttls or facts.durable or facts.uptime is None:
        return 0.0
    span = max(ttls) + drift(max(ttls))
    return span if facts.history else max(0.0, span - facts.uptime)


def _clock(probe: Probe, told: Told) -> Iterator[Finding]:
    if told.ahead is None:
        yield Finding(
            "unchecked",
            "clock",
            probe.name,
            "it does not tell the time",
            f"ACL SETUSER {probe.user} +time; locks do not need it",
        )
    elif abs(told.ahead) > AHEAD + probe.look.rtt:
        how = "ahead of" if told.ahead > 0 else "behind"
        yield Finding(
            "warning",
            "clock",
            probe.name,
            f"its clock is {abs(told.ahead):.1f} s {how} ours: one of the two will step, and a"
            " step ends locks early",
            "run chrony or ntpd on both hosts",
        )
