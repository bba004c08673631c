"""What a look at a site finds, and how it is put."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ..protocol.errors import ConfigurationError
from ..protocol.values import printable
from ..survey.models import NodeLook

__all__ = ["CHECKS", "Finding", "Report", "merged", "run", "some", "unchecked"]
__all__ += ["broken", "warning", "wrong"]

LEVELS = ("wrong", "warning", "unchecked")
"""From bad to unknown. What is `unchecked` may be wrong: nobody could look."""

CHECKS = {
    "configuration": "the settings and the options of all tasks can work",
    "quorum": "a quorum of nodes answers",
    "reachable": "every node answers",
    "role": "every node is an independent master",
    "twins": "no two nodes are one server",
    "even": "the number of nodes is odd",
    "hosts": "the nodes are on different hosts",
    "version": "every node is Redis 6.2 or newer, or Valkey",
    "rights": "the user of the locks may do on every node what locks need",
    "writes": "every node takes writes",
    "eviction": "no node evicts keys when it is full",
    "restart": "a node that restarts cannot forget locks unnoticed",
    "clock": "the clocks of the nodes agree with ours",
    "ttl": "every ttl is at least ten times as long as a round trip",
    "leaks": "no key under our prefix is without a ttl",
    "prefix": "nobody else writes under our prefix",
    "lifetime": "no task may run for longer than its lock is extended",
    "visibility": "the broker does not deliver a message again while its task runs",
    "queues": "RabbitMQ delays what waits in quorum queues",
    "acks": "acknowledgement and conflict policy go together",
    "workers": "all workers have the same settings",
}
"""Every check, and what it says where nothing is found."""
OF_APPS = ("lifetime", "visibility", "queues", "acks", "workers")
"""Those that look at an app alone."""
NEED_APP = ("configuration", "restart", "ttl", *OF_APPS)
"""Those that need one."""
MAX_NAMED = 5
"""Places that are named one by one."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or could not be looked at.

    Attributes:
        level: One of `LEVELS`.
        check: One of `CHECKS`.
        where: A node, a task, a worker, a key.
        what: What is so, in one sentence.
        fix: What to do about it, in one sentence.
        hides: Other checks that could not be made there because of it.
    """

    level: str
    check: str
    where: str
    what: str
    fix: str
    hides: tuple[str, ...] = ()


def _found(
    level: str, what: str, fix: str, *, where: str = "", hides: tuple[str, ...] = ()
) -> Finding:
    return Finding(level, "", where, what, fix, hides)


wrong, warning, unchecked = (partial(_found, level) for level in LEVELS)
"""Make a finding of their level. `run` says which check found it, and where."""

Check = Callable[..., Iterable[Finding]]


def run(checks: Mapping[str, Check], where: str, *given: Any) -> Iterator[Finding]:
    """Call some checks, by their names, with `given`; a finding may name another place itself."""
    for name, check in checks.items():
        for finding in check(*given):
            yield replace(finding, check=name, where=finding.where or where)


def broken(where: str, error: ConfigurationError) -> Finding:
    """Return the finding for settings or options that cannot work."""
    return Finding("wrong", "configuration", where, str(error), "change what it names")


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings that differ only in where they are as one; the worst first."""
    places: dict[Finding, dict[str, None]] = {}  # a place may be found twice
    for finding in findings:
        places.setdefault(replace(finding, where=""), {})[finding.where] = None
    order = list(CHECKS)

    def rank(one: Finding) -> tuple[bool, int, int]:
        # What stops everything comes first.
        return one.check != "quorum", LEVELS.index(one.level), order.index(one.check)

    found = (replace(finding, where=some(list(named))) for finding, named in places.items())
    return tuple(sorted(found, key=rank))


def some(names: Sequence[str]) -> str:
    """Return the first of many names, and how many more there are."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Report:
    """All that was found.

    Attributes:
        findings: The worst first.
        skipped: Checks that were not made, because there is no app or there are no nodes.
        nodes: How each node answered, and how fast.
    """

    findings: tuple[Finding, ...]
    skipped: tuple[str, ...] = ()
    nodes: tuple[NodeLook, ...] = ()

    @property
    def fine(self) -> list[str]:
        """The checks that were made everywhere, and found nothing."""
        found = {check for one in self.findings for check in (one.check, *one.hides)}
        return [check for check in CHECKS if check not in found and check not in self.skipped]

    def count(self, level: str) -> int:
        """Return how many findings are of a level."""
        return sum(finding.level == level for finding in self.findings)

    def bad(self, strict: bool = False) -> bool:
        """Return whether something is wrong; `strict`: or worth a warning."""
        return bool(self.count("wrong") or (strict and self.count("warning")))

    def data(self, strict: bool = False) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return {
            "ok": not self.bad(strict),
            "findings": [asdict(finding) for finding in self.findings],
            "fine": self.fine,
            "skipped": self.skipped,
            "nodes": [look.data() for look in self.nodes],
        }

    def text(self) -> str:
        """Return it for people."""
        lines = [
            f"node       {look.name}: "
            + (f"round trip {look.rtt * 1e3:.2f} ms" if look.reachable else "no answer")
            for look in self.nodes
        ]
        for finding in self.findings:
            lines += [
                f"{finding.level.upper():9}  {finding.check}: {finding.where}: {finding.what}",
                f"           -> {finding.fix}",
            ]
            if finding.hides:
                lines.append(f"           not checked there: {', '.join(finding.hides)}")
        lines += [f"ok         {check}: {CHECKS[check]}" for check in self.fine]
        if self.skipped:
            need = "nodes" if "reachable" in self.skipped else "an app (-A APP)"
            lines.append(f"left out   {', '.join(self.skipped)}: they need {need}")
        counts = [f"{self.count(level)} {level}" for level in LEVELS if self.count(level)]
        lines += ["", ", ".join(counts) or "Nothing is wrong."]
        return "\n".join(map(printable, lines))
