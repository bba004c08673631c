"""Accounts of workers made by hand, for the oracle of liveness."""

from __future__ import annotations

from typing import Any

from tests.campaign.worker.bodies import bodies
from tests.campaign.worker.feeder import Sent
from tests.campaign.worker.journal import Line, Process
from tests.campaign.worker.liveness import Waits, judge_liveness
from tests.campaign.worker.oracle import Verdict

A, B = Process("a", 10, 10, "1"), Process("b", 20, 20, "2")
A1, B1 = Process("a", 10, 11, "3"), Process("b", 20, 21, "4")
SLOTS = {"a": 1, "b": 1}
UNTIL = 60.0
STUCK = "a key is free and wanted, and nobody takes it"
HELD_UP = "a no-op waits though a slot is free"


def sent(id_: str, resource: str = "f1", task: str = "early", at: float = 2.0, **more: Any) -> Sent:
    return Sent(id_, task, resource, 0.1, "sleep", at, certain=True, state="SUCCESS", **more)


def line(at: float, kind: str, task: str = "", due: float | None = None) -> Line:
    return Line(at, kind, 1, task, more=due)


def ran(
    process: Process,
    task: str,
    begin: float,
    end: float,
    resource: str = "f1",
    *,
    shared: bool = False,
) -> Any:
    """A body; without a resource, an unlocked task."""
    lines = [line(begin, "got", task)]
    if resource:
        for at, kind in ((begin, "enter"), (end, "exit")):
            said = (task, task, resource, task, None, end + 1.0, True, 0, shared)
            lines.append(Line(at, kind, 1, *said))
    return process, [*lines, line(end, "done", task)]


def judge(*accounts: Any, tasks: list[Sent], **more: Any) -> tuple[list[str], Waits]:
    lines: dict[Process, list[Line]] = {A: [line(0.0, "connected")], B: [line(0.0, "connected")]}
    for process, of_one in accounts:
        lines[process] = sorted([*lines.get(process, []), *of_one], key=lambda one: one.at)
    alive = {process: UNTIL for process in lines} | more.pop("alive", {})
    verdict = Verdict(bodies=bodies(lines, alive))
    ledger = {one.id: one for one in tasks}
    waits = judge_liveness(
        verdict, ledger, lines, alive, more.pop("faults", ()), more.pop("sights", ()),
        more.pop("stalls", ()), more.pop("slots", SLOTS), UNTIL, **more,
    )  # fmt: skip
    return [problem.kind for problem in verdict.problems], waits
