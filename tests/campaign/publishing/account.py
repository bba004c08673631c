"""From the lines of producers and workers to calls and bodies. Pure; no library code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tests.campaign.worker.journal import Line, Process

REPLACING = ("debounced", "settled", "begun")
ONCE = {"once": 0.0, "surely": 0.0, "succeeded": 2.0, "expired": 2.0}
"""Tasks whose key is reserved until the body's end, and for so many seconds behind it."""


@dataclass(frozen=True)
class Call:
    """A call of `apply_async`, or an error callback that is owed.

    Attributes:
        number: Its name.
        what: Its task and key.
        begin: When it was made; seconds.
        end: When it came back.
        given: The id that it was given; empty if it raised.
        reserved: Whether its message left with a reservation; None if no message left.
        due: When it may run.
    """

    number: str
    what: str
    begin: float
    end: float = math.inf
    given: str = ""
    reserved: bool | None = None
    due: float = 0.0

    @property
    def task(self) -> str:
        return self.what.partition(":")[0]

    @property
    def reserves(self) -> bool:
        """Return True if the task of the call reserves its key."""
        return self.task in (*REPLACING, *ONCE)

    def __str__(self) -> str:
        left = {None: "no message", True: "reserved", False: "without a reservation"}
        came = f"[{self.begin:.3f}, {self.end:.3f}] {self.given or 'no id'}, {left[self.reserved]}"
        return f"{self.what} {self.number} {came}"


@dataclass(frozen=True)
class Run:
    """A body.

    Attributes:
        number: The call that it is for.
        what: Its task and key.
        id: Its message's.
        enter: When it began; seconds.
        exit: When it ended; never, if it was broken off.
        worker: The name of its worker.
    """

    number: str
    what: str
    id: str
    enter: float
    exit: float = math.inf
    worker: str = ""


class Move(NamedTuple):
    """Something that became of a message in a worker."""

    at: float
    kind: str
    process: Process


@dataclass
class Account:
    """Everything that producers and workers have written.

    Attributes:
        calls: By their numbers.
        runs: By their begin.
        moves: Of each message, by its id.
        stopping: When a worker's main process was told to stop.
        connected: When a worker began to consume.
    """

    calls: dict[str, Call] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    moves: dict[str, list[Move]] = field(default_factory=dict)
    stopping: dict[tuple[str, int], float] = field(default_factory=dict)
    connected: list[float] = field(default_factory=list)


def account_of(lines: Mapping[Process, Sequence[Line]]) -> Account:
    """Read what all processes have written."""
    found = Account()
    for process, of_one in lines.items():
        for line in of_one:
            _enter(found, process, line)
    found.runs.sort(key=lambda run: run.enter)
    for moves in found.moves.values():
        moves.sort()
    return found


def _enter(found: Account, process: Process, line: Line) -> None:
    call = found.calls.get(line.run)
    if line.kind == "call":
        due = line.at + (line.more or 0.0)
        found.calls[line.run] = Call(line.run, line.resource, line.at, due=due)
    elif line.kind == "out" and call is not None and call.end == math.inf:
        # Later ones are of workers, which send a message again.
        found.calls[line.run] = replace(call, reserved=line.held)
    elif line.kind == "gave" and call is not None:
        found.calls[line.run] = replace(call, end=line.at, given=line.task)
    elif line.kind == "refused" and call is not None:
        found.calls[line.run] = replace(call, end=line.at, reserved=None)
    elif line.kind == "enter":
        found.runs.append(Run(line.run, line.resource, line.task, line.at, worker=process.worker))
    elif line.kind == "exit":
        last = max(n for n, run in enumerate(found.runs) if run.number == line.run)
        found.runs[last] = replace(found.runs[last], exit=line.at)
    elif line.kind in ("received", "got", "done", "revoked"):
        found.moves.setdefault(line.task, []).append(Move(line.at, line.kind, process))
    elif line.kind == "connected":
        found.connected.append(line.at)
    elif line.kind == "stopping":
        found.stopping[process.worker, process.main] = line.at
