"""Check if a quorum of nodes can grant a lock. Pure: probes come in, findings go out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from ..protocol.texts import are_needed, of_nodes
from ..protocol.values import NodeVote, Vote, quorum_of
from .probe import Probe, checks_of, refused_by
from .report import Finding, wrong
from .votes import quorum_in, votes_left

__all__ = ["GRANTING_CHECKS", "Site", "check_quorum", "pairs_of", "votes_of"]

GRANTING_CHECKS = ("role", "version", "tables", "rights", "writes")
"""Checks that are wrong only at a node that grants no lock, for kinds with checks of their own."""
TAKING = frozenset({"set", "eval", "evalsha"})
"""Commands without which a node grants no lock, even to a user that has all other rights."""
EXPLAINING = ("reachable", "role", "version", "tables", "twins", "rights", "writes")
"""Checks that may say why a node grants no lock, in this order."""
ANY_QUORUM = "bring nodes back until a quorum answers, whichever"


class Site(NamedTuple):
    """The site around one node, for its checks."""

    probes: Sequence[Probe]
    prefix: str
    ttls: Sequence[float] = ()
    guard: str | None = None


def check_quorum(site: Site) -> Iterator[Finding]:
    """Find out that no quorum answers, is fit, can grant a lock, or has a vote."""
    count, needed = len(site.probes), quorum_of(len(site.probes))
    answering = [probe for probe in site.probes if probe.look.reachable]
    twins = [probe for pair in pairs_of(site) for probe in pair]
    fit = [p for p in answering if not (_is_misfit(p) or p in twins)]
    whys = [_why_not(probe, site) for probe in site.probes]
    granting = whys.count({})
    powerless = any(whys[p.index] for p in fit)
    votes = [p.answers.facts if not why else None for p, why in zip(site.probes, whys, strict=True)]
    addresses = [probe.address for probe in site.probes]
    left = votes_left(votes, addresses, site.ttls, site.guard)
    if len(answering) < needed:
        yield wrong(
            f"no quorum: {of_nodes(len(answering), count)} answer, {are_needed(needed)}:"
            " nothing can be locked",
            f"{ANY_QUORUM if count > 1 else 'bring it back'}; tasks then go on by themselves,"
            " one ttl later if the servers were restarted",
        )
    elif count - (len(answering) - len(fit)) < needed:  # as at the start of a worker
        yield wrong(
            f"no quorum: {of_nodes(len(fit), count)} are independent masters, {are_needed(needed)}:"
            " no worker starts, and nothing can be locked",
            "name each server once in redlock_nodes, and no replica",
        )
    elif granting < needed:
        names = {name for why in whys for name in why}
        *most, last = [name for name in EXPLAINING if name in names]
        reasons = f"{', '.join(most)} and {last} say why" if most else f"{last} says why"
        each = "" if count == 1 else ", on one node after the other, until a quorum grants locks"
        yield wrong(
            f"no quorum: {of_nodes(granting, count)} can grant a lock, {are_needed(needed)}:"
            f" nothing can be locked, and {reasons}",
            f"mend what is named there{each}; tasks then go on by themselves",
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


def votes_of(probes: Sequence[Probe], prefix: str) -> list[NodeVote]:
    """Return each node's vote on a lock that is free: YES, or SILENT with the reason."""
    votes, site = [], Site(probes, prefix)
    for probe in probes:
        why = ", ".join(_why_not(probe, site).values())
        votes.append(NodeVote(probe.name, Vote.SILENT if why else Vote.YES, why))
    return votes


def _is_misfit(probe: Probe) -> bool:
    """Return True if the server cannot be one of several nodes, whatever the others are."""
    return bool(probe.kind.can.quorum and probe.answers.facts.misfit)


def _why_not(probe: Probe, site: Site) -> dict[str, str]:
    """Return why a node grants no lock, by the check that reports it; empty if it grants one."""
    answers = probe.answers
    if not probe.look.reachable:
        return {"rights" if refused_by(probe.look.error) else "reachable": probe.look.error}
    if not probe.kind.can.quorum:
        checks = checks_of(probe.kind).NODE_CHECKS
        found = {
            name: [one.what for one in checks[name](probe, site) if one.level == "wrong"]
            for name in GRANTING_CHECKS
            if name in checks
        }
        whys = {name: what[0] for name, what in found.items() if what}
        misfit = answers.facts.misfit
        return whys or ({"writes": misfit} if misfit else {})
    whys = {"role": answers.facts.misfit} if answers.facts.misfit else {}
    if first := next((one for one, other in pairs_of(site) if other is probe), None):
        whys["twins"] = f"it is the same server as {first.name}"
    lacking = [f"+{name}" for name in sorted(TAKING) if f"+{name}" in answers.refused]
    lacking += [f"~{site.prefix}*" for word in ("~", "reset~") if word in answers.refused]
    if lacking:
        whys["rights"] = f"its user {probe.user!r} lacks {' '.join(lacking)}"
    elif renamed := sorted(TAKING & {*answers.renamed}):
        whys["rights"] = f"it does not know {', '.join(renamed)}"
    if answers.writes:
        whys["writes"] = f"it takes no writes: {answers.writes}"
    return whys


def pairs_of(site: Site) -> list[tuple[Probe, Probe]]:
    """Return the pairs of nodes that are the same server, by their run ids or by our marks."""
    answering = [probe for probe in site.probes if probe.look.reachable]
    return [
        (one, other)
        for one, other in combinations(answering, 2)
        if (one.answers.facts.run_id and other.answers.facts.run_id == one.answers.facts.run_id)
        or other.index in one.twins
        or one.index in other.twins
    ]
