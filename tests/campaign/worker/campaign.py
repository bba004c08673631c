"""Real workers under faults for a while, and the verdict.

    python -m tests.campaign.worker.campaign --seconds 600 --seed 1
    python -m tests.campaign.worker.campaign --seconds 90 --mutant blind-release

Exits with 1 on a violation; with a mutant, when none was found.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import kombu

from tests.campaign.worker.broker import BROKERS, VISIBILITY
from tests.campaign.worker.chronicle import DEMOTED, Fault
from tests.campaign.worker.feeder import READ, RESOURCES, Feeder
from tests.campaign.worker.journal import now
from tests.campaign.worker.liveness import BROKER_AWAY, Waits, judge_liveness
from tests.campaign.worker.messages import judge_calls, judge_messages
from tests.campaign.worker.mutants import MUTANTS
from tests.campaign.worker.nemesis import DIRECTED, Nemesis, Phase, phases_of
from tests.campaign.worker.oracle import Verdict, judge
from tests.campaign.worker.report import Report
from tests.campaign.worker.rest import half_told, judge_rest
from tests.campaign.worker.rules import check, text_of
from tests.campaign.worker.sentry import Sentry, leftovers
from tests.campaign.worker.stage import MORE_POOLS, SLOTS, TTL, Stage
from tests.campaign.worker.stores import STORES, lasting
from tests.campaign.worker.tracing import read
from tests.campaign.worker.turns import judge_queues
from tests.campaign.worker.worker_acts import BY_ITSELF
from tests.support.wait import wait_until

START = 60.0
"""Seconds for the workers to start, on a machine that is busy."""
DRAIN = VISIBILITY + 45.0
"""Seconds after the last fault within which every task must have come to an end."""
LOOKS = 100.0
"""Seconds between two searches of a kombu before 5.7 for messages not acknowledged in time."""
SETTLES = 5.0
"""Seconds for a prefetch window to be what it was, when all is quiet."""
LIVE = 4.0
"""Seconds between two looks at the verdict, where the first violation ends the run."""


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
    """Run the campaign.

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
    store = options.get("store", "redis")
    phases = phases or phases_of(store)
    if planted is not None:
        phases = tuple(
            phase for phase in (*phases_of(store), *DIRECTED) if phase.name in planted.phases
        )
        options |= planted.conf
        seconds = min(seconds, planted.seconds)
    kind = options.get("broker", "redis")
    with Stage(path, seed, mutant=mutant, **options) as stage:
        wait_until(
            lambda: all(worker.ready for worker in stage.workers), START, "the workers are ready"
        )
        reads = store == "redis"
        feeder = Feeder(stage.app, stage.results, seed, reads=reads)
        sentry = Sentry(stage.standing, RESOURCES, stage.journal, READ if reads else ())
        nemesis = Nemesis(stage, feeder, seed, seconds, phases)
        faults = nemesis.chronicle.faults
        begin = now()
        first: float | None = None
        looked = time.monotonic()
        waits: list[Waits] = []
        before = windows(stage)
        after: dict[str, dict[str, Any]] = {}
        unacked = 0

        def verdict() -> Verdict:
            # Copied first: of a task that is done here, the accounts have all.
            ledger = {id_: replace(sent) for id_, sent in dict(feeder.ledger).items()}
            lines = stage.journal.read()
            sights = list(sentry.sights.values())
            until = now() - 3.0
            alive = dict(sentry.alive)
            found = judge(
                lines, alive, faults, sights, sentry.stalls, until, len(stage.nodes),
                lasting(store, TTL),
            )  # fmt: skip
            waits.append(
                judge_liveness(
                    found, ledger, lines, alive, faults, sights, sentry.stalls,
                    SLOTS, until, at_once=stage.broker.at_once,
                    starved=sentry.starved,
                )
            )  # fmt: skip
            judge_queues(found, ledger, lines, faults, sentry.queues)
            return found

        def look() -> bool:
            nonlocal first, looked
            if every is not None:
                every(nemesis.phase.name)
            if planted is None or time.monotonic() < looked + LIVE:
                return False
            looked = time.monotonic()
            if planted.is_found(verdict().problems):
                first = now() - begin
            return first is not None

        sentry.network, sentry.broker = stage.network.thread, stage.broker.pid
        sentry.start()
        feeder.start()
        try:
            nemesis.run(look)
            feeder.stop()
            if every is not None:
                every("drain")
            waiting = [] if first is not None else drain(stage, feeder)
            if first is None:
                after = at_rest(stage, before)
                unacked = unacknowledged(stage, nemesis.chronicle.faults)
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
            # One that starts among replicas alone refuses to, as it is to.
            if fault.kind == BY_ITSELF and not near(fault, (*BROKER_AWAY, DEMOTED), faults):
                found.problem(BY_ITSELF, fault.begin, f"{fault.worker}, pid {fault.pid}")
        for key in rest:
            if key.endswith("#reserved"):
                continue  # judged by what was called, not by how long it lies there
            found.problem("key left after the end", now(), key)
        if found.bodies and not sentry.sights:
            found.problem("void", begin, "bodies ran, and no key was seen on any node")
        ends = {}
        calls = 0
        traces = read(stage.bodies / "trace")
        died = {p: at for p, at in sentry.alive.items() if p in sentry.dead}
        # A child may end with its first task, and the sentry never have seen it.
        unseen = {p: e[-1].at for p, e in traces.items() if e and p not in sentry.alive}
        died = {**unseen, **died}
        guard = stage.conf.get("redlock_restart_guard") != "off"
        breaches = check(
            traces, len(stage.nodes), faults, died, guard=guard, follows_up=store == "etcd"
        )
        for breach in breaches:
            found.problem(f"trace, rule {breach.rule}", breach.at, str(breach))
        if found.bodies and not traces:
            found.problem("void", begin, "bodies ran, and nobody wrote a trace")
        if first is None:
            judge_rest(found, before, after, unacked, now(), half_told(stage.journal.read()))
            calls = judge_calls(found, stage.journal.lines, died)
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
        waits[-1],
        {
            name: f"{at['value']} -> {after.get(name, {}).get('value')}"
            for name, at in before.items()
        },
        unacked,
        kind,
        calls,
        f"{sum(map(len, traces.values()))} events of {len(traces)} processes, {text_of(breaches)}",
        store,
    )


def near(fault: Fault, kinds: tuple[str, ...], faults: list[Fault]) -> bool:
    """Return True if a fault of these kinds just began. Celery 5.7 may end with its broker:

    `Unrecoverable error: AttributeError("'NoneType' object has no attribute 'hostname'")`, or
    `UnpicklingError` when it was reading from a pool child. Its process may hang in that end.
    """
    return any(f.kind in kinds and f.touches(fault.begin - 5.0, fault.begin) for f in faults)


def drain(stage: Stage, feeder: Feeder) -> list[str]:
    """Wait until nothing is left to do; return the ids of messages that are still somewhere."""
    end = time.monotonic() + DRAIN
    quiet = 0
    while time.monotonic() < end and quiet < 5:
        feeder.look()
        # Once may be between two places. RabbitMQ is asked when nothing else is left to wait for:
        # each question costs a second of a core.
        calm = not _running(stage) and (quiet or not stage.broker.at_once or not feeder.waiting())
        quiet = quiet + 1 if calm and not sum(stage.broker.messages()) else 0
        time.sleep(0.2)
    return list(stage.broker.holds({sent.id for sent in feeder.waiting()}))


def windows(stage: Stage) -> dict[str, dict[str, Any]]:
    """Return the prefetch window of each worker, as it reports it."""
    told: dict[str, dict[str, Any]] = {}
    for _try in range(10):
        replies = stage.app.control.inspect(timeout=1.0)._request("window") or {}
        told |= {name.partition("@")[0]: reply for name, reply in replies.items()}
        if len(told) == len(stage.workers):
            break
    return told


def at_rest(stage: Stage, before: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the windows when they have settled: Celery restores them step by step."""
    end = time.monotonic() + SETTLES
    while True:
        after = windows(stage)
        found = Verdict()
        judge_rest(found, before, after, 0, 0.0)
        if not found.problems or time.monotonic() > end:
            return after
        time.sleep(0.3)


def unacknowledged(stage: Stage, faults: Sequence[Fault]) -> int:
    """Return the number of messages at rest that the broker counts as unacknowledged."""
    slow = kombu.VERSION[:2] < (5, 7)  # its workers look for a dead one's messages every 100 s
    # Acknowledgements over a connection that had just been cut are lost.
    lost = any(fault.kind in ("worker kill -9", *BROKER_AWAY) for fault in faults)
    end = time.monotonic() + (LOOKS + VISIBILITY if slow and lost else 0.0)
    while (left := stage.broker.messages()[1]) and time.monotonic() < end:
        time.sleep(0.3)
    return left


def _running(stage: Stage) -> bool:
    """Return True if a body has begun and not ended, in a process that lives."""
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
    parser.add_argument("--broker", default="redis", choices=BROKERS)
    parser.add_argument("--store", default="redis", choices=STORES)
    parser.add_argument("--pool", action="append", default=[], help="only this worker")
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

    phases = tuple(
        phase for phase in (*phases_of(options.store), *DIRECTED) if phase.name in options.phase
    )
    directory = options.keep or Path(tempfile.mkdtemp(prefix="redlock-faults-"))
    report = campaign(
        directory / "run",
        options.seconds,
        seed=options.seed,
        mutant=options.mutant,
        phases=phases,
        every=progress,
        broker=options.broker,
        store=options.store,
        pools={n: a for n, a in MORE_POOLS.items() if n in options.pool or not options.pool},
    )
    print(report)
    if report.problems and not options.mutant:
        print(f"logs and journals: {directory}")
    elif not options.keep:
        shutil.rmtree(directory)
    if options.mutant:
        found = MUTANTS[options.mutant].is_found(report.problems)
        seconds = report.seconds if report.first is None else report.first
        print(f"{options.mutant}: {'FOUND after' if found else 'NOT FOUND in'} {seconds:.0f} s")
        return 0 if found else 1
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
