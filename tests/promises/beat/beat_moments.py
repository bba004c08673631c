"""Moments, schedules whose clock stands at one, and schedules of beats."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

from celery import Celery
from celery.schedules import crontab

ZONES = {
    name: ZoneInfo(name)
    for name in (
        *("UTC", "Europe/Berlin", "America/New_York", "America/St_Johns", "Asia/Kolkata"),
        *("Australia/Lord_Howe", "Pacific/Kiritimati"),
    )
}


def utc(text: str) -> datetime:
    """A moment: "2026-11-21 10:00:30"."""
    if "." in text:  # Python 3.10 wants all six digits
        text = text.ljust(len("2026-11-21 10:00:30.000000"), "0")
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)


def set_up(made: Any, now: datetime, zone: str = "UTC", **conf: Any) -> Any:
    """A schedule as an entry of an app in `zone` has it, at one moment."""
    app = Celery(set_as_current=False)
    app.conf.update(timezone=zone, **conf)
    made.app = app
    made.nowfun = lambda: now.astimezone(ZONES[zone])
    return made


def cron(spec: str) -> crontab:
    """A crontab as crontab(5) writes it. Celery has had `from_string` since 5.5."""
    minute, hour, day_of_month, month_of_year, day_of_week = spec.split()
    return crontab(
        minute=minute,
        hour=hour,
        day_of_month=day_of_month,
        month_of_year=month_of_year,
        day_of_week=day_of_week,
    )


def entry(name: str, when: Any, **fields: Any) -> dict[str, Any]:
    """Return a schedule of one entry, whose message carries its name."""
    return {name: {"task": "job", "schedule": when, "args": (name,), **fields}}


def minutely() -> Mapping[str, Any]:
    """Return a schedule of one entry that is due at each full minute."""
    return entry("cron", crontab())


def gaps(times: list[float]) -> list[float]:
    """From each to the next; seconds."""
    return [later - earlier for earlier, later in pairwise(times)]
