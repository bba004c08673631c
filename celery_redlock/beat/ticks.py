"""Name the tick of a periodic task that is due: the same name in every beat.

Beats with the same schedule wake up at different moments, and have stored different last runs. For
a crontab or a solar event they share the *due time*. The tick is named by it, in UTC and to the
second, and stays claimed for as long as any beat may treat it as the current tick.

A plain interval counts from the last run, so every beat has a phase of its own, and the beats share
no time to name a tick by. There the claim itself keeps the period: it lasts a little less than the
interval. (Intervals could be numbered by the clock. But then each beat would keep its phase, the
death of one would leave a gap of up to two intervals, and the hosts' clocks would matter.)

All arithmetic is left to the schedule: a tick is due at the same time as for a single beat, in the
schedule's time zone, and also when its clocks change.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

from celery.schedules import BaseSchedule, crontab, solar
from celery.schedules import schedule as interval

__all__ = ["Tick", "current_tick"]

GRACE_S = 60.0
"""Seconds for which a due time stays claimed after the next one is due, because the clocks of hosts
differ."""
FINAL_S = 86_400.0
"""Seconds for which the last due time of a schedule stays claimed."""
MARGIN_RATE, MARGIN_MAX_S = 1 / 20, 0.5
"""The difference between an interval and its claim: as a part of the interval, and at most so many
seconds. A beat that is due once in an interval must not be refused because it is a little early."""
LOOK_BACK = timedelta(days=4 * 366)
"""The longest search for the latest due time: the 29th of February comes every four years."""
HOUR, MINUTE, HALF = timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=0.5)


class Tick(NamedTuple):
    """One tick of an entry.

    Attributes:
        name: Its name, the same in every beat.
        kept: Seconds from now for which it stays claimed after it was sent.
        due: When it was due, in UTC; None for the tick of an interval.
        next_in: Seconds from now until the next tick is due; None if none follows.
        period: The interval, in seconds; None for a tick with a due time.
        margin: Seconds by which an interval's claim ends before the next tick.
    """

    name: str
    kept: float
    due: datetime | None = None
    next_in: float | None = None
    period: float | None = None
    margin: float = 0.0


def current_tick(schedule: Any, last_run_at: datetime | None) -> Tick:
    """Return the tick that is due now. If several were missed, return the latest.

    Args:
        schedule: A schedule of Celery's, or a user's own.
        last_run_at: When the entry was sent last, as stored by this beat; None for never.
    """
    if isinstance(schedule, BaseSchedule) and not isinstance(schedule, interval):
        with suppress(NotImplementedError):  # Celery requires only is_due() of a user's schedule
            tick = _due_tick(_DueTimes(schedule), last_run_at)
            if tick is not None:
                return tick
    return _interval_tick(schedule, last_run_at)


def _due_tick(dues: _DueTimes, last_run_at: datetime | None) -> Tick | None:
    due, following = dues.latest(last_run_at)
    if due is None or not dues.are_shared(due):
        return None
    left = None if following is None else (following - dues.now).total_seconds()
    kept = GRACE_S + (FINAL_S if left is None else max(0.0, left)) + dues.repeated(due)
    return Tick(f"{due:%Y-%m-%dT%H:%M:%SZ}", kept, due=due, next_in=left)


def _interval_tick(schedule: Any, last_run_at: datetime | None) -> Tick:
    if isinstance(schedule, interval):
        period = left = float(schedule.seconds)
        name = f"every-{period:g}s"
        if schedule.relative:  # it is due at the next full minute, hour or day
            now = schedule.maybe_make_aware(schedule.now())
            left = schedule.remaining_estimate(now).total_seconds()
            left = left if left > 0 else period
            name += "-relative"
    else:
        _due, following = schedule.is_due(last_run_at or schedule.now())
        period = left = FINAL_S if following is None else float(following)
        name = "next"
    margin = min(period * MARGIN_RATE, MARGIN_MAX_S, left / 2)
    return Tick(name, left - margin, next_in=left, period=period, margin=margin)


class _DueTimes:
    """The due times of a schedule at one moment, by the schedule's own arithmetic. All in UTC."""

    def __init__(self, schedule: Any) -> None:
        local = schedule.maybe_make_aware(schedule.now())
        self.now = local.astimezone(timezone.utc)
        self._zone = local.tzinfo
        # A user's subclass with arithmetic of its own does not count as a crontab.
        estimate = getattr(type(schedule), "remaining_estimate", None)
        self._is_crontab = estimate is crontab.remaining_estimate
        # Fix now() for all calculations, because the process may be stopped between two of them.
        # copy.copy() does not work: the pickled state lacks the app, and so its time zone.
        self._schedule = object.__new__(type(schedule))
        self._schedule.__dict__.update(schedule.__dict__, nowfun=lambda: local)

    def latest(self, last: datetime | None) -> tuple[datetime | None, datetime | None]:
        """Return the due time that has come, and the next one.

        The first of the two is the first due time after `last`, or a later one.
        """
        due = following = None
        if last is not None:
            last = self._schedule.maybe_make_aware(last).astimezone(timezone.utc)
            due = self._after(last)
            following = None if due is None else self._following(due)
            if following is None or following > self.now:
                return due, following
        # Look back, twice as far each time, until a due time is found; then search for the latest.
        floor = last or self.now - LOOK_BACK
        back, low, high = MINUTE, self.now - MINUTE, self.now
        while not self._has_come(low):
            if low <= floor:
                return due, following
            back *= 2
            high, low = low, max(floor, self.now - back)
        while high - low > HALF:
            middle = low + (high - low) / 2
            low, high = (middle, high) if self._has_come(middle) else (low, middle)
        due = self._after(low)
        return due, None if due is None else self._following(due)

    def _following(self, due: datetime) -> datetime | None:
        # Solar events come once a day. Start an hour later, so that the computation, which is
        # exact to a fraction of a second only, does not find the same event again.
        start = due + HOUR if isinstance(self._schedule, solar) else due
        found = self._after(start)
        return found if found is not None and found > due else None

    def repeated(self, due: datetime) -> float:
        """Return the seconds until the wall clock shows this time again; 0 unless it is set back.

        A beat that begins in the second of two equal hours finds the due times of the first one.
        """
        local = due.astimezone(self._zone)
        first, second = local.utcoffset(), local.replace(fold=1).utcoffset()
        assert first is not None and second is not None
        return (first - second).total_seconds()

    def are_shared(self, due: datetime) -> bool:
        """Return True if the due times are independent of the last run, unlike an interval's."""
        if self._is_crontab or isinstance(self._schedule, solar):
            return True
        one, other = (self._raw(due - HALF / part) for part in (2, 4))
        return one is not None and other is not None and abs(one - other) < HALF / 10

    def _has_come(self, start: datetime) -> bool:
        """Return True if a due time after `start` has come by now."""
        found = self._after(start)
        return found is not None and found <= self.now

    def _after(self, start: datetime) -> datetime | None:
        """Return the first due time after `start`, to the second."""
        found = self._raw(start)
        if found is not None and isinstance(self._schedule, solar):
            # Computed from different starts, the time of one event differs by up to a tenth of a
            # second (ephem), and rounding could make two of it. So use a start that all beats
            # share.
            hour = found.replace(minute=0, second=0, microsecond=0)
            found = self._raw(hour - HOUR)
        return None if found is None else (found + HALF).replace(microsecond=0)

    def _raw(self, start: datetime) -> datetime | None:
        local = start.astimezone(self._zone)
        if self._is_crontab:
            # Compute a crontab's due time exactly: before 5.7 Celery's estimate is in wall time.
            begin, delta, _now = self._schedule.remaining_delta(local)
            return (begin + delta).astimezone(timezone.utc)  # type: ignore[no-any-return]
        left = self._schedule.remaining_estimate(local)
        return None if left is None else self.now + left
