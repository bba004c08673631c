"""Says from the journal alone whether the locks held. Shares no code with the library.

What it says of the ticks of the beats is in `ticks.py`.

`python -m celery_redlock.demo.checker DIRECTORY` judges a journal that was kept.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from celery_redlock.demo.journal import Reader
from celery_redlock.demo.ticks import LATE, Tick, Ticks, judge_ticks

__all__ = ["QUORUM", "Body", "Story", "Verdict", "judge"]

QUORUM = 3
"""Nodes that must be up for a body to start."""
MAX_FAILURES = 10
"""Failures that are told one by one; more would push the counts off the screen."""


@dataclass
class Body:
    """One run of a body.

    Attributes:
        begin: When it entered; seconds.
        seconds: How long it means to take.
        end: When it left, or was killed; `inf` where neither is known.
        ending: "running", "exit", "failed" or "killed".
    """

    order: int
    task: str
    pid: int
    begin: float
    seconds: float
    end: float = math.inf
    ending: str = "running"


@dataclass
class Story:
    """The journal, read: which charges were sent, which ran when, what broke when.

    Attributes:
        sent: The order of each charge.
        kills: When each pool child was killed, by its pid.
        waiting: The last refusal in each pool child that waits, by its pid.
        nodes: When which node came up or went down; `beats` likewise.
        ticks: The ticks that reached the worker, by the message's id: one whose child is killed is
            delivered again.
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
        """Return the story that these events tell."""
        story = cls()
        story.tell(events)
        return story

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
                    self.bodies.append(Body(begin=at, **{name: event[name] for name in names}))
                    if pid in self.kills:
                        self._kill(pid, at)
                case "exit" | "failed":
                    self._end(event)
                case "kill":
                    self.kills[event["child"]] = at
                    self.waiting.pop(event["child"], None)
                    self._kill(event["child"], at)
                case "node":
                    self.nodes.append((at, event["node"], event["up"]))
                case "beat":
                    self.beats.append((at, event["beat"], event["up"]))
                case "tick":
                    self.ticks[event["task"]] = Tick(event["sent"], event["beat"])
                case "ready":
                    self.ready = True

    def running(self) -> list[Body]:
        """The bodies that have entered and not left."""
        return [body for body in self.bodies if body.ending == "running"]

    def done(self) -> set[str]:
        """The charges whose body has left as it should; the plain script sends none."""
        return {body.task for body in self.bodies if body.ending == "exit"} & self.sent.keys()

    def _kill(self, pid: int, at: float) -> None:
        # SIGKILL leaves a body no further instruction, so it ends here. The time was taken just
        # before: a line that was written in between is believed.
        for body in self.running():
            if body.pid == pid:
                body.end, body.ending = at, "killed"

    def _end(self, event: dict[str, Any]) -> None:
        for body in reversed(self.bodies):
            unfinished = body.ending in ("running", "killed")
            if unfinished and (body.pid, body.task) == (event["pid"], event["task"]):
                body.end, body.ending = event["at"], event["what"]
                return
        raise ValueError(f"a body left that never entered: {event}")

    def dark(self) -> list[tuple[float, float]]:
        """From when to when fewer than a quorum of nodes were up, after there had been one."""
        spans: list[tuple[float, float]] = []
        up: set[int] = set()
        for at, node, is_up in sorted(self.nodes):
            before = len(up)
            (up.add if is_up else up.discard)(node)
            if before >= QUORUM > len(up):
                spans.append((at, math.inf))
            elif before < QUORUM <= len(up) and spans:
                spans[-1] = (spans[-1][0], at)
        return spans


@dataclass(frozen=True)
class Verdict:
    """What came out.

    Attributes:
        overlaps: Pairs of bodies of one order that ran at the same time.
        unlocked: Bodies that started while no quorum was up.
        lost: Tasks that were sent and never finished.
        killed: Bodies killed in the middle.
        blocked: Seconds from each of these deaths to the next body of the same order.
        waits: How often a charge was put off and sent again, for later; by reason.
        seconds: From the first body's begin to the last one's end.
        ticks: What came out for the beats.
    """

    sent: int
    done: int
    overlaps: list[tuple[Body, Body]]
    unlocked: list[Body]
    lost: list[str]
    killed: list[Body]
    blocked: list[float]
    waits: dict[str, int]
    seconds: float
    ticks: Ticks

    @property
    def ok(self) -> bool:
        """Whether exclusion and completion held, of charges and of ticks, and anything was done."""
        wrong = self.overlaps or self.unlocked or self.lost
        return self.done > 0 and not wrong and self.ticks.ok

    def lines(self) -> list[tuple[str, str, bool]]:
        """For people: what was asked, the answer, and whether it is a good one."""
        worst = f"{max(self.blocked) * 1000:.0f} ms" if self.blocked else "no holder died"
        lines = [
            ("bodies of one order that overlapped", str(len(self.overlaps)), not self.overlaps),
            ("bodies started without a quorum", str(len(self.unlocked)), not self.unlocked),
            ("charges lost", f"{len(self.lost)} of {self.sent}", not self.lost),
            ("bodies killed in the middle", str(len(self.killed)), True),
            ("longest a dead holder blocked its order", worst, True),
        ]
        for why, count in self.waits.items():
            lines.append((f"put off and sent again later, {why}", str(count), True))
        lines += self.ticks.lines()
        wrong = [
            (f"  overlap on order {a.order}", f"{a.task} (pid {a.pid}) and {b.task} (pid {b.pid})")
            for a, b in self.overlaps
        ]
        wrong += [
            (f"  unlocked on order {b.order}", f"{b.task} (pid {b.pid})") for b in self.unlocked
        ]
        wrong += [("  lost", task) for task in self.lost]
        wrong += self.ticks.wrong()
        if len(wrong) > MAX_FAILURES:
            rest = str(len(wrong) - MAX_FAILURES)
            wrong = [*wrong[:MAX_FAILURES], ("  and more of these", rest)]
        return lines + [(what, answer, False) for what, answer in wrong]


def judge(story: Story) -> Verdict:
    """Judge what happened."""
    begun = sorted(story.bodies, key=lambda body: body.begin)
    ends = [body.end for body in begun if body.end < math.inf]
    dark = story.dark()
    killed = [body for body in begun if body.ending == "killed"]
    return Verdict(
        sent=len(story.sent),
        done=len(story.done()),
        overlaps=_overlaps(begun),
        # One that begins just after the quorum is lost had its lock granted just before.
        unlocked=[b for b in begun if any(since + LATE < b.begin < till for since, till in dark)],
        lost=sorted(story.sent.keys() - story.done()),
        killed=killed,
        blocked=[_blocked(body, begun) for body in killed],
        waits=Counter(event["why"] for event in story.away),
        seconds=max(ends) - begun[0].begin if ends else 0.0,
        ticks=judge_ticks(story.ticks.values(), story.beats, dark, story.last),
    )


def _overlaps(begun: list[Body]) -> list[tuple[Body, Body]]:
    """A sweep: a body that begins before the latest end of those that began earlier overlaps."""
    found = []
    latest: dict[int, Body] = {}
    for body in begun:
        other = latest.get(body.order)
        if other is not None and body.begin < other.end:
            found.append((other, body))
        if other is None or body.end > other.end:
            latest[body.order] = body
    return found


def _blocked(dead: Body, begun: list[Body]) -> float:
    """Until the next body of the order; 0 where no charge wanted it any more."""
    after = (body.begin - dead.end for body in begun if body.order == dead.order)
    return next((seconds for seconds in after if seconds >= 0), 0.0)


def main(directory: str) -> int:
    """Print the verdict on a kept journal; 1 if exclusion or completion failed."""
    verdict = judge(Story.of(Reader(directory).new()))
    for what, answer, good in verdict.lines():
        print(f"{'' if good else 'FAILED  '}{what}: {answer}")
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
