"""The bodies' own log, and the oracle that reads it. Shares no code with the library.

Each line is one `write()` to a file opened with O_APPEND, so lines of many processes never mix. All
run on one host: CLOCK_MONOTONIC is one clock for them.

A run of a body lasts from its first line to its last. Bodies that will be killed write signs of
life until they die, every few milliseconds: the last of them is the latest moment at which that
body is *known* to have lived, and no other may have entered before it. (When its process was seen
dead is no better: a lock may rightly be freed, and taken, before the observer has had a look.)
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

VARIABLE = "TEST_LOG"


@dataclass(frozen=True)
class Line:
    at: float
    kind: str
    resource: str
    pid: int
    task: str
    detail: Any


@dataclass
class Run:
    """A run of a body, as far as it is known."""

    resource: str
    task: str
    pid: int
    begin: float
    end: float
    ended: bool = False


def note(kind: str, resource: str, task: Any = "", detail: Any = "", path: str = "") -> None:
    """Write one line."""
    line = json.dumps([time.monotonic(), kind, resource, os.getpid(), task, detail])
    fd = os.open(path or os.environ[VARIABLE], os.O_APPEND | os.O_WRONLY | os.O_CREAT)
    try:
        os.write(fd, line.encode() + b"\n")
    finally:
        os.close(fd)


def read(path: str) -> list[Line]:
    """All lines so far."""
    return read_on(path, 0)[0]


def read_on(path: str, begin: int) -> tuple[list[Line], int]:
    """The lines from an offset on, and the offset to go on from."""
    with open(path, "rb") as file:
        file.seek(begin)
        text = file.read()
    end = text.rfind(b"\n") + 1
    return [Line(*json.loads(line)) for line in text[:end].splitlines()], begin + end


def runs(lines: Iterable[Line]) -> list[Run]:
    """The runs of bodies, by their begin."""
    found: dict[Any, Run] = {}
    for line in sorted(lines, key=lambda line: line.at):
        name = (line.resource, line.task, line.detail)
        if line.kind == "enter":
            found[name] = Run(line.resource, line.task, line.pid, line.at, line.at)
        elif line.kind in ("alive", "exit"):
            found[name].end = line.at
            found[name].ended = line.kind == "exit"
    return list(found.values())


def overlaps(lines: Iterable[Line]) -> list[tuple[Run, Run]]:
    """Pairs of runs of one resource of which the second began before the first was over."""
    by_resource: dict[str, list[Run]] = {}
    for run in runs(lines):
        by_resource.setdefault(run.resource, []).append(run)
    found = []
    for of_one in by_resource.values():
        latest = of_one[0]
        for run in of_one[1:]:
            if run.begin < latest.end:
                found.append((latest, run))
            latest = max(latest, run, key=lambda one: one.end)
    return found


def runs_of(task: str) -> int:
    """Return the number of runs of a task that have begun; in a worker."""
    return sum(line.kind == "enter" and line.task == task for line in read(os.environ[VARIABLE]))
