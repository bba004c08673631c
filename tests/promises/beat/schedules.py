"""Schedules that are due at every whole second, so that no test waits for a minute.

Two of them, as users have both: a schedule of its own kind, and one that is a crontab.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from celery.schedules import BaseSchedule, crontab, schedstate

SECOND = timedelta(seconds=1)


class EverySecond(BaseSchedule):
    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        next_due: datetime = self.maybe_make_aware(last_run_at).replace(microsecond=0) + SECOND
        return next_due - self.maybe_make_aware(self.now())

    def is_due(self, last_run_at: datetime) -> schedstate:
        left = self.remaining_estimate(last_run_at).total_seconds()
        if left > 0:
            return schedstate(False, left)
        return schedstate(True, max(0.0, self.remaining_estimate(self.now()).total_seconds()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EverySecond)

    __hash__ = None  # type: ignore[assignment]


class SecondCrontab(crontab):
    """A crontab without its arithmetic."""

    def remaining_delta(
        self, last_run_at: datetime, *_args: Any, **_options: Any
    ) -> tuple[datetime, timedelta, datetime]:
        last = self.maybe_make_aware(last_run_at)
        return last, last.replace(microsecond=0) + SECOND - last, self.maybe_make_aware(self.now())
