"""Name the tick of a periodic task that is due: the same name in every beat.

Beats that hold the same schedule wake up at different moments, with different memories of the last
run. What they share is, for a crontab or a solar event, the *due time*: the tick is named by it, in
UTC and to the second, and stays claimed for as long as any beat may take that tick for the current
one. A plain interval counts from the last run, so every beat has its own phase, and nothing to
name a tick by: there the claim itself keeps the period, by lasting a little less than the interval.
(Numbering intervals by the clock would give them names; but each beat would keep its phase, so that
the death of one would leave a gap of up to two intervals, and the hosts' clocks would count.)

All arithmetic is the schedule's own: a tick is due when it would be for a lone beat, in the
schedule's time zone, and when its clocks change.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

from celery.schedules import BaseSchedule, crontab, solar
from celery.schedules import schedule as interval

__all__ = ["Tick", "current_tick"]

GRACE_S = 60.0
"""Seconds for which a due time stays claimed after the next one is due: clocks of hosts differ."""
FINAL_S = 86_400.0
"""Seconds for which a due time that nothing follows stays claimed."""
MARGIN_RATE, MARGIN_MAX_S = 1 / 20, 0.5
"""By how much an interval's claim is shorter than the interval: a part of it, and seconds at most.
A beat that is due once in an interval must not be refused because it is a little early."""
LOOK_BACK = timedelta(days=4 * 366)
"""How far back the latest due time is looked for: the 29th of February comes every four years."""
HOUR, MINUTE, HALF = timedelta(hours=1), timedelta(minutes=1), timedelta(seconds=0.5)


class Tick(NamedTuple):
    """One tick of an entry.

    Attributes:
        name: What names it; the same in every beat.
        kept: Seconds from now for which it stays claimed, once it is sent.
        due: When it was due, in UTC; None for the tick of an interval.
        next_in: Seconds from now until the next is due; None if none follows.
        period: The interval, in seconds; None for what has a due time.
        margin: Seconds by which an interval's claim ends before the next tick.
    """

    name: str
    kept: float
    due: datetime | None = None
    next_in: float | None = None
    period: float | None = None
    margin: float = 0.0


def current_tick(schedule: Any, last_run_at: datetime | None) -> Tick:
    """Return the tick that is due now. Several that were missed are one, the latest.

    Args:
        schedule: A schedule of Celery's, or a user's own.
        last_run_at: When the entry was sent last, as its beat remembers it; None for never.
    """
    if isinstance(schedule, BaseSchedule) and not isinstance(schedule, interval):
        with suppress(NotImplementedError):  # a user's own, of which Celery asks is_due() alone
            tick = _of_due_time(_DueTimes(schedule), last_run_at)
            if tick is not None:
                return tick
    return _of_interval(schedule, last_run_at)


def _of_due_time(dues: _DueTimes, last_run_at: datetime | None) -> Tick | None:
    due, following = dues.latest(last_run_at)
    if due is None or not dues.are_shared(due):
        return None
    left = None if following is None else (following - dues.now).total_seconds()
    kept = GRACE_S + (FINAL_S if left is None else max(0.0, left)) + dues.repeated(due)
    return Tick(f"{due:%Y-%m-%dT%H:%M:%SZ}", kept, due=due, next_in=left)


def _of_interval(schedule: Any, last_run_at: datetime | None) -> Tick:
    if isinstance(schedule, interval):
        period = left = float(schedule.seconds)
        name = f"every-{period:g}s"
        if schedule.relative:  # due at the next full minute, hour or day
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
    """The due times of a schedule, as its own arithmetic gives them at one moment. All in UTC."""

    def __init__(self, schedule: Any) -> None:
        local = schedule.maybe_make_aware(schedule.now())
        self.now = local.astimezone(timezone.utc)
        self._zone = local.tzinfo
        # And not one of a user's own making, that adds to it.
        estimate = getattr(type(schedule), "remaining_estimate", None)
        self._is_crontab = estimate is crontab.remaining_estimate
        # Schedules count from now(), again and again; a process may be stopped in between.
        # Not copy.copy(): what they pickle leaves out the app, and so its time zone.
        self._schedule = object.__new__(type(schedule))
        self._schedule.__dict__.update(schedule.__dict__, nowfun=lambda: local)

    def latest(self, last: datetime | None) -> tuple[datetime | None, datetime | None]:
        """Return the one that is due (the first after `last`, or a later one), and the next."""
        due = following = None
        if last is not None:
            last = self._schedule.maybe_make_aware(last).astimezone(timezone.utc)
            due = self._after(last)
            following = None if due is None else self._following(due)
            if following is None or following > self.now:
                return due, following
        # Look back, twice as far each time, until one lies between; then for the last of these.
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
        # Solar events come once a day, and are computed to a fraction of a second.
        start = due + HOUR if isinstance(self._schedule, solar) else due
        found = self._after(start)
        return found if found is not None and found > due else None

    def repeated(self, due: datetime) -> float:
        """Return the seconds until the wall clock shows the same again: 0 unless it is set back.

        A beat that begins in the second of the two hours finds the due times of the first.
        """
        local = due.astimezone(self._zone)
        first, second = local.utcoffset(), local.replace(fold=1).utcoffset()
        assert first is not None and second is not None
        return (first - second).total_seconds()

    def are_shared(self, due: datetime) -> bool:
        """Whether they do not depend on the last run, as those of an interval do."""
        if self._is_crontab or isinstance(self._schedule, solar):
            return True
        one, other = (self._raw(due - HALF / part) for part in (2, 4))
        return one is not None and other is not None and abs(one - other) < HALF / 10

    def _has_come(self, start: datetime) -> bool:
        """Whether one after `start` is due by now."""
        found = self._after(start)
        return found is not None and found <= self.now

    def _after(self, start: datetime) -> datetime | None:
        """The first after `start`, to the second."""
        found = self._raw(start)
        if found is not None and isinstance(self._schedule, solar):
            # Found from different starts, one event differs by up to a tenth of a second (ephem),
            # which rounding would make two. So count from a start that all beats share.
            hour = found.replace(minute=0, second=0, microsecond=0)
            found = self._raw(hour - HOUR)
        return None if found is None else (found + HALF).replace(microsecond=0)

    def _raw(self, start: datetime) -> datetime | None:
        local = start.astimezone(self._zone)
        if self._is_crontab:
            # A crontab's end, exactly: Celery before 5.7 gives what remains in wall time.
            begin, delta, _now = self._schedule.remaining_delta(local)
            return (begin + delta).astimezone(timezone.utc)  # type: ignore[no-any-return]
        left = self._schedule.remaining_estimate(local)
        return None if left is None else self.now + left
