"""Report of one run of a campaign, for people."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.campaign.worker.chronicle import Fault
from tests.campaign.worker.liveness import Waits
from tests.campaign.worker.oracle import Problem, Verdict
from tests.campaign.worker.postgres_acts import LEFT_OUT
from tests.campaign.worker.stage import TTL


@dataclass
class Report:
    """Report of one run.

    Attributes:
        verdict: On locks and messages.
        faults: What was done, and how often.
        ends: How many tasks came to which end.
        first: Seconds until the first violation was seen, where that ended the run.
        waits: The longest waits, where there was a free slot.
        windows: Each worker's prefetch window, at the start and at rest.
        unacked: Messages unacknowledged at rest.
        broker: Which.
        store: Which.
        calls: How many calls of producers came back.
        trace: How many events, and which rules they broke.
    """

    seed: int
    seconds: float
    verdict: Verdict
    faults: list[Fault]
    counts: dict[str, int]
    ends: dict[str, int]
    begin: float
    held_back: int = 0
    stalls: int = 0
    first: float | None = None
    waits: Waits = field(default_factory=Waits)
    windows: dict[str, str] = field(default_factory=dict)
    unacked: int = 0
    broker: str = "redis"
    calls: int = 0
    trace: str = "not read"
    store: str = "redis"

    @property
    def problems(self) -> list[Problem]:
        return self.verdict.problems

    @property
    def lost(self) -> int:
        return sum(count for end, count in self.ends.items() if end in ("LOST", "stuck"))

    def __str__(self) -> str:
        verdict = self.verdict
        within = sum(p.kind.startswith("overlap") for p in self.problems)
        limits = ", ".join(f"{n} x {kind}" for kind, n in sorted(verdict.limits.items()))
        faults = ", ".join(f"{n} x {kind}" for kind, n in self.counts.items())
        readers = sum(body.shared for body in verdict.bodies)
        lines = [
            f"seed {self.seed}, {self.seconds:.0f} s, broker {self.broker}, store {self.store}",
            f"faults injected:     {sum(self.counts.values())} ({faults})",
            f"tasks sent:          {sum(self.ends.values())} ({self.held_back} held back);"
            f" bodies run: {len(verdict.bodies)}",
            "ends:                " + ", ".join(f"{n} x {end}" for end, n in self.ends.items()),
            f"overlaps:            {within} within both validities,"
            f" {verdict.limits.get('overlap past a validity', 0)} past one",
            f"longest block:       {verdict.longest:.2f} s where nothing hindered,"
            f" {verdict.excused:.2f} s under faults",
            f"lost messages:       {self.lost}",
            f"free and wanted:     {self.waits.wanted:.2f} s at worst",
            f"readers:             {verdict.beside} of {readers} began beside another; kept out for"
            f" {self.waits.kept_out:.2f} s at worst, and let in for {self.waits.passed:.2f} s where"
            " a writer waited",
            f"a no-op waited:      {self.waits.noop:.2f} s at worst, of {self.waits.probes} no-ops"
            " (both only where a slot was free)",
            "prefetch at rest:    "
            + (", ".join(f"{name} {what}" for name, what in self.windows.items()) or "not seen"),
            f"unacked at rest:     {self.unacked}",
            f"trace:               {self.trace}",
            f"producers' calls:    {self.calls}",
            f"limits met:          {limits or 'none'}",
            f"machine stalled:     {self.stalls} times",
        ]
        if self.store not in ("redis", "etcd"):
            lines.append(f"left out:            {LEFT_OUT}")
        for problem in self.problems[:20]:
            lines.append(f"VIOLATION {problem.at - self.begin:.3f} s: {problem}")
            lines += [f"    {line}" for line in self.around(problem.at)]
        if self.problems:
            lines.append(f"{len(self.problems)} VIOLATIONS with seed {self.seed}")
        else:
            lines.append("no violation")
        return "\n".join(lines)

    def around(self, at: float) -> list[str]:
        """Return the faults of the seconds before a time."""
        return [
            f"{fault.begin - self.begin:9.3f} .. "
            + (f"{fault.end - self.begin:.3f}" if fault.end else "?")
            + f"  {fault.kind} {fault.worker} {fault.pid or ''} {fault.nodes or ''}"
            for fault in self.faults
            if fault.touches(at - 2 * TTL, at + 0.5)
        ]
