"""Moments, and schedules whose clock stands at one."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any
from zoneinfo import ZoneInfo

from celery import Celery

ZONES = {
    name: ZoneInfo(name)
    for name in (
        *("UTC", "Europe/Berlin", "America/New_York", "America/St_Johns", "Asia/Kolkata"),
        *("Australia/Lord_Howe", "Pacific/Kiritimati"),
    )
}


def utc(text: str) -> datetime:
    """A moment: "2026-11-21 10:00:30"."""
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)


def set_up(made: Any, now: datetime, zone: str = "UTC", **conf: Any) -> Any:
    """A schedule as an entry of an app in `zone` has it, at one moment."""
    app = Celery(set_as_current=False)
    app.conf.update(timezone=zone, **conf)
    made.app = app
    made.nowfun = lambda: now.astimezone(ZONES[zone])
    return made
