"""Checks of the nodes, from their answers. Pure: probes come in, findings go out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from ..protocol.texts import are_needed, of_nodes
from ..protocol.values import quorum_of
from .probe import Answers, Probe, checks_of, refused_by
from .report import KEY_CHECKS, Finding, run, unchecked, warning, wrong
from .tls import NOTHING, certificate_trouble, secrecy
from .votes import quorum_in, voteless, votes_left

__all__ = ["examine_nodes"]

OLDEST = (6, 2)
"""The oldest Redis with all commands that locks use."""
MAX_CLOCK_DIFFERENCE_S = 1.0
"""Allowed difference of a clock from ours, besides the round trip: NTP keeps it far below."""
ROUND_TRIPS = 10
"""Minimum ttl, in round trips: no answer is waited for longer than a tenth of the ttl."""

TAKING = frozenset({"set", "eval", "evalsha"})
"""Commands without which a node grants no lock, even to a user that has all other rights."""


class _Site(NamedTuple):
    """The site around one node, for its checks."""

    probes: Sequence[Probe]
    prefix: str
    ttls: Sequence[float]
    guard: str | None


def examine_nodes(
    probes: Sequence[Probe], prefix: str, ttls: Sequence[float], guard: str | None
) -> Iterator[Finding]:
    """Check all nodes.

    Args:
        probes: The answers of each.
        prefix: Prefix of our keys.
        ttls: The ttls in use, in seconds; empty if they are not known.
        guard: Effect of the restart guard, see `guard_of`; None if it is not known.
    """
    site = _Site(probes, prefix, ttls, guard)
    yield from run(SITE_CHECKS, f"{len(probes)} node{'s' if len(probes) > 1 else ''}", site)
    for probe in probes:
        if not probe.kind.can.quorum:
            of_kind = checks_of(probe.kind)
            of_one = {**of_kind.NODE_CHECKS, **{name: NODE_CHECKS[name] for name in of_kind.COMMON}}
            silent = of_kind.SILENT_CHECKS
            yield from run(of_one if probe.look.reachable else silent, probe.name, probe, site)
            continue
        checks = NODE_CHECKS if probe.look.reachable else SILENT_CHECKS
        if probe.answers.denied:
            checks = {name: checks[name] for name in checks if name not in INFO_CHECKS}
        yield from run(checks, probe.name, probe, site)


# -- All nodes -------------------------------------------------------------------------------------


def _quorum(site: _Site) -> Iterator[Finding]:
    count, needed = len(site.probes), quorum_of(len(site.probes))
    answering = [probe for probe in site.probes if probe.look.reachable]
    twins = _pairs(site)
    seconds = [second for _, second in twins]
    fit = [
        p for p in answering if not p.answers.facts.misfit and not any(p in pair for pair in twins)
    ]
    granting = [p for p in fit if not _grants_nothing(p.answers)]
    powerless = [p for p in fit if p not in granting]
    votes = [
        p.answers.facts if p in answering and p not in seconds and p not in powerless else None
        for p in site.probes
    ]
    addresses = [probe.address for probe in site.probes]
    left = votes_left(votes, addresses, site.ttls, site.guard)
    if len(answering) < needed:
        yield wrong(
            f"no quorum: {of_nodes(len(answering), count)} answer, {are_needed(needed)}:"
            " nothing can be locked",
            f"{ANY_QUORUM if count > 1 else 'bring it back'}; tasks then go on by themselves",
        )
    elif len(fit) < needed and not site.probes[0].kind.can.quorum:
        return  # the one node has a finding of its own that explains it
    elif len(fit) < needed:
        yield wrong(
            f"no quorum: {of_nodes(len(fit), count)} are independent masters, {are_needed(needed)}:"
            " no worker starts, and nothing can be locked",
            "name their masters in redlock_nodes, and each server once",
        )
    elif len(granting) < needed:
        reasons = _reasons([p for p in site.probes if p not in granting], twins)
        yield wrong(
            f"no quorum: {of_nodes(len(granting), count)} can grant a lock, {are_needed(needed)}:"
            f" nothing can be locked, and {reasons}",
            "mend what is named there, on one node after the other, until a quorum grants locks;"
            " tasks then go on by themselves",
        )
    elif wait := quorum_in(left):
        what = "have a vote and can grant a lock" if powerless else "have a vote"
        yield wrong(
            f"no quorum: {of_nodes(left.count(0.0), count)} {what}, {are_needed(needed)}:"
            " a process that starts now can lock nothing, because a node that was started a short"
            " time ago, or was a replica once, may have forgotten locks",
            f"wait {math.ceil(wait)} s{'' if site.ttls else ', with the default ttl'};"
            " tasks then go on by themselves",
        )


def _grants_nothing(answers: Answers) -> bool:
    """Return True if a node that answers refuses to store a lock, for whatever reason."""
    taking = {f"+{name}" for name in TAKING} | {"~", "reset~"}
    return bool(answers.writes or taking & answers.refused.keys() or TAKING & {*answers.renamed})


def _reasons(probes: Sequence[Probe], twins: Sequence[tuple[Probe, Probe]]) -> str:
    """Return which checks say why some nodes grant no locks."""
    tests: dict[str, Callable[[Probe], Any]] = {
        "reachable": lambda p: not p.look.reachable and not refused_by(p.look.error),
        "role": lambda p: p.answers.facts.misfit,
        "twins": lambda p: any(p in pair for pair in twins),
        "rights": lambda p: p.answers.refused or p.answers.renamed or refused_by(p.look.error),
        "writes": lambda p: p.answers.writes,
    }
    *most, last = (name for name, test in tests.items() if any(map(test, probes)))
    return f"{', '.join(most)} and {last} say why" if most else f"{last} says why"


ANY_QUORUM = "bring nodes back until a quorum answers, whichever"


def _even(site: _Site) -> Iterator[Finding]:
    if len(site.probes) % 2 == 0:
        yield warning(
            f"an even number survives no more failures than {len(site.probes) - 1} do",
            "add a node, or take one away: 3 or 5",
        )


def _twins(site: _Site) -> Iterator[Finding]:
    for one, other in _pairs(site):
        yield wrong(
            "they report to be one server, which would vote twice: one has no vote",
            "name each server once in redlock_nodes; if they are two, one of them lies: replace it",
            where=f"{one.name} and {other.name}",
        )


def _hosts(site: _Site) -> Iterator[Finding]:
    count = len(site.probes)
    by_host: dict[str, list[str]] = {}
    for probe in site.probes:
        if probe.look.reachable:
            local = probe.answers.peer in ("", "::1", "127.0.0.1")
            host = "this machine" if local else probe.answers.peer
            by_host.setdefault(host, []).append(probe.name)
    for host, names in by_host.items():
        if len(names) > 1:
            fatal = ", and with them every lock" if len(names) > count - quorum_of(count) else ""
            yield warning(
                f"they are on one host ({host}): if it fails, {len(names)} of {count} votes are"
                f" gone{fatal}",
                "put each node on another host",
                where=", ".join(names),
            )


def _pairs(site: _Site) -> list[tuple[Probe, Probe]]:
    """Return the pairs of nodes that are the same server, by their run ids or by our marks."""
    answering = [probe for probe in site.probes if probe.look.reachable]
    return [
        (one, other)
        for one, other in combinations(answering, 2)
        if (one.answers.facts.run_id and other.answers.facts.run_id == one.answers.facts.run_id)
        or other.index in one.twins
        or one.index in other.twins
    ]


SITE_CHECKS = {"quorum": _quorum, "even": _even, "twins": _twins, "hosts": _hosts}


# -- A node that does not answer -------------------------------------------------------------------


def _may_not_connect(probe: Probe, site: _Site) -> Iterator[Finding]:
    if command := refused_by(probe.look.error):
        words = " ".join(dict.fromkeys((f"+{command}", *_lacking(probe.answers, site))))
        yield wrong(
            f"the user {probe.user!r} lacks {words}, and may not connect as locks do",
            f"ACL SETUSER {probe.user} {words}",
            hides=("reachable", *KEY_CHECKS, *ALL_NODE_CHECKS),
        )


def _unreachable(probe: Probe, _site: _Site) -> Iterator[Finding]:
    why = probe.look.error
    if refused_by(why):
        return
    what, fix = f"it gives no answer: {why}", "start it, or open the way to it"
    trouble = certificate_trouble(why) if probe.address.speaks_tls else None
    if why.startswith("AUTH") or "NOAUTH" in why or "WRONGPASS" in why:
        what = f"it refuses us: {why}"
        fix = "put the right user and password into its URL in redlock_nodes"
    elif probe.speaks == "TLS":
        what = "it speaks TLS on this port, and is asked without"
        fix = "write rediss:// in redlock_nodes, or name its port without TLS"
    elif probe.speaks == NOTHING and why.startswith(("no answer within", "Timeout")):
        fix = "it accepts connections and does not answer: stopped, swapping or busy?"
    elif probe.speaks not in ("", NOTHING):
        what = "it does not speak TLS on this port, and is asked in TLS"
        fix = "write redis:// in redlock_nodes, or name its port with TLS (tls-port)"
    elif trouble is not None:
        what, fix = trouble
    fix += " It has no vote" if fix.endswith("?") else "; until then it has no vote"
    yield wrong(what, fix, hides=(*KEY_CHECKS, *ALL_NODE_CHECKS))


SILENT_CHECKS = {"rights": _may_not_connect, "reachable": _unreachable}


# -- A node that answers ---------------------------------------------------------------------------


def _rights(probe: Probe, site: _Site) -> Iterator[Finding]:
    answers = probe.answers
    if answers.refused:
        words = " ".join(_lacking(answers, site))
        needed = any(answers.refused.values())
        cost = "locks cannot be taken and released" if needed else "waiting is slower without"
        yield (wrong if needed else warning)(
            f"the user {probe.user!r} lacks {words}: {cost}",
            f"ACL SETUSER {probe.user} {words}",
            hides=("writes",) if _cannot_write(answers) else (),
        )
    if answers.renamed:
        yield wrong(
            f"it does not know {', '.join(answers.renamed)}",
            "take rename-command out of its configuration; restrict users by ACL",
        )


def _lacking(answers: Answers, site: _Site) -> list[str]:
    """Return the words of an ACL rule that the node's user lacks."""
    keys, channels = f"~{site.prefix}*", f"&{site.prefix}*"
    ours = {"~": keys, "&": channels}
    ours |= {"reset~": f"resetkeys {keys}", "reset&": f"resetchannels {channels}"}
    return [ours.get(word, word) for word in answers.refused]


def _writes(probe: Probe, _site: _Site) -> Iterator[Finding]:
    if (
        probe.answers.writes and not probe.answers.facts.cluster
    ):  # a cluster refuses keys of other slots
        full = probe.answers.writes.startswith("OOM")
        usage = _usage(probe.answers) if full else ""
        yield wrong(
            f"it takes no writes: {probe.answers.writes}{usage and f' ({usage})'}",
            "give it memory (CONFIG SET maxmemory BYTES, and the same in its configuration file),"
            " or remove other keys"
            if full
            else "give it memory or disk, whichever it lacks",
        )


def _usage(answers: Answers) -> str:
    """Return a node's memory in use and its limit, if its INFO shows both; otherwise ""."""
    used, limit = answers.info.get("used_memory"), answers.info.get("maxmemory")
    return f"it uses {used} of {limit} bytes" if used and limit else ""


def _cannot_write(answers: Answers) -> bool:
    return bool({"+set", "~"} & answers.refused.keys())


def _role(probe: Probe, _site: _Site) -> Iterator[Finding]:
    answers = probe.answers
    if answers.denied:
        by_marks = not _cannot_write(answers) and "+get" not in answers.refused
        yield unchecked(
            f"it does not show its role, version, memory and start ({answers.denied}): the restart"
            " guard cannot work there",
            f"ACL SETUSER {probe.user} +info",
            hides=INFO_CHECKS if by_marks else (*INFO_CHECKS, "twins"),
        )
    if answers.facts.role not in ("", "master"):
        what = f"it is a replica of {answers.facts.master}, and has no vote"
        yield wrong(what, "name its master in redlock_nodes, and no replica")
    if answers.facts.cluster:
        what = "it is a member of a Redis Cluster"
        yield wrong(
            what, "use independent servers with cluster-enabled no", hides=("writes", *KEY_CHECKS)
        )


def _version(probe: Probe, _site: _Site) -> Iterator[Finding]:
    version = probe.answers.info.get("redis_version", "")
    numbers = tuple(int(part[:9]) for part in version.split(".")[:2] if part.isdecimal())
    if len(numbers) < 2:
        yield unchecked("its INFO does not show it", "look at its configuration")
    elif numbers < OLDEST:
        what = f"it is Redis {version}, which is too old"
        yield wrong(what, "upgrade it to Redis 6.2 or newer, or to Valkey")


def _eviction(probe: Probe, _site: _Site) -> Iterator[Finding]:
    policy, limit = probe.answers.facts.eviction, probe.answers.info.get("maxmemory", "0")
    if not policy:
        yield unchecked("its INFO does not show it", "look at its configuration")
    elif policy != "noeviction" and limit != "0":
        usage = _usage(probe.answers)
        yield wrong(
            f"it evicts keys when it has {limit} bytes (maxmemory-policy {policy}): locks among"
            f" them{usage and f'; {usage}'}",
            "see first that there is room (CONFIG SET maxmemory BYTES, or remove other keys),"
            " because a full node then refuses all writes; then CONFIG SET maxmemory-policy"
            " noeviction, and the same in its configuration file",
        )


def _restart(probe: Probe, site: _Site) -> Iterator[Finding]:
    facts = probe.answers.facts
    # Another check covers what a database may lose.
    keeps = facts.appends or not probe.kind.can.quorum
    if site.guard is None or not site.ttls or (site.guard == "off" and keeps):
        return
    if site.guard == "off":
        yield warning(
            "if it restarts it forgets its locks, and votes at once: redlock_restart_guard is off",
            "set redlock_restart_guard to 'uptime', or the node to appendonly yes and appendfsync"
            " always",
        )
    elif facts.uptime is None:
        yield unchecked("its INFO does not show when it was started", "look at its configuration")
    elif left := voteless(facts, probe.address, site.ttls, site.guard):
        since = "was a replica once" if facts.history else f"started {facts.uptime:.0f} s ago"
        if not probe.kind.can.quorum:
            since = f"was promoted, set back or started anew {facts.uptime:.0f} s ago at most"
        mark = ": a worker that knows it for so long leaves a mark there for all others"
        yield warning(
            f"it {since}: it may have forgotten locks, and workers that meet it give it no vote"
            f" for {left:.0f} s",
            f"wait{mark if facts.history else ''}",
        )


def _clock(probe: Probe, _site: _Site) -> Iterator[Finding]:
    ahead = probe.answers.ahead
    if ahead is None:
        fix = f"ACL SETUSER {probe.user} +time; locks do not need it"
        yield unchecked("it does not return its time", fix)
    elif abs(ahead) > MAX_CLOCK_DIFFERENCE_S + probe.look.rtt:
        how = "ahead of" if ahead > 0 else "behind"
        yield warning(
            f"its clock is {abs(ahead):.1f} s {how} ours: one of the two will step, and a step ends"
            " locks early",
            "run chrony or ntpd on both hosts",
        )


def _ttl(probe: Probe, site: _Site) -> Iterator[Finding]:
    trips = ROUND_TRIPS * probe.look.rtt
    if site.ttls and min(site.ttls) < trips:
        yield wrong(
            f"a ttl of {min(site.ttls):g} s is shorter than ten round trips ({trips:.3f} s): it"
            " answers too late to count",
            f"set the ttl to {max(1.0, 2 * trips):.0f} s or more, or use a node that is nearer",
        )


NODE_CHECKS = {
    "rights": _rights,
    "writes": _writes,
    "role": _role,
    "version": _version,
    "eviction": _eviction,
    "tls": secrecy,
    "restart": _restart,
    "clock": _clock,
    "ttl": _ttl,
}
INFO_CHECKS = ("version", "eviction", "restart")
"""Checks that need INFO, besides that of the role."""
ALL_NODE_CHECKS = ("twins", "hosts", *NODE_CHECKS)
"""All checks of one node."""
