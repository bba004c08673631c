"""Findings and the report of all checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ..protocol.errors import ConfigurationError
from ..protocol.texts import counted, printable
from ..survey.models import NodeLook

__all__ = ["CHECKS", "ETCD_CHECKS", "KEY_CHECKS", "PLAIN_CHECKS", "POSTGRESQL_CHECKS"]
__all__ += ["ZOOKEEPER_CHECKS", "Check", "Finding", "Report", "broken", "merged", "run", "some"]
__all__ += ["unchecked", "warning", "wrong"]

LEVELS = ("wrong", "warning", "unchecked")
"""From bad to unknown. An `unchecked` thing may be wrong: it could not be checked."""
APP_CHECKS = ("lifetime", "visibility", "queues", "limits", "schedule", "acks", "workers")
"""Checks of an app alone."""
NEED_APP = ("configuration", "restart", "ttl", *APP_CHECKS)
"""Checks that need an app."""
KEY_CHECKS = ("leaks", "prefix", "pauses")
"""Checks of the keys on a node, in `keys.py`."""
CHECKS = (
    *("configuration", "quorum", "reachable", "role", "twins", "even", "hosts", "version"),
    *("rights", "writes", "eviction", "tls", "restart", "clock", "ttl", *KEY_CHECKS),
    *APP_CHECKS,
)
"""All checks for Redis; docs/doctor.md describes each."""
POSTGRESQL_CHECKS = (
    *("configuration", "quorum", "reachable", "role", "version", "tables", "rights"),
    *(
        "neighbours",
        "writes",
        "durability",
        "restart",
        "pooler",
        "tls",
        "isolation",
        "vacuum",
        "connections",
        "clock",
    ),
    *("ttl", *KEY_CHECKS, *APP_CHECKS),
)
"""All checks for locks in PostgreSQL."""
ETCD_CHECKS = (
    *("configuration", "quorum", "reachable", "version", "rights", "writes", "members", "tls"),
    *("restart", "ttl", *KEY_CHECKS, *APP_CHECKS),
)
"""All checks for locks in etcd."""
PLAIN_CHECKS = (
    *("configuration", "quorum", "reachable", "writes", "tls", "restart", "ttl"),
    *(*KEY_CHECKS, *APP_CHECKS),
)
"""All checks for locks in a kind of store that has none of its own."""
ZOOKEEPER_CHECKS = (
    *("configuration", "quorum", "reachable", "writes", "members", "session", "chroot", "acl"),
    *("tls", "restart", "ttl", "leaks", "prefix", *APP_CHECKS),
)
"""All checks for locks in ZooKeeper."""
RANKED = tuple(dict.fromkeys((*POSTGRESQL_CHECKS, *ETCD_CHECKS, *ZOOKEEPER_CHECKS, *CHECKS)))
MAX_NAMED = 5
"""Places to name one by one in a finding."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or could not be checked."""

    level: str  # one of `LEVELS`
    what: str  # the fault, in one sentence
    fix: str  # the remedy, in one sentence
    where: str = ""  # a node, a task, a worker, a key
    check: str = ""  # one of `CHECKS`
    hides: tuple[str, ...] = ()  # other checks that could not be made there because of it


wrong, warning, unchecked = (partial(Finding, level) for level in LEVELS)
"""Make a finding of their level. `run` adds the check that found it, and the place."""

Check = Callable[..., Iterable[Finding]]


def run(checks: Mapping[str, Check], where: str, *given: Any) -> Iterator[Finding]:
    """Call the named checks with `given`; a finding may name another place than `where`."""
    for name, check in checks.items():
        for finding in check(*given):
            yield replace(finding, check=name, where=finding.where or where)


def broken(where: str, error: ConfigurationError) -> Finding:
    """Return the finding for settings or options that cannot work."""
    return wrong(str(error), "change what it names", where, "configuration")


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings, those that differ only in their place as one; the worst first."""
    places: dict[Finding, dict[str, None]] = {}  # a dict, because a place may be found twice
    for finding in findings:
        places.setdefault(replace(finding, where=""), {})[finding.where] = None

    def rank(one: Finding) -> tuple[bool, bool, int, int]:
        # First a login that was refused: waiting does not help, whatever a missing quorum says.
        # Then a missing quorum: it stops everything.
        refused = one.what.startswith(("it refuses us", "it requires a login"))
        place = (*RANKED, one.check).index(one.check)  # another package's checks come last
        return not refused, one.check != "quorum", LEVELS.index(one.level), place

    found = (replace(finding, where=some(list(named))) for finding, named in places.items())
    return tuple(sorted(found, key=rank))


def some(names: Sequence[str]) -> str:
    """Return the first of many names, and the number of the others."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Report:
    """The result of all checks."""

    findings: tuple[Finding, ...]  # the worst first
    skipped: tuple[str, ...] = ()  # checks that were not made: no app, or no nodes
    nodes: tuple[NodeLook, ...] = ()  # whether each node answered, and how fast
    checks: tuple[str, ...] = CHECKS  # all checks for this kind of store

    @property
    def fine(self) -> list[str]:
        """The checks that were made everywhere, and found nothing."""
        found = {check for one in self.findings for check in (one.check, *one.hides)}
        return [check for check in self.checks if check not in found and check not in self.skipped]

    def bad(self, strict: bool = False) -> bool:
        """Return True if something is wrong; with `strict`, also if there is a warning."""
        bad = ("wrong", "warning") if strict else ("wrong",)
        return any(one.level in bad for one in self.findings)

    def data(self, strict: bool = False) -> dict[str, Any]:
        """Return the report as JSON data."""
        return {
            "ok": not self.bad(strict),
            "findings": [asdict(finding) for finding in self.findings],
            "fine": self.fine,
            "skipped": self.skipped,
            "nodes": [look.data() for look in self.nodes],
        }

    def text(self) -> str:
        """Return the report for people."""
        lines = []
        if self.nodes:
            trips = (f"{n.rtt * 1e3:.2f} ms" if n.reachable else "no answer" for n in self.nodes)
            named = (f"{n.name} ({trip})" for n, trip in zip(self.nodes, trips, strict=True))
            lines.append(f"nodes      {', '.join(named)}")
        for one in self.findings:
            lines += [
                f"{one.level.upper():9}  {one.check}: {one.where}: {one.what}",
                f"           -> {one.fix}",
            ]
            if hidden := [check for check in one.hides if check in self.checks]:
                lines.append(f"           not checked there: {', '.join(hidden)}")
        if self.fine:
            lines.append(f"ok         {', '.join(self.fine)}")
        if self.skipped:
            need = "nodes" if "reachable" in self.skipped else "an app (-A APP)"
            lines.append(f"left out   {', '.join(self.skipped)}: they need {need}")
        levels = [one.level for one in self.findings]
        counts = [_counted(levels.count(level), level) for level in LEVELS if level in levels]
        lines += ["", ", ".join(counts) or "Nothing is wrong."]
        return "\n".join(map(printable, lines))


def _counted(count: int, level: str) -> str:
    """Return `1 warning`, `2 warnings`, `2 wrong`."""
    return counted(count, level) if level == "warning" else f"{count} {level}"
