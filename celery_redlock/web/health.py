"""The state of the nodes for the pages: which answer, which vote, and the doctor's findings.

It uses INFO alone, and asks a silent node what else it speaks: nothing is written to a node, so the
doctor's checks that write are left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..config.checks import DAY
from ..doctor.nodes import examine_nodes
from ..doctor.probe import Probe, observe
from ..doctor.report import Finding, merged
from ..doctor.tasks import ttls_of
from ..doctor.votes import guard_of, quorum_in, voteless, votes_left
from ..protocol.texts import printable
from ..protocol.values import quorum_of
from ..survey.models import NodeLook

if TYPE_CHECKING:
    from ..locking.redlock import Redlock

__all__ = ["NOT_CHECKED", "Health", "examine"]

NOT_CHECKED = ("rights", "writes", "clock")
"""The doctor's checks that need more than INFO."""
SHOWN_ELSEWHERE = ("quorum",)
"""The checks whose result is already at the top of each page."""
MAX_VERSION_CHARS = 32
"""Characters of a server's version, which is untrusted text."""


@dataclass(frozen=True)
class Health:
    """The state of the nodes, as plain data.

    Attributes:
        looks: One per node: whether it has answered, and how fast.
        nodes: Facts of each node, in their order. `votes_in` is the seconds until it has a vote,
            0.0 if it has one; None if it does not answer, or will not get one in its state.
        no_quorum: The number of nodes that answer and vote, and the number needed; None if a quorum
            votes. `wait`: seconds until a quorum votes, if the answering nodes only need time.
        findings: The doctor's findings, the worst first; one that several nodes share, once.
    """

    looks: tuple[NodeLook, ...]
    nodes: list[dict[str, Any]]
    no_quorum: dict[str, Any] | None
    findings: list[dict[str, Any]]


def examine(redlock: Redlock, app: Any, timeout: float) -> Health:
    """Ask the nodes for their state, and examine it as the doctor does.

    Args:
        redlock: The lock whose nodes are asked.
        app: The app whose ttls and restart guard count; None: those of `redlock`.
        timeout: Seconds without an answer after which a node counts as silent.
    """
    probes = observe(redlock.client.addresses, redlock.prefix, timeout)
    if app is not None:
        guard = guard_of(app, redlock.client.addresses)
    else:
        guard = "uptime" if redlock.client.guard.on else None
    ttls = _ttls(redlock, app, probes, guard)
    found = [
        one
        for one in examine_nodes(probes, redlock.prefix, ttls, guard)
        if one.check not in (*NOT_CHECKED, *SHOWN_ELSEWHERE)
    ]
    facts = [probe.answers.facts if probe.look.reachable else None for probe in probes]
    votes_in = votes_left(facts, [probe.address for probe in probes], ttls, guard)
    return Health(
        tuple(probe.look for probe in probes),
        [_node(probe, left, found) for probe, left in zip(probes, votes_in, strict=True)],
        _no_quorum(probes, votes_in),
        [_finding_data(one) for one in merged(found)],
    )


def _ttls(
    redlock: Redlock, app: Any, probes: Sequence[Probe], guard: str | None
) -> Sequence[float]:
    """Return the ttls in use. Tasks are loaded only if they decide whether a node votes."""
    if app is None:
        return [redlock.ttl]
    answering = [probe for probe in probes if probe.look.reachable]
    if any(voteless(one.answers.facts, one.address, [DAY], guard) for one in answering):
        with contextlib.suppress(Exception):  # `celery redlock doctor` reports broken task modules
            app.loader.import_default_modules()
    return ttls_of(app) or [redlock.ttl]


def _no_quorum(probes: Sequence[Probe], votes_in: list[float | None]) -> dict[str, Any] | None:
    needed = quorum_of(len(probes))
    voting = votes_in.count(0.0)
    if voting >= needed:
        return None
    return {
        "nodes": len(probes),
        "answering": sum(probe.look.reachable for probe in probes),
        "voting": voting,
        "needed": needed,
        "wait": quorum_in(votes_in),
    }


def _node(probe: Probe, votes_in: float | None, found: Sequence[Finding]) -> dict[str, Any]:
    answers = probe.look.reachable
    uptime = probe.answers.facts.uptime
    if probe.details is not None:
        uptime = probe.details.info.get("uptime")  # an etcd cluster has none
    return {
        "answers": answers,
        "rtt": probe.look.rtt if answers else None,
        "version": _version(probe) if answers else None,
        "uptime": uptime if answers else None,
        "votes_in": votes_in,
        "findings": [
            _finding_data(one)
            for one in found
            if probe.name in one.where.replace(" and ", ", ").split(", ")
        ],
    }


def _version(probe: Probe) -> str | None:
    """Return a server's name and version: `Valkey 8.1.0`, `Redis 7.0.15`, `PostgreSQL 16.2`."""
    if probe.details is not None:
        version = printable(probe.details.info["server_version"])[:MAX_VERSION_CHARS]
        return f"{probe.address.store} {version}"
    info = probe.answers.info
    for name, key in (("Valkey", "valkey_version"), ("Redis", "redis_version")):
        if said := info.get(key, "").strip():
            return f"{name} {printable(said)[:MAX_VERSION_CHARS]}"
    return None


def _finding_data(finding: Finding) -> dict[str, Any]:
    """Return a finding as plain data, printable: its text may quote a node."""
    data = asdict(finding)
    return {name: printable(data[name]) for name in ("level", "check", "where", "what", "fix")}
