"""Says whether each tick of the periodic job was sent once. Shares no code with the library.

A tick is a message that reached the worker; it bears the time at which, and the beat by which, it
was sent. The ticks of an interval have no names, so it is their distances that tell: two that are
closer than half an interval are one tick sent twice, and two that are further apart than two
intervals have lost one in between. Without a quorum nothing may be sent, so that wait is excused;
what follows it is measured from the moment the quorum is back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["INTERVAL", "Tick", "Ticks", "judge_ticks"]

INTERVAL = 1.0
"""Seconds from one tick to the next."""
LATE = 0.25
"""Seconds between a beat's claim and its message at most, on a machine that is busy."""

Span = tuple[float, float]


@dataclass(frozen=True)
class Tick:
    """One message of the periodic job, however often it was delivered.

    Attributes:
        sent: When, by the clock of the beat; seconds.
        beat: By which.
    """

    sent: float
    beat: int


@dataclass(frozen=True)
class Ticks:
    """What came out.

    Attributes:
        due: How many a beat alone would have sent, while a quorum was up.
        twice: Pairs that are one tick, sent twice.
        unclaimed: Ticks sent while no quorum was up.
        gap: Seconds without a tick while a quorum was up, at most.
        deaths: Per beat that was killed: its number, and when.
        after: Per death, seconds from the last tick before it to the next one; None: none came.
        counts: Per beat, ticks before and after the first death.
    """

    sent: int
    due: int
    twice: list[tuple[Tick, Tick]]
    unclaimed: list[Tick]
    gap: float
    deaths: list[tuple[int, float]]
    after: list[float | None]
    counts: dict[int, tuple[int, int]]

    @property
    def ok(self) -> bool:
        """Whether every tick was sent once, and on after a beat's death; also if there is none."""
        late = self.gap > 2 * INTERVAL or None in self.after
        return not (self.twice or self.unclaimed or late)

    def lines(self) -> list[tuple[str, str, bool]]:
        """For people: what was asked, the answer, and whether it is a good one."""
        if not self.counts:
            return []
        dead = {beat for beat, _at in self.deaths}
        fine = self.gap <= 2 * INTERVAL
        sent = f"{self.sent}, ideal {self.due}"
        if self.sent < self.due:
            # Each stretch with a quorum begins with a wait for its first one, of up to an interval.
            sent += f"; the first comes up to {INTERVAL:g} s after the start, or a quorum's return"
        lines = [
            (f"ticks sent, one due every {INTERVAL:g} s", sent, True),
            ("ticks sent twice", str(len(self.twice)), not self.twice),
            ("ticks sent without a quorum", str(len(self.unclaimed)), not self.unclaimed),
            ("longest gap between ticks, with a quorum", f"{self.gap:.2f} s", fine),
        ]
        for (beat, _at), seconds in zip(self.deaths, self.after, strict=True):
            answer = "none came" if seconds is None else f"{seconds:.2f} s"
            lines.append((f"gap over the death of beat {beat}", answer, seconds is not None))
        for beat, (before, after) in self.counts.items():
            counts = f"{before} before the kill, {after} after" if dead else str(before)
            lines.append((f"ticks by beat {beat}{', killed' * (beat in dead)}", counts, True))
        return lines

    def wrong(self) -> list[tuple[str, str]]:
        """Each tick that should not have been sent."""
        wrong = [
            ("  tick sent twice", f"by beat {a.beat}, {b.sent - a.sent:.2f} s later by {b.beat}")
            for a, b in self.twice
        ]
        return wrong + [("  tick without a quorum", f"by beat {t.beat}") for t in self.unclaimed]


def judge_ticks(
    sent: Iterable[Tick],
    beats: list[tuple[float, int, bool]],
    dark: list[Span],
    end: float,
) -> Ticks:
    """Judge the ticks.

    Args:
        sent: Every tick, once.
        beats: When which beat came up, or was killed.
        dark: From when to when no quorum was up.
        end: When the story ends; seconds.
    """
    ticks = sorted(sent, key=lambda tick: tick.sent)
    begin = min((at for at, _beat, up in beats if up), default=end)
    light = list(_light(begin, end, dark))
    deaths = [(beat, at) for at, beat, up in sorted(beats) if not up]
    first = deaths[0][1] if deaths else end
    before = Counter(tick.beat for tick in ticks if tick.sent <= first)
    after = Counter(tick.beat for tick in ticks if tick.sent > first)
    return Ticks(
        sent=len(ticks),
        due=round(sum(until - since for since, until in light) / INTERVAL),
        twice=[(a, b) for a, b in pairwise(ticks) if b.sent - a.sent < INTERVAL / 2],
        unclaimed=[t for t in ticks if any(a + LATE < t.sent < b for a, b in dark)],
        gap=max((_gap(ticks, *span) for span in light), default=0.0),
        deaths=deaths,
        after=[_after(ticks, at) for _beat, at in deaths],
        counts={beat: (before[beat], after[beat]) for beat in sorted({b for _, b, _ in beats})},
    )


def _light(begin: float, end: float, dark: list[Span]) -> Iterable[Span]:
    """What `dark` leaves."""
    for since, until in sorted(dark):
        if begin < since:
            yield begin, min(since, end)
        begin = max(begin, until)
    if begin < end:
        yield begin, end


def _gap(ticks: list[Tick], since: float, until: float) -> float:
    """The longest time without a tick from `since` to `until`, both ends included."""
    times = [since, *(tick.sent for tick in ticks if since < tick.sent < until), until]
    return max(b - a for a, b in pairwise(times))


def _after(ticks: list[Tick], at: float) -> float | None:
    """From the last tick before `at` to the next one; from `at` if there was none before."""
    last = max((tick.sent for tick in ticks if tick.sent <= at), default=at)
    following = [tick.sent for tick in ticks if tick.sent > at]
    return following[0] - last if following else None
