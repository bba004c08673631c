"""Real workers under faults for a while, and the verdict.

    python -m tests.faults.campaign --seconds 600 --seed 1
    python -m tests.faults.campaign --seconds 90 --mutant blind-release

Exits with 1 on a violation; with a mutant, when none was found.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from tests.faults.chronicle import Fault
from tests.faults.feeder import RESOURCES, Feeder
from tests.faults.journal import now
from tests.faults.messages import judge_messages
from tests.faults.mutants import MUTANTS
from tests.faults.nemesis import DIRECTED, PHASES, Nemesis, Phase
from tests.faults.oracle import Problem, Verdict, judge
from tests.faults.sentry import Sentry, leftovers
from tests.faults.stage import TTL, VISIBILITY, Stage
from tests.faults.worker_acts import BY_ITSELF
from tests.support import wait_until

START = 60.0
"""Seconds for the workers to start, on a machine that is busy."""
DRAIN = VISIBILITY + 45.0
"""Seconds after the last fault within which every task must have come to an end."""
LIVE = 4.0
"""Seconds between two looks at the verdict, where the first violation ends the run."""


@dataclass
class Report:
    """Of one run.

    Attributes:
        verdict: On locks and messages.
        faults: What was done, and how often.
        ends: How many tasks came to which end.
        first: Seconds until the first violation was seen, where that ended the run.
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
    phases: list[str] = field(default_factory=list)

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
        lines = [
            f"seed {self.seed}, {self.seconds:.0f} s",
            f"faults injected:     {sum(self.counts.values())} ({faults})",
            f"tasks sent:          {sum(self.ends.values())} ({self.held_back} held back);"
            f" bodies run: {len(verdict.bodies)}",
            "ends:                " + ", ".join(f"{n} x {end}" for end, n in self.ends.items()),
            f"overlaps:            {within} within both validities,"
            f" {verdict.limits.get('overlap past a validity', 0)} past one",
            f"longest block:       {verdict.longest:.2f} s where nothing hindered,"
            f" {verdict.excused:.2f} s under faults",
            f"lost messages:       {self.lost}",
            f"limits met:          {limits or 'none'}",
            f"machine stalled:     {self.stalls} times",
        ]
        for problem in self.problems[:20]:
            lines.append(f"VIOLATION {problem.at - self.begin:.3f} s: {problem}")
            lines += [f"    {line}" for line in self.around(problem.at)]
        if self.problems:
            lines.append(f"{len(self.problems)} VIOLATIONS with seed {self.seed}")
        else:
            lines.append("no violation")
        return "\n".join(lines)

    def around(self, at: float) -> list[str]:
        """What was done in the seconds before something happened."""
        return [
            f"{fault.begin - self.begin:9.3f} .. "
            + (f"{fault.end - self.begin:.3f}" if fault.end else "?")
            + f"  {fault.kind} {fault.worker} {fault.pid or ''} {fault.nodes or ''}"
            for fault in self.faults
            if fault.touches(at - 2 * TTL, at + 0.5)
        ]


def campaign(
    path: Path,
    seconds: float,
    *,
    seed: int = 1,
    mutant: str = "",
    phases: tuple[Phase, ...] = (),
    every: Callable[[str], object] | None = None,
    **options: Any,
) -> Report:
    """Run it.

    Args:
        path: For logs and journals; a directory that is empty.
        seconds: How long there are faults.
        seed: Of everything.
        mutant: The bug to plant; the first violation ends the run.
        phases: Only these; all that can be, if none is named.
        every: Called now and then, with the phase.
        **options: As of `Stage`.
    """
    planted = MUTANTS.get(mutant)
    phases = phases or PHASES
    if planted is not None:
        phases = tuple(phase for phase in (*PHASES, *DIRECTED) if phase.name in planted.phases)
        options |= planted.conf
        seconds = min(seconds, planted.seconds)
    with Stage(path, seed, mutant=mutant, **options) as stage:
        wait_until(
            lambda: all(worker.ready for worker in stage.workers), START, "the workers are ready"
        )
        feeder = Feeder(stage.app, stage.results, seed)
        sentry = Sentry(stage.nodes, RESOURCES, stage.journal)
        nemesis = Nemesis(stage, feeder, seed, seconds, phases)
        faults = nemesis.chronicle.faults
        begin = now()
        first: float | None = None
        looked = time.monotonic()

        def verdict() -> Verdict:
            lines = stage.journal.read()
            sights = list(sentry.sights.values())
            return judge(lines, dict(sentry.alive), faults, sights, sentry.stalls, now() - 3.0)

        def look() -> bool:
            nonlocal first, looked
            if every is not None:
                every(nemesis.phase.name)
            if planted is None or time.monotonic() < looked + LIVE:
                return False
            looked = time.monotonic()
            if any(p.kind.startswith(planted.finds) for p in verdict().problems):
                first = now() - begin
            return first is not None

        sentry.start()
        feeder.start()
        try:
            nemesis.run(look)
            feeder.stop()
            if every is not None:
                every("drain")
            waiting = [] if first is not None else drain(stage, feeder)
            time.sleep(
                TTL + 0.5
            )  # for what no one extends any more to be gone: exactly the promise
            sentry.close()
            feeder.look(all_of_them=True)
            found = verdict()
            rest = leftovers(stage.nodes) if first is None else []
        finally:
            sentry.close()
            feeder.close()
        for fault in faults:
            if fault.kind == BY_ITSELF and not near(fault, "broker restart", faults):
                found.problem(BY_ITSELF, fault.begin, f"{fault.worker}, pid {fault.pid}")
        for key in rest:
            found.problem("key left after the end", now(), key)
        if found.bodies and not sentry.sights:
            found.problem("void", begin, "bodies ran, and no key was seen on any node")
        ends = {}
        if first is None:
            ends = judge_messages(found, feeder.ledger, stage.journal.lines, faults, waiting)
    return Report(
        seed,
        now() - begin,
        found,
        faults,
        nemesis.chronicle.counts(),
        ends,
        begin,
        feeder.held_back,
        len(sentry.stalls),
        first,
    )


def near(fault: Fault, kind: str, faults: list[Fault]) -> bool:
    """Whether that had just been done. Celery 5.7 may end when its broker goes away:

    `Unrecoverable error: AttributeError("'NoneType' object has no attribute 'hostname'")`.
    """
    return any(f.kind == kind and f.touches(fault.begin - 5.0, fault.begin) for f in faults)


def drain(stage: Stage, feeder: Feeder) -> list[str]:
    """Wait until nothing is left to do; the ids of messages that are still somewhere."""
    client = redis.Redis.from_url(stage.broker.url)

    def left() -> int:
        return int(client.llen("celery")) + int(client.hlen("unacked"))

    end = time.monotonic() + DRAIN
    quiet = 0
    while time.monotonic() < end and quiet < 5:
        feeder.look()
        # Once may be between two places.
        quiet = quiet + 1 if not left() and not _running(stage) else 0
        time.sleep(0.2)
    raw = [*client.lrange("celery", 0, -1), *client.hvals("unacked")]
    texts = [text.decode(errors="replace") for text in raw]
    client.close()
    return [sent.id for sent in feeder.waiting() if any(sent.id in text for text in texts)]


def _running(stage: Stage) -> bool:
    """Whether a body has begun, in a process that lives, and not ended."""
    for process, lines in stage.journal.read().items():
        last = {line.thread: line for line in lines}
        busy = any(line.kind in ("got", "enter", "alive") for line in last.values())
        if busy and process.alive():
            return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mutant", default="", choices=["", "list", *MUTANTS])
    parser.add_argument("--keep", type=Path, help="keep logs and journals here")
    parser.add_argument("--phase", action="append", default=[], help="only this phase")
    options = parser.parse_args()
    if options.mutant == "list":
        print("\n".join(f"{name:<20} no longer so: {m.what}" for name, m in MUTANTS.items()))
        return 0
    what = f", MUTANT {options.mutant}" if options.mutant else ""
    print(f"{options.seconds:g} s, seed {options.seed}{what}", flush=True)
    said = ""
    begin = time.monotonic()

    def progress(phase: str) -> None:
        nonlocal said
        if phase != said:
            said = phase
            print(f"{time.monotonic() - begin:6.1f} s  {phase}", flush=True)

    phases = tuple(phase for phase in (*PHASES, *DIRECTED) if phase.name in options.phase)
    with tempfile.TemporaryDirectory(prefix="redlock-faults-") as directory:
        report = campaign(
            (options.keep or Path(directory)) / "run",
            options.seconds,
            seed=options.seed,
            mutant=options.mutant,
            phases=phases,
            every=progress,
        )
    print(report)
    if options.mutant:
        found = report.first is not None or any(
            problem.kind.startswith(MUTANTS[options.mutant].finds) for problem in report.problems
        )
        seconds = report.seconds if report.first is None else report.first
        print(f"{options.mutant}: {'FOUND after' if found else 'NOT FOUND in'} {seconds:.0f} s")
        return 0 if found else 1
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
