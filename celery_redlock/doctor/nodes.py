"""Checks of the nodes, from their answers. Pure: probes come in, findings go out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..protocol.values import quorum_of
from .probe import Answers, Probe, checks_of, refused_by
from .quorum import Site, check_quorum, pairs_of
from .report import KEY_CHECKS, Finding, run, unchecked, warning, wrong
from .tls import NOTHING, certificate_trouble, secrecy
from .votes import voteless

__all__ = ["examine_nodes"]

OLDEST = (6, 2)
"""The oldest Redis with all commands that locks use."""
MAX_CLOCK_DIFFERENCE_S = 1.0
"""Allowed difference of a clock from ours, besides the round trip: NTP keeps it far below."""
ROUND_TRIPS = 10
"""Minimum ttl, in round trips: no answer is waited for longer than a tenth of the ttl."""


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
    site = Site(probes, prefix, ttls, guard)
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


def _even(site: Site) -> Iterator[Finding]:
    if len(site.probes) % 2 == 0:
        yield warning(
            f"an even number survives no more failures than {len(site.probes) - 1} do",
            "add a node, or take one away: 3 or 5",
        )


def _twins(site: Site) -> Iterator[Finding]:
    for one, other in pairs_of(site):
        yield wrong(
            "they report to be one server, which would vote twice: only the one to which a process"
            " connects first has a vote there",
            "name each server once in redlock_nodes; if they are two, one of them lies: replace it",
            where=f"{one.name} and {other.name}",
        )


def _hosts(site: Site) -> Iterator[Finding]:
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


SITE_CHECKS = {"quorum": check_quorum, "even": _even, "twins": _twins, "hosts": _hosts}


# -- A node that does not answer -------------------------------------------------------------------


def _may_not_connect(probe: Probe, site: Site) -> Iterator[Finding]:
    if command := refused_by(probe.look.error):
        words = " ".join(dict.fromkeys((f"+{command}", *_lacking(probe.answers, site))))
        yield wrong(
            f"the user {probe.user!r} lacks {words}, and may not connect as locks do",
            f"ACL SETUSER {probe.user} {words}",
            hides=("reachable", *KEY_CHECKS, *ALL_NODE_CHECKS),
        )


def _unreachable(probe: Probe, _site: Site) -> Iterator[Finding]:
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


def _rights(probe: Probe, site: Site) -> Iterator[Finding]:
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


def _lacking(answers: Answers, site: Site) -> list[str]:
    """Return the words of an ACL rule that the node's user lacks."""
    keys, channels = f"~{site.prefix}*", f"&{site.prefix}*"
    ours = {"~": keys, "&": channels}
    ours |= {"reset~": f"resetkeys {keys}", "reset&": f"resetchannels {channels}"}
    return [ours.get(word, word) for word in answers.refused]


WRITABLE = {
    "OOM": "give it memory (CONFIG SET maxmemory BYTES, and the same in its configuration file), or"
    " remove other keys",
    "NOREPLICAS": "CONFIG SET min-replicas-to-write 0, and the same in its configuration file; or"
    " bring its replicas back",
    "MISCONF": "mend its disk, so that it can save (its own log says what failed)",
    "READONLY": "name its master in redlock_nodes, and no replica",
    "": "give it memory or disk, whichever it lacks",
}
"""Ways to have a node take writes again, by the beginning of its error; the last for any other."""


def _writes(probe: Probe, _site: Site) -> Iterator[Finding]:
    if (
        probe.answers.writes and not probe.answers.facts.cluster
    ):  # a cluster refuses keys of other slots
        why = probe.answers.writes
        usage = _usage(probe.answers) if why.startswith("OOM") else ""
        fix = next(fix for code, fix in WRITABLE.items() if why.startswith(code))
        yield wrong(f"it takes no writes: {why}{usage and f' ({usage})'}", fix)


def _usage(answers: Answers) -> str:
    """Return a node's memory in use and its limit, if its INFO shows both; otherwise ""."""
    used, limit = answers.info.get("used_memory"), answers.info.get("maxmemory")
    return f"it uses {used} of {limit} bytes" if used and limit else ""


def _cannot_write(answers: Answers) -> bool:
    return bool({"+set", "~"} & answers.refused.keys())


def _role(probe: Probe, _site: Site) -> Iterator[Finding]:
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


def _version(probe: Probe, _site: Site) -> Iterator[Finding]:
    version = probe.answers.info.get("redis_version", "")
    numbers = tuple(int(part[:9]) for part in version.split(".")[:2] if part.isdecimal())
    if len(numbers) < 2:
        yield unchecked("its INFO does not show it", "look at its configuration")
    elif numbers < OLDEST:
        what = f"it is Redis {version}, which is too old"
        yield wrong(what, "upgrade it to Redis 6.2 or newer, or to Valkey")


def _eviction(probe: Probe, _site: Site) -> Iterator[Finding]:
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


def _restart(probe: Probe, site: Site) -> Iterator[Finding]:
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


def _clock(probe: Probe, _site: Site) -> Iterator[Finding]:
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


def _ttl(probe: Probe, site: Site) -> Iterator[Finding]:
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
