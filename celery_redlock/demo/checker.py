"""Says from the journal alone whether the locks held. Shares no code with the library.

What it says of the ticks of the beats is in `ticks.py`.

`python -m celery_redlock.demo.checker DIRECTORY` judges a journal that was kept.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from celery_redlock.demo.journal import Reader
from celery_redlock.demo.ticks import Tick, Ticks, judge_ticks

__all__ = ["Body", "Story", "Verdict", "judge"]

QUORUM = 3
"""Nodes that must be up for a body to start."""
SHOWN = 10
"""Failures that are told one by one."""
LATE = 0.5
"""Seconds between a grant and the body's first line at most, on a machine that is busy."""


@dataclass
class Body:
    """One run of a body.

    Attributes:
        begin: When it entered; seconds.
        asked: When the nodes were asked for the lock it runs under; seconds.
        end: When it left, or was killed; `inf` where neither is known.
        ending: "running", "exit", "failed" or "killed".
    """

    order: int
    task: str
    pid: int
    begin: float
    asked: float
    seconds: float
    end: float = math.inf
    ending: str = "running"


@dataclass
class Story:
    """The journal, read: who was sent, who ran when, what broke when.

    Attributes:
        nodes: When which node came up or went down; `beats` likewise.
        ticks: The ticks that reached the worker, by task id.
        last: When the last of all this was written; seconds.
    """

    sent: dict[str, int] = field(default_factory=dict)
    bodies: list[Body] = field(default_factory=list)
    kills: dict[int, float] = field(default_factory=dict)
    waiting: dict[int, dict[str, Any]] = field(default_factory=dict)
    away: list[dict[str, Any]] = field(default_factory=list)
    nodes: list[tuple[float, int, bool]] = field(default_factory=list)
    beats: list[tuple[float, int, bool]] = field(default_factory=list)
    ticks: dict[str, Tick] = field(default_factory=dict)
    last: float = 0.0
    ready: bool = False

    @classmethod
    def of(cls, events: Iterable[dict[str, Any]]) -> Story:
        """The story these events tell."""
        story = cls()
        story.tell(events)
        return story

    def tell(self, events: Iterable[dict[str, Any]]) -> None:
        """Go on with what happened next."""
        for event in events:
            at = event["at"]
            self.last = max(self.last, at)
            if event["what"] in ("enter", "away", "wait"):
                self.waiting.pop(event["pid"], None)
            if event["what"] == "sent":
                self.sent[event["task"]] = event["order"]
            elif event["what"] == "enter":
                names = ("order", "task", "pid", "asked", "seconds")
                self.bodies.append(Body(begin=at, **{name: event[name] for name in names}))
                if event["pid"] in self.kills:
                    self._kill(event["pid"], at)
            elif event["what"] in ("exit", "failed"):
                self._end(at, event)
            elif event["what"] == "kill":
                self.kills[event["child"]] = at
                self.waiting.pop(event["child"], None)
                self._kill(event["child"], at)
            elif event["what"] == "node":
                self.nodes.append((at, event["node"], event["up"]))
            elif event["what"] == "beat":
                self.beats.append((at, event["beat"], event["up"]))
            elif event["what"] == "tick":
                # By its message: one whose child is killed is delivered again.
                self.ticks[event["task"]] = Tick(event["sent"], event["beat"])
            elif event["what"] == "wait":
                self.waiting[event["pid"]] = event
            elif event["what"] == "away":
                self.away.append(event)
            elif event["what"] == "ready":
                self.ready = True

    def running(self) -> list[Body]:
        """The bodies that have entered and not left."""
        return [body for body in self.bodies if body.ending == "running"]

    def done(self) -> set[str]:
        """The charges whose body has left as it should; a script's turn is none."""
        return {body.task for body in self.bodies if body.ending == "exit"} & self.sent.keys()

    def _kill(self, pid: int, at: float) -> None:
        # SIGKILL leaves a body no further instruction, so it ends here. The time was taken just
        # before: a line that was written in between is believed.
        for body in self.running():
            if body.pid == pid:
                body.end, body.ending = at, "killed"

    def _end(self, at: float, event: dict[str, Any]) -> None:
        for body in reversed(self.bodies):
            unfinished = body.ending in ("running", "killed")
            if unfinished and (body.pid, body.task) == (event["pid"], event["task"]):
                body.end, body.ending = at, event["what"]
                return
        raise ValueError(f"a body left that never entered: {event}")

    def dark(self) -> list[tuple[float, float]]:
        """From when to when fewer than a quorum of nodes were up."""
        spans = []
        up: set[int] = set()
        since = None
        for at, node, is_up in sorted(self.nodes):
            before = len(up)
            (up.add if is_up else up.discard)(node)
            if before >= QUORUM > len(up):
                since = at
            elif before < QUORUM <= len(up) and since is not None:
                spans.append((since, at))
                since = None
        return spans if since is None else [*spans, (since, math.inf)]


@dataclass(frozen=True)
class Verdict:
    """What came out.

    Attributes:
        overlaps: Pairs of bodies of one order that ran at the same time.
        unlocked: Bodies that started while no quorum was up.
        lost: Tasks that were sent and never finished.
        again: Bodies of tasks that ran once more after they had finished.
        killed: Bodies killed in the middle.
        blocked: Seconds from each of these deaths to the next body of the same order.
        waits: How often a charge was put off and sent again, for later; by reason.
        phases: How many nodes were up, seconds, bodies that finished meanwhile; one after another.
        seconds: From the first body's begin to the last one's end.
        ticks: What came out for the beats.
    """

    sent: int
    done: int
    overlaps: list[tuple[Body, Body]]
    unlocked: list[Body]
    lost: list[str]
    again: list[Body]
    killed: list[Body]
    blocked: list[float]
    waits: dict[str, int]
    phases: list[tuple[int, float, int]]
    seconds: float
    ticks: Ticks

    @property
    def ok(self) -> bool:
        """Whether exclusion and completion held, of charges and of ticks, and anything was done."""
        wrong = self.overlaps or self.unlocked or self.lost
        return self.done > 0 and not wrong and self.ticks.ok

    def lines(self) -> list[tuple[str, str, bool]]:
        """For people: what was asked, the answer, and whether it is a good one."""
        worst = f"{max(self.blocked) * 1000:.0f} ms" if self.blocked else "nobody died"
        lines = [
            ("bodies of one order that overlapped", str(len(self.overlaps)), not self.overlaps),
            ("bodies started without a quorum", str(len(self.unlocked)), not self.unlocked),
            ("charges lost", f"{len(self.lost)} of {self.sent}", not self.lost),
            ("bodies killed in the middle", str(len(self.killed)), True),
            ("longest a dead holder blocked its order", worst, True),
            ("charges run again after they were done", str(len(self.again)), True),
            *(
                (f"put off and sent again later, {why}", str(n), True)
                for why, n in self.waits.items()
            ),
            *(
                (f"charges done with {up} nodes up", self._done(up, length, done), True)
                for up, length, done in self.phases
            ),
            ("charges a second", f"{self.done / self.seconds:.1f}" if self.seconds else "-", True),
            *self.ticks.lines(),
        ]
        wrong = [
            (f"  overlap on order {a.order}", f"{a.task} (pid {a.pid}) and {b.task} (pid {b.pid})")
            for a, b in self.overlaps
        ]
        wrong += [
            (f"  unlocked on order {body.order}", f"{body.task} (pid {body.pid})")
            for body in self.unlocked
        ]
        wrong += [("  lost", task) for task in self.lost]
        wrong += self.ticks.wrong()
        lines += [(what, answer, False) for what, answer in wrong[:SHOWN]]
        if len(wrong) > SHOWN:
            lines.append(("  and more of these", str(len(wrong) - SHOWN), False))
        return lines

    def _done(self, up: int, seconds: float, done: int) -> str:
        before = up < QUORUM and done and not self.unlocked
        note = ", begun while a quorum was up" if before else ""
        return f"{done} in {seconds:.1f} s{note}"


def judge(story: Story) -> Verdict:
    """Judge what happened."""
    begun = sorted(story.bodies, key=lambda body: body.begin)
    waits: dict[str, int] = {}
    for event in story.away:
        waits[event["why"]] = waits.get(event["why"], 0) + 1
    ends = [body.end for body in begun if body.end < math.inf]
    dark = story.dark()
    killed = [body for body in begun if body.ending == "killed"]
    return Verdict(
        sent=len(story.sent),
        done=len(story.done()),
        overlaps=_overlaps(begun),
        unlocked=[body for body in begun if any(_unlocked(body, *span) for span in dark)],
        lost=sorted(story.sent.keys() - story.done()),
        again=_again(begun),
        killed=killed,
        blocked=[_blocked(body, begun) for body in killed],
        waits=waits,
        phases=_phases(story, begun[0].begin, max(ends)) if ends else [],
        seconds=max(ends) - begun[0].begin if ends else 0.0,
        ticks=judge_ticks(story.ticks.values(), story.beats, dark, story.last),
    )


def _overlaps(begun: list[Body]) -> list[tuple[Body, Body]]:
    """A sweep: whoever begins before the latest end of those that began earlier, overlaps."""
    found = []
    latest: dict[int, Body] = {}
    for body in begun:
        other = latest.get(body.order)
        if other is not None and body.begin < other.end:
            found.append((other, body))
        if other is None or body.end > other.end:
            latest[body.order] = body
    return found


def _unlocked(body: Body, since: float, until: float) -> bool:
    """Whether it began in the dark, save on a lock it had just been granted before."""
    granted_before = body.asked <= since and body.begin <= since + LATE
    return since < body.begin < until and not granted_before


def _again(begun: list[Body]) -> list[Body]:
    """A body killed between its last line and its acknowledgement: delivered at least once."""
    done: set[str] = set()
    found = []
    for body in begun:
        if body.task in done:
            found.append(body)
        if body.ending == "exit":
            done.add(body.task)
    return found


def _blocked(dead: Body, begun: list[Body]) -> float:
    """Until the next body of the order; where nobody wanted it any more, not at all."""
    for body in begun:
        if body.order == dead.order and body.begin >= dead.end:
            return body.begin - dead.end
    return 0.0


def _phases(story: Story, begin: float, end: float) -> list[tuple[int, float, int]]:
    """From one change of the number of nodes to the next."""
    up: set[int] = set()
    edges = [(begin, 0)]
    for at, node, is_up in sorted(story.nodes):
        (up.add if is_up else up.discard)(node)
        edges = [edge for edge in edges if edge[0] < max(at, begin)] + [(max(at, begin), len(up))]
    phases = []
    for (since, count), (until, _next) in zip(edges, [*edges[1:], (end, 0)], strict=True):
        ended = [b for b in story.bodies if b.ending == "exit" and since < b.end <= until]
        phases.append((count, until - since, sum(body.task in story.sent for body in ended)))
    return phases


def main(directory: str) -> int:
    """Print the verdict on a kept journal; 1 if exclusion or completion failed."""
    verdict = judge(Story.of(Reader(directory).new()))
    for what, answer, good in verdict.lines():
        print(f"{'' if good else 'FAILED  '}{what}: {answer}")
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
