"""Judge from the journal alone whether locks and ticks held. Shares no code with the library.

A tick is a message that reached the worker; it has the time at which, and the beat by which, it was
sent. The ticks of an interval have no names, so they are judged by their distances: two ticks that
are closer than half an interval are one tick sent twice, and two that are further apart than two
intervals have lost one in between. Without a quorum nothing may be sent, so that gap is excused;
the next tick is measured from the moment the quorum is back.

`python -m celery_redlock.demo.checker DIRECTORY` judges a journal that was kept.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise

from celery_redlock.demo.journal import INTERVAL, Body, Journal, Story, Tick

__all__ = ["Ticks", "Verdict"]

LATE = 0.5
"""Maximum seconds between a quorum's grant and the event it was for, on a busy machine."""
MAX_FAILURES = 10
"""Failures to list one by one; more would push the counts off the screen."""

Line = tuple[str, str, bool]
"""A line for people: the check, its result, and True if the result is good."""
Spans = list[tuple[float, float]]


class Ticks:
    """The verdict on the beats.

    Args:
        sent: Every tick, once.
        beats: The times at which each beat came up, or was killed.
        dark: The spans without a quorum.
        end: Time of the last event; seconds.
        late: Seconds by which the tick after a death may be later than with Redis.

    Attributes:
        counts: Ticks of each beat.
        twice: Pairs that are one tick, sent twice.
        unclaimed: Ticks sent while no quorum was up.
        gap: The longest time without a tick while a quorum was up; seconds.
        punctual: True if `gap` is within the limit.
        deaths: Time of death of each beat that was killed.
        after: For each of these, seconds from the last tick before to the next; None: none came.
    """

    def __init__(
        self,
        sent: Iterable[Tick],
        beats: list[tuple[float, int, bool]],
        dark: Spans,
        end: float,
        late: float = 0.0,
    ) -> None:
        ticks = sorted(sent, key=lambda tick: tick.sent)
        times = [tick.sent for tick in ticks]
        counts = Counter(tick.beat for tick in ticks)
        self.counts = {beat: counts[beat] for beat in sorted({beat for _at, beat, _up in beats})}
        self.twice = [(a, b) for a, b in pairwise(ticks) if b.sent - a.sent < INTERVAL / 2]
        self.unclaimed = [tick for tick in ticks if _in(dark, tick.sent)]
        # The spans between begin and end that are not dark.
        begin = min((at for at, _beat, up in beats if up), default=end)
        edges = [begin, *chain(*sorted(dark)), end]
        light = [(a, min(b, end)) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < end]
        self.gap = max(
            (b - a for span in light for a, b in pairwise(_within(times, *span))), default=0.0
        )
        self.punctual = self.gap <= 2 * INTERVAL + late
        self.deaths = {beat: at for at, beat, up in sorted(beats) if not up}
        self.after = {beat: _after(times, at) for beat, at in self.deaths.items()}

    @property
    def ok(self) -> bool:
        """True if every tick was sent once, also after a beat's death; or if there was no beat."""
        return self.punctual and not (self.twice or self.unclaimed or None in self.after.values())

    def lines(self) -> Iterator[Line]:
        """Yield the lines of the verdict."""
        if not self.counts:
            return
        yield f"ticks sent, one due every {INTERVAL:g} s", str(sum(self.counts.values())), True
        yield "ticks sent twice", str(len(self.twice)), not self.twice
        yield "ticks sent without a quorum", str(len(self.unclaimed)), not self.unclaimed
        yield "longest gap between ticks, with a quorum", f"{self.gap:.2f} s", self.punctual
        for beat, count in self.counts.items():
            dead = beat in self.after
            yield f"ticks by beat {beat}{', killed' * dead}", str(count), True
            if dead:
                after = self.after[beat]
                gap = "none came" if after is None else f"{after:.2f} s"
                yield f"gap over the death of beat {beat}", gap, after is not None


class Verdict:
    """The verdict on the demonstration.

    Attributes:
        overlaps: Pairs of bodies of one order that ran at the same time.
        unlocked: Bodies that started while no quorum was up.
        lost: Tasks that were sent and never finished.
        killed: Bodies killed in the middle.
        blocked: Seconds from each of these deaths to the next body of the same order.
        waits: Number of times that a charge was put off and sent again, for later; by reason.
        seconds: Seconds from the begin of the first body to the end of the last.
        ticks: The verdict on the beats.
    """

    def __init__(self, story: Story) -> None:
        bodies = sorted(story.bodies, key=lambda body: body.begin)
        ends = [body.end for body in bodies if body.end < math.inf]
        done, dark = story.done(), story.dark()
        self.sent, self.done = len(story.sent), len(done)
        self.overlaps = list(_overlaps(bodies))
        self.unlocked = [body for body in bodies if _in(dark, body.begin)]
        self.lost = sorted(story.sent.keys() - done)
        self.killed = [body for body in bodies if body.ending == "killed"]
        self.blocked = [_blocked(body, bodies) for body in self.killed]
        self.waits = Counter(event["why"] for event in story.away)
        self.seconds = max(ends) - bodies[0].begin if ends else 0.0
        self.ticks = Ticks(story.ticks.values(), story.beats, dark, story.last, story.late)

    @property
    def ok(self) -> bool:
        """True if exclusion and completion held, for charges and ticks, and any charge was done."""
        wrong = self.overlaps or self.unlocked or self.lost
        return self.done > 0 and not wrong and self.ticks.ok

    def lines(self) -> Iterator[Line]:
        """Yield the lines of the verdict, and then the failures, one by one."""
        worst = f"{max(self.blocked) * 1000:.0f} ms" if self.blocked else "no holder died"
        yield "bodies of one order that overlapped", str(len(self.overlaps)), not self.overlaps
        yield "bodies started without a quorum", str(len(self.unlocked)), not self.unlocked
        yield "charges lost", f"{len(self.lost)} of {self.sent}", not self.lost
        yield "bodies killed in the middle", str(len(self.killed)), True
        yield "longest a dead holder blocked its order", worst, True
        for why, count in self.waits.items():
            yield f"put off and sent again later, {why}", str(count), True
        yield from self.ticks.lines()
        wrong = list(self._wrong())
        for what, answer in wrong[:MAX_FAILURES]:
            yield f"  {what}", answer, False
        if len(wrong) > MAX_FAILURES:
            yield "  and more of these", str(len(wrong) - MAX_FAILURES), False

    def _wrong(self) -> Iterator[tuple[str, str]]:
        for one, other in self.overlaps:
            yield f"overlap on order {one.order}", f"{_named(one)} and {_named(other)}"
        for body in self.unlocked:
            yield f"unlocked on order {body.order}", _named(body)
        for task in self.lost:
            yield "lost", task
        for a, b in self.ticks.twice:
            yield "tick sent twice", f"by beat {a.beat}, {b.sent - a.sent:.2f} s later by {b.beat}"
        for tick in self.ticks.unclaimed:
            yield "tick without a quorum", f"by beat {tick.beat}"


def _in(dark: Spans, at: float) -> bool:
    # An event just after the loss of the quorum was granted just before it.
    return any(since + LATE < at < until for since, until in dark)


def _within(times: list[float], since: float, until: float) -> list[float]:
    return [since, *(at for at in times if since < at < until), until]


def _after(times: list[float], death: float) -> float | None:
    """Return the seconds from the last tick before a death, or from the death, to the next tick."""
    last = max((at for at in times if at <= death), default=death)
    return next((at - last for at in times if at > death), None)


def _overlaps(begun: list[Body]) -> Iterator[tuple[Body, Body]]:
    """Yield overlapping pairs: a body that begins before the latest end of earlier ones."""
    latest: dict[int, Body] = {}
    for body in begun:
        other = latest.get(body.order)
        if other is not None and body.begin < other.end:
            yield other, body
        if other is None or body.end > other.end:
            latest[body.order] = body


def _blocked(dead: Body, begun: list[Body]) -> float:
    """Return the seconds until the next body of the order; 0 if no more charges wanted it."""
    after = (body.begin - dead.end for body in begun if body.order == dead.order)
    return next((seconds for seconds in after if seconds >= 0), 0.0)


def _named(body: Body) -> str:
    return f"{body.task} (pid {body.pid})"


def main(directory: str) -> int:
    """Print the verdict on a kept journal; return 1 if exclusion or completion failed, else 0."""
    verdict = Verdict(Story(Journal(directory).new()))
    for what, answer, good in verdict.lines():
        print(f"{'' if good else 'FAILED  '}{what}: {answer}")
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
