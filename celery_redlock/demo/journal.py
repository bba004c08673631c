"""What happened, written down by the processes that it happened to; and the story that it tells.

Every process appends to its own file, one line an event, each line one `write()`: a line is there
or it is not, whichever process is killed when. Times are CLOCK_MONOTONIC, which all processes of a
machine share.

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
"""Nodes that must be up for a body to start, of five."""


class Journal:
    """A directory that all processes write to, each its own file."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._offsets: dict[Path, int] = {}

    def write(self, what: str, at: float | None = None, **facts: Any) -> None:
        """Append one event; `at` is in seconds of CLOCK_MONOTONIC, now if None."""
        pid = os.getpid()  # asked each time: a pool child is a fork, and has its own file
        event = {"what": what, "at": time.monotonic() if at is None else at, "pid": pid, **facts}
        with open(self._directory / f"{pid}.journal", "ab", buffering=0) as file:
            file.write(json.dumps(event).encode() + b"\n")

    def new(self) -> list[dict[str, Any]]:
        """Return what all processes have written since the last call, by time."""
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
    """One run of a body. It means to take `seconds`; `end` is infinite until it is known."""

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
    """The journal, read: which charges were sent, which ran when, what broke when.

    Attributes:
        sent: The order of each charge.
        kills: When each pool child was killed, by its pid.
        waiting: The last refusal in each pool child that waits, by its pid.
        away: Charges that were put off.
        quorum: How many nodes must be up for a body to start.
        late: By how much the tick after a death may come later than over Redis; seconds.
        nodes: When which node came up or went down; `beats` likewise.
        ticks: By the message's id: one whose child is killed is delivered again.
        last: When the last of all this was written; seconds.
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
        """Go on with what happened next."""
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
                    # Also of one that was killed: a line that was written just before is believed.
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
            if body.pid in self.kills:  # SIGKILL leaves a body no further instruction
                body.end, body.ending = max(body.begin, self.kills[body.pid]), "killed"

    def running(self) -> list[Body]:
        """The bodies that have entered and not left."""
        return [body for body in self.bodies if body.ending == "running"]

    def done(self) -> set[str]:
        """The charges whose body has left as it should; the plain script sends none."""
        return {body.task for body in self.bodies if body.ending == "exit"} & self.sent.keys()

    def dark(self) -> list[tuple[float, float]]:
        """From when to when fewer than a quorum of nodes were up, after there had been one."""
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
