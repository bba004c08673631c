"""From lines to bodies: when each ran, and how long its claim lasted. Pure; no library code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.campaign.worker.journal import Line, Process

BODY = ("enter", "alive", "wrote", "told", "exit")
REFUSED = "the register refused a write under a lease that stood"
PAUSE = 0.25
"""Seconds between two signs of life of a process that runs; more, and it was kept from running."""


@dataclass
class Body:
    """A run of a body.

    Attributes:
        begin: When it wrote that it had entered; seconds.
        end: When it was over; for one that was killed the last moment at which it certainly lived.
        within: Until when it was covered: its end, its deadline or the moment at which the library
            said that the lease is over, whichever came first.
        exited: It wrote its own end.
        untold: Seconds that it went on running after its deadline, by its own signs of life,
            without having been told.
        lies: False statements of the library or the register, with their times; each once.
        refused: How many of its writes the register refused.
        shared: It only reads.
        storing: Seconds for which, after its end, Celery stored what became of it.
    """

    process: Process
    resource: str
    task: str
    run: str
    token: str
    fence: int | None
    retries: int
    begin: float
    end: float
    within: float
    exited: bool
    untold: float
    lies: dict[str, float]
    refused: int = 0
    shared: bool = False
    storing: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.resource} by {self.process.worker}/{self.process.pid}"
            f" [{self.begin:.3f}, covered to {self.within:.3f}, end {self.end:.3f}"
            f"{'' if self.exited else ' (killed)'}]{' reads' if self.shared else ''}"
            f" token {self.token} task {self.task}"
        )


def bodies(lines: Mapping[Process, Sequence[Line]], alive: Mapping[Process, float]) -> list[Body]:
    """All bodies, by their begin.

    Args:
        lines: The account of every process.
        alive: When each process was last seen alive by somebody else, just before the look.
    """
    found = []
    for process, of_one in lines.items():
        runs: dict[str, list[Line]] = {}
        last: dict[int, Line] = {}
        ended: dict[int, Line] = {}
        storing: dict[str, float] = {}
        for line in of_one:
            before = last.get(line.thread)
            last[line.thread] = line
            if line.kind == "exit":
                ended[line.thread] = line
            elif line.kind == "stored" and before is not None and before.kind == "storing":
                body = ended.get(line.thread)
                if body is not None and body.task == line.task:
                    storing[body.run] = storing.get(body.run, 0.0) + line.at - before.at
            if line.kind in BODY:
                runs.setdefault(line.run, []).append(line)
        for run in runs.values():
            if run[0].kind == "enter":
                # Killed, if the thread never wrote again: it lived as long as its process.
                silent = last[run[-1].thread] is run[-1] and run[-1].kind != "exit"
                found.append(_body(process, run, alive.get(process, 0.0) if silent else 0.0))
                found[-1].storing = storing.get(run[0].run, 0.0)
    return sorted(found, key=lambda body: body.begin)


def _body(process: Process, run: list[Line], seen_alive: float) -> Body:
    enter, last = run[0], run[-1]
    end = max(last.at, seen_alive)
    valid = enter.valid
    over: float | None = None
    untold = 0.0
    told = False
    lies: dict[str, float] = {}
    refused = 0
    before = enter
    for line in run:
        if line.held:
            if line.at >= line.valid:
                lies.setdefault("the library says held after the deadline", line.at)
            if over is not None:
                lies.setdefault("the library says held again after it said lost", line.at)
            if line.kind == "wrote" and not line.more:
                lies.setdefault(REFUSED, line.at)
            valid = line.valid
        elif over is None:
            over = line.at
        refused += line.kind == "wrote" and not line.more
        told = told or line.kind == "told"
        gap = line.at - before.at
        if not told and not before.held and gap < PAUSE:
            untold += gap
        before = line
    return Body(
        process=process,
        resource=enter.resource,
        task=enter.task,
        run=enter.run,
        token=enter.token,
        fence=enter.fence,
        retries=enter.more or 0,
        begin=enter.at,
        end=end,
        within=min(end, valid, end if over is None else over),
        exited=last.kind == "exit",
        untold=untold,
        lies=lies,
        refused=refused,
        shared=enter.shared,
    )
