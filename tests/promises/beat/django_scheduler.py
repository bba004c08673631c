"""A user's own subclass of the DatabaseScheduler: a certain crontab means every second."""

from __future__ import annotations

from typing import Any

from django_celery_beat.schedulers import DatabaseScheduler, ModelEntry

from tests.promises.beat.schedules import SecondCrontab

MARK = "1-31"
"""A day of month that is every day, and that only these entries have."""


class Entry(ModelEntry):
    def __init__(self, model: Any, app: Any = None) -> None:
        super().__init__(model, app=app)
        if model.crontab is not None and model.crontab.day_of_month == MARK:
            self.schedule = SecondCrontab(app=self.app)


class SecondScheduler(DatabaseScheduler):
    Entry = Entry
