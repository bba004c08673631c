"""Clocks that change, twice a year: beats send together exactly what a lone beat sends."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import celery
import pytest

from celery_redlock.beat.ticks import Tick, current_tick
from tests.promises.beat.beat_moments import ZONES, cron, set_up, utc

DAY, HOUR, MINUTE = timedelta(days=1), timedelta(hours=1), timedelta(minutes=1)
CHANGES = [
    ("Europe/Berlin", "2026-03-29 01:00"),
    ("Europe/Berlin", "2026-10-25 01:00"),
    ("America/New_York", "2026-03-08 07:00"),
    ("America/New_York", "2026-11-01 06:00"),
    ("Australia/Lord_Howe", "2026-10-03 15:30"),  # by half an hour
    ("Australia/Lord_Howe", "2026-04-04 15:00"),
]
SPECS = ["30 2 * * *", "*/30 * * * *", "0 * * * *", "15 1-3 * * *", "*/7 * * * *"]
QUICK = {
    "Europe/Berlin": SPECS,
    "Australia/Lord_Howe": ["*/30 * * * *", "*/7 * * * *"],
    "America/New_York": [],
}
"""Entries that `make test` tries; the zone that changes by half an hour only where that matters."""
Pause = tuple[timedelta, timedelta]


class DaysOfChange:
    """Two days around a change of clocks, as beats live through them, minute by minute."""

    def __init__(self, zone: str, change: str, spec: str) -> None:
        self.change = utc(change)
        self._zone = ZONES[zone]
        self._begin = self.change - 1.2 * DAY
        self._schedule = set_up(cron(spec), self._begin, zone)
        self._schedule.nowfun = lambda: self._now.astimezone(self._zone)

    def lone(self) -> list[Tick]:
        """Return the ticks that a lone beat sends."""
        return self._run([(0.01, None)], claims=None)

    def guarded(self, *beats: tuple[float, Pause | None]) -> list[Tick]:
        """Return the ticks that several beats send together.

        Each is given by its phase in seconds and its pause.
        """
        return self._run(beats, claims={})

    def _run(self, beats: Any, claims: dict[str, datetime] | None) -> list[Tick]:
        sent = []
        last = [self._begin.astimezone(self._zone) for _beat in beats]
        wake = [self._begin for _beat in beats]
        for minute in range(2 * 24 * 60):
            for index, (phase, pause) in enumerate(beats):
                self._now = now = self._begin + minute * MINUTE + timedelta(seconds=phase)
                if pause is not None and self.change + pause[0] <= now < self.change + pause[1]:
                    continue
                if now < wake[index] and abs(now - self.change) > 2 * HOUR:
                    continue  # asked every minute where it matters, else when it says
                due, left = self._schedule.is_due(last[index])
                wake[index] = now + timedelta(seconds=left)
                if not due:
                    continue
                tick = current_tick(self._schedule, last[index])
                last[index] = self._schedule.now()
                if claims is None or claims.get(tick.name, now) <= now:
                    sent.append(tick)
                    if claims is not None:
                        claims[tick.name] = now + timedelta(seconds=tick.kept)
        return sent


@functools.cache
def days_of(zone: str, change: str, spec: str) -> tuple[DaysOfChange, tuple[Tick, ...]]:
    """The days, and what a lone beat sends in them."""
    days = DaysOfChange(zone, change, spec)
    return days, tuple(days.lone())


def names_of(ticks: Sequence[Tick]) -> list[str]:
    """Each once: Celery <= 5.6 sends the 02:15 of an hour that there is not, then the 03:15."""
    return list(dict.fromkeys(tick.name for tick in ticks))


def quick(specs: Sequence[str], changes: Sequence[tuple[str, str]]) -> Any:
    """Parametrize with each entry on each day; entries outside `QUICK` are marked slow."""
    return pytest.mark.parametrize(
        ("zone", "change", "spec"),
        [
            pytest.param(*day, spec, marks=[] if spec in QUICK[day[0]] else [pytest.mark.slow])
            for day in changes
            for spec in specs
        ],
    )


@quick(SPECS, CHANGES)
def test_when_clocks_change_beats_send_what_a_lone_one_would(
    zone: str, change: str, spec: str
) -> None:
    days, lone = days_of(zone, change, spec)
    assert len(lone) >= 2
    names = names_of(lone)
    if celery.VERSION >= (5, 7):
        assert len(names) == len(lone)  # a claim stops none of what it would send
    assert all(tick.due is not None and tick.next_in is not None for tick in lone)
    stopped = [(-5 * HOUR, 6 * HOUR), (-2.5 * HOUR, -1.2 * HOUR), (-0.5 * HOUR, 1.1 * HOUR)]
    for pauses in ([None, None], stopped):
        others = zip((0.5, 3.2, 7.0), pauses, strict=False)
        assert [tick.name for tick in days.guarded((0.01, None), *others)] == names


@quick(["* * * * *", "*/7 * * * *", "*/30 * * * *"], CHANGES[1::2])
def test_a_beat_that_wakes_up_in_the_repeated_hour_repeats_nothing(
    zone: str, change: str, spec: str
) -> None:
    """Celery computes a due time of the hour before, so the entry is overdue all the hour."""
    days, lone = days_of(zone, change, spec)
    names = names_of(lone)
    pause = -80 * MINUTE, 10 * MINUTE
    guarded = days.guarded((0.01, None), (0.5, pause))
    assert [tick.name for tick in guarded] == names
