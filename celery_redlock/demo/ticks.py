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

__all__ = ["INTERVAL", "LATE", "Tick", "Ticks", "judge_ticks"]

INTERVAL = 1.0
"""Seconds from one tick to the next."""
LATE = 0.5
"""Seconds at most between a quorum's grant and what it was asked for, on a machine that is busy."""

Span = tuple[float, float]


@dataclass(frozen=True)
class Tick:
    """One message of the periodic job, however often it was delivered; `sent` by a beat's clock."""

    sent: float
    beat: int


@dataclass(frozen=True)
class Ticks:
    """What came out for the beats.

    Attributes:
        counts: Ticks of each beat.
        twice: Pairs that are one tick, sent twice.
        unclaimed: Ticks sent while no quorum was up.
        gap: The longest time without a tick while a quorum was up; seconds.
        deaths: For each beat that was killed, when.
        after: For each of them, seconds from the last tick before its death to the next; None:
            none came.
    """

    counts: dict[int, int]
    twice: list[tuple[Tick, Tick]]
    unclaimed: list[Tick]
    gap: float
    deaths: dict[int, float]
    after: dict[int, float | None]

    @property
    def ok(self) -> bool:
        """Whether every tick was sent once, and on after a beat's death; also without any beat."""
        late = self.gap > 2 * INTERVAL or None in self.after.values()
        return not (self.twice or self.unclaimed or late)

    def lines(self) -> list[tuple[str, str, bool]]:
        """For people: what was asked, the answer, and whether it is a good one."""
        if not self.counts:
            return []
        fine = self.gap <= 2 * INTERVAL
        lines = [
            (f"ticks sent, one due every {INTERVAL:g} s", str(sum(self.counts.values())), True),
            ("ticks sent twice", str(len(self.twice)), not self.twice),
            ("ticks sent without a quorum", str(len(self.unclaimed)), not self.unclaimed),
            ("longest gap between ticks, with a quorum", f"{self.gap:.2f} s", fine),
        ]
        for beat, count in self.counts.items():
            dead = beat in self.after
            lines.append((f"ticks by beat {beat}{', killed' * dead}", str(count), True))
            if dead:
                after = self.after[beat]
                gap = "none came" if after is None else f"{after:.2f} s"
                lines.append((f"gap over the death of beat {beat}", gap, after is not None))
        return lines

    def wrong(self) -> list[tuple[str, str]]:
        """Each tick that should not have been sent."""
        wrong = [
            ("  tick sent twice", f"by beat {a.beat}, {b.sent - a.sent:.2f} s later by {b.beat}")
            for a, b in self.twice
        ]
        return wrong + [("  tick without a quorum", f"by beat {t.beat}") for t in self.unclaimed]


def judge_ticks(
    sent: Iterable[Tick], beats: list[tuple[float, int, bool]], dark: list[Span], end: float
) -> Ticks:
    """Judge the ticks.

    Args:
        sent: Every tick, once.
        beats: When which beat came up, or was killed.
        dark: From when to when no quorum was up.
        end: When the story ends; seconds.
    """
    ticks = sorted(sent, key=lambda tick: tick.sent)
    counts = Counter(tick.beat for tick in ticks)
    deaths = {beat: at for at, beat, up in sorted(beats) if not up}
    begin = min((at for at, _beat, up in beats if up), default=end)
    # What the dark spans leave between begin and end.
    edges = [begin, *(at for span in sorted(dark) for at in span), end]
    light = [(a, min(b, end)) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < end]
    return Ticks(
        counts={beat: counts[beat] for beat in sorted({beat for _at, beat, _up in beats})},
        twice=[(a, b) for a, b in pairwise(ticks) if b.sent - a.sent < INTERVAL / 2],
        unclaimed=[t for t in ticks if any(a + LATE < t.sent < b for a, b in dark)],
        gap=max((_gap(ticks, *span) for span in light), default=0.0),
        deaths=deaths,
        after={beat: _after(ticks, at) for beat, at in deaths.items()},
    )


def _gap(ticks: list[Tick], since: float, until: float) -> float:
    """The longest time without a tick from `since` to `until`, both ends included."""
    times = [since, *(tick.sent for tick in ticks if since < tick.sent < until), until]
    return max(b - a for a, b in pairwise(times))


def _after(ticks: list[Tick], at: float) -> float | None:
    """From the last tick before `at` to the next one; from `at` if there was none before."""
    last = max((tick.sent for tick in ticks if tick.sent <= at), default=at)
    return next((tick.sent - last for tick in ticks if tick.sent > at), None)
