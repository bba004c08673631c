"""The events, recorded by the processes that they happened to; and the story made of them.

Every process appends to its own file, one line per event, each line with one `write()`: a line is
there or it is not, whichever process is killed when. Times are CLOCK_MONOTONIC, which all processes
of a machine share.

The events: `sent`, `wait` (a charge was refused its lock, and waits in its child), `away` (it
waited too long, and was sent again for later), `enter`, `exit`, `failed` (a body that raised),
`kill` (of a pool child), `quorum` (how many nodes must be up, and how late a tick may be), `node`
(up or down), `ready` (the worker), `beat` (up or killed), `tick` (the periodic job ran; with the
time at which, and the beat by which, its message was sent).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["INTERVAL", "QUORUM", "Body", "Journal", "Story", "Tick"]

INTERVAL = 1.0
"""Seconds from one tick to the next."""
QUORUM = 3
"""Nodes, of five, that must be up for a body to start."""


class Journal:
    """A directory in which each process writes a file of its own."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._offsets: dict[Path, int] = {}

    def write(self, what: str, at: float | None = None, **facts: Any) -> None:
        """Append one event; `at` is in seconds of CLOCK_MONOTONIC, now if None."""
        pid = os.getpid()  # read each time: a pool child is a fork, and has a file of its own
        event = {"what": what, "at": time.monotonic() if at is None else at, "pid": pid, **facts}
        with open(self._directory / f"{pid}.journal", "ab", buffering=0) as file:
            file.write(json.dumps(event).encode() + b"\n")

    def new(self) -> list[dict[str, Any]]:
        """Return all events written since the last call, by time."""
        events = []
        for path in self._directory.glob("*.journal"):
            with open(path, "rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole = [line for line in file if line.endswith(b"\n")]
            self._offsets[path] = self._offsets.get(path, 0) + sum(map(len, whole))
            events += [json.loads(line) for line in whole]
        return sorted(events, key=lambda event: float(event["at"]))


@dataclass
class Body:
    """One run of a body. It should take `seconds`; `end` is infinite until it is known."""

    order: int
    task: str
    pid: int
    begin: float
    seconds: float
    end: float = math.inf
    ending: str = "running"  # then "exit", "failed" or "killed"


@dataclass(frozen=True)
class Tick:
    """One message of the periodic job, however often it was delivered; `sent` by a beat's clock."""

    sent: float
    beat: int


class Story:
    """The story in a journal: the charges sent, their bodies, and the faults, with their times.

    Attributes:
        sent: The order of each charge.
        kills: Time of death of each killed pool child, by its pid.
        waiting: The last refusal in each pool child that waits, by its pid.
        away: Charges that were put off.
        quorum: Nodes that must be up for a body to start.
        late: Seconds by which the tick after a death may be later than with Redis.
        nodes: The times at which each node came up or went down; `beats` likewise.
        ticks: Ticks by their message's id: if its child is killed, a message is delivered again.
        last: Time of the last event; seconds.
    """

    def __init__(self, events: Iterable[dict[str, Any]] = ()) -> None:
        self.sent: dict[str, int] = {}
        self.bodies: list[Body] = []
        self.kills: dict[int, float] = {}
        self.waiting: dict[int, dict[str, Any]] = {}
        self.away: list[dict[str, Any]] = []
        self.nodes: list[tuple[float, int, bool]] = []
        self.beats: list[tuple[float, int, bool]] = []
        self.ticks: dict[str, Tick] = {}
        self.quorum, self.late = QUORUM, 0.0
        self.last = 0.0
        self.ready = False
        self._open: dict[tuple[int, str], Body] = {}
        self.tell(events)

    def tell(self, events: Iterable[dict[str, Any]]) -> None:
        """Continue the story with the next events."""
        for event in events:
            at, pid = event["at"], event["pid"]
            self.last = max(self.last, at)
            match event["what"]:
                case "sent":
                    self.sent[event["task"]] = event["order"]
                case "wait":
                    self.waiting[pid] = event
                case "away":
                    self.waiting.pop(pid, None)
                    self.away.append(event)
                case "enter":
                    self.waiting.pop(pid, None)
                    names = ("order", "task", "pid", "seconds")
                    body = Body(begin=at, **{name: event[name] for name in names})
                    self.bodies.append(body)
                    self._open[pid, body.task] = body
                case "exit" | "failed":
                    # Also if its child was killed: the line was written before that, so it counts.
                    body = self._open.pop((pid, event["task"]))
                    body.end, body.ending = at, event["what"]
                case "kill":
                    self.kills[event["child"]] = at
                    self.waiting.pop(event["child"], None)
                case "quorum":
                    self.quorum, self.late = event["nodes"], event["late"]
                case "node":
                    self.nodes.append((at, event["node"], event["up"]))
                case "beat":
                    self.beats.append((at, event["beat"], event["up"]))
                case "tick":
                    self.ticks[event["task"]] = Tick(event["sent"], event["beat"])
                case "ready":
                    self.ready = True
        for body in self.running():
            if body.pid in self.kills:  # after SIGKILL a body executes no further instruction
                body.end, body.ending = max(body.begin, self.kills[body.pid]), "killed"

    def running(self) -> list[Body]:
        """Return the bodies that have entered and not left."""
        return [body for body in self.bodies if body.ending == "running"]

    def done(self) -> set[str]:
        """Return the charges whose body has returned. Locks of the plain script are no charges."""
        return {body.task for body in self.bodies if body.ending == "exit"} & self.sent.keys()

    def dark(self) -> list[tuple[float, float]]:
        """Return the spans in which no quorum of nodes was up, after there had been one."""
        spans: list[tuple[float, float]] = []
        up: set[int] = set()
        for at, node, is_up in sorted(self.nodes):
            before = len(up)
            (up.add if is_up else up.discard)(node)
            if before >= self.quorum > len(up):
                spans.append((at, math.inf))
            elif before < self.quorum <= len(up) and spans:
                spans[-1] = (spans[-1][0], at)
        return spans
