"""Producers, workers and beats under faults for a while, and the verdict on what was published.

    python -m tests.campaign.publishing.campaign --seconds 600 --seed 1
    python -m tests.campaign.publishing.campaign --seconds 60 --mutant NAME

Exits with 1 on a violation; with a mutant, when none was found.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.campaign.publishing.account import Account, account_of
from tests.campaign.publishing.acts import PublishingActs
from tests.campaign.publishing.mutants import MUTANTS
from tests.campaign.publishing.oracle import judge, judge_rest
from tests.campaign.publishing.stage import POOLS, TTL, Stage
from tests.campaign.publishing.ticks import beats
from tests.campaign.worker.broker import BROKERS, VISIBILITY
from tests.campaign.worker.chronicle import Fault
from tests.campaign.worker.journal import now
from tests.campaign.worker.nemesis import Nemesis, Phase
from tests.campaign.worker.oracle import Problem, Verdict
from tests.campaign.worker.sentry import leftovers
from tests.campaign.worker.stores import STORES
from tests.support import machine
from tests.support.wait import wait_until

START = 60.0
"""Seconds for workers to start, on a machine that is busy."""
DRAIN = VISIBILITY + 30.0
"""Seconds after the last fault within which all messages are gone."""
REST = 13.0
"""Seconds within which all reservations are gone then: a producer's lasts for ten at first."""
SHOWN = 6
"""Violations of each kind that a report shows."""
PHASES = (
    Phase("calm", 0.0, 0.0, 0.0),
    Phase("restarts", 0.0, 3.0, 0.8, only=("warm_all", "cold_all")),
    Phase("guard", 0.5, 0.0, 0.0, only=("stop_in_guard",)),
    Phase("nodes", 0.5, 2.0, 6.0),
    Phase("processes", 4.0, 4.0, 0.5),
    Phase("purge", 0.0, 4.0, 1.0, only=("purge_idle",)),
    Phase("all", 2.0, 2.0, 3.0),
)
OF_NODES = ("guard", "nodes")
"""Phases for which a store that is one node has nothing."""
SHORT = PHASES[1:3]
"""Phases for `make test`."""


@dataclass
class Report:
    """Report of one run."""

    seed: int
    broker: str
    seconds: float
    verdict: Verdict
    account: Account
    faults: list[Fault]

    @property
    def problems(self) -> list[Problem]:
        return self.verdict.problems

    def __str__(self) -> str:
        calls = self.account.calls.values()
        counts: dict[str, int] = {}
        for fault in self.faults:
            counts[fault.kind] = counts.get(fault.kind, 0) + 1
        lines = [
            f"seed {self.seed}, broker {self.broker}, {self.seconds:.0f} s: {len(calls)} calls,"
            f" {sum(not call.given for call in calls)} refused,"
            f" {sum(call.given != '' and call.reserved is None for call in calls)} duplicates,"
            f" {sum(call.reserved is False and call.reserves for call in calls)} without a"
            " reservation,"
            f" {len(self.account.runs)} bodies, longest wait {self.verdict.longest:.2f} s",
            "faults: " + ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items())),
        ]
        lines += [f"limit: {count} x {kind}" for kind, count in self.verdict.limits.items()]
        for kind in dict.fromkeys(problem.kind for problem in self.problems):
            of_kind = [problem.text for problem in self.problems if problem.kind == kind]
            lines.append(f"VIOLATION: {len(of_kind)} x {kind}")
            lines += [f"  {text}" for text in of_kind[:SHOWN]]
        lines.append(f"{len(self.problems)} VIOLATIONS" if self.problems else "no violation")
        return "\n".join(lines)


def campaign(
    path: Path,
    seconds: float,
    *,
    seed: int = 1,
    mutant: str = "",
    phases: tuple[Phase, ...] = (),
    broker: str = "redis",
    store: str = "redis",
) -> Report:
    """Run the campaign.

    Args:
        path: For logs and journals; a directory that is empty.
        seconds: How long tasks are called, under faults; less may do for a mutant.
        seed: Of everything.
        mutant: The bug to plant.
        phases: Only these; all that can be, if none is named.
        broker: One of `BROKERS`.
        store: One of `STORES`.
    """
    planted = MUTANTS.get(mutant)
    phases = phases or phases_of(store)
    if planted is not None:
        phases = tuple(phase for phase in phases if phase.name in planted.phases)
        seconds = min(seconds, planted.seconds)
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(
            Stage(
                path, seed, mutant=mutant, pools=POOLS, broker=broker, store=store, redlock_ttl=TTL
            )
        )
        asked = time.monotonic()
        clocks = stack.enter_context(beats(stage.nodes, path / "beats", mutant))
        wait_until(
            lambda: all(worker.ready for worker in stage.workers), START, "workers are ready"
        )
        clocks.started()
        wait_until(lambda: time.monotonic() > asked + TTL + 2.0, START, "all nodes have a vote")
        clocks.count()
        begin = now()
        nemesis = Nemesis(stage, None, seed, seconds, phases, PublishingActs)  # type: ignore[arg-type]
        for producer in stage.producers:
            producer.start(seed, seconds)
        nemesis.run()
        faults = nemesis.chronicle.faults
        for producer in stage.producers:
            assert producer.process is not None
            code = producer.process.wait(seconds + START)
            assert code == 0, producer.text
        drained = drain(stage)
        left = at_rest(stage)
        account = account_of(stage.journal.read())
        verdict = judge(
            account, faults, lambda *times: machine.HOPS * machine.stalled(*times), len(stage.nodes)
        )
        if not drained:
            verdict.problem("messages are left", now(), str(stage.broker.messages()))
        judge_rest(verdict, left, now(), faults)
        clocks.judge(verdict, faults)
        return Report(seed, broker, now() - begin, verdict, account, faults)


def phases_of(store: str) -> tuple[Phase, ...]:
    """Return all that a store is put through."""
    if store == "redis":
        return PHASES
    return tuple(replace(phase, nodes=0.0) for phase in PHASES if phase.name not in OF_NODES)


def drain(stage: Stage) -> bool:
    """Wait until nothing is left to do; return whether that is so."""
    end, quiet = time.monotonic() + DRAIN, 0
    while time.monotonic() < end and quiet < 5:
        quiet = quiet + 1 if not sum(stage.broker.messages()) else 0
        time.sleep(0.1)
    return quiet == 5


def at_rest(stage: Stage) -> list[tuple[int, str]]:
    """Return the reservations that stay on nodes: a node's number, and the key."""
    end = time.monotonic() + REST
    while (left := reservations(leftovers(stage.nodes))) and time.monotonic() < end:
        time.sleep(0.2)
    return left


def reservations(keys: Iterable[str]) -> list[tuple[int, str]]:
    """Return those of all keys on nodes that are reservations."""
    split = (key.removeprefix("node ").split(": ", 1) for key in keys if key.endswith("#reserved"))
    return [(int(node), key) for node, key in split]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--broker", default="redis", choices=BROKERS)
    parser.add_argument("--store", default="redis", choices=STORES)
    parser.add_argument("--mutant", default="", choices=["", "list", *MUTANTS])
    parser.add_argument("--keep", type=Path, help="keep logs and journals here")
    parser.add_argument("--phase", action="append", default=[], help="only this phase")
    options = parser.parse_args()
    if options.mutant == "list":
        print("\n".join(f"{name:<20} no longer so: {m.what}" for name, m in MUTANTS.items()))
        return 0
    phases = tuple(phase for phase in phases_of(options.store) if phase.name in options.phase)
    directory = options.keep or Path(tempfile.mkdtemp(prefix="redlock-publishing-"))
    watcher = machine.watch(str(directory / "stalls"))
    atexit.register(watcher.kill)
    what = f", MUTANT {options.mutant}" if options.mutant else ""
    print(f"{options.seconds:g} s, seed {options.seed}, {options.broker}{what}", flush=True)
    report = campaign(
        directory / "run",
        options.seconds,
        seed=options.seed,
        mutant=options.mutant,
        phases=phases,
        broker=options.broker,
        store=options.store,
    )
    print(report)
    if report.problems and not options.mutant:
        print(f"logs and journals: {directory}")
    elif not options.keep:
        shutil.rmtree(directory)
    if options.mutant:
        found = MUTANTS[options.mutant].is_found(report.problems)
        print(f"{options.mutant}: {'FOUND' if found else 'NOT FOUND'}")
        return 0 if found else 1
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
