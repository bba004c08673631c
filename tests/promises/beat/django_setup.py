"""Make the database, with its entries.

python -m tests.promises.beat.django_setup tick interval
"""

from __future__ import annotations

import os
import sys

import django
from django.core.management import call_command
from django.db import connection


def main(names: list[str]) -> None:
    django.setup()
    from django_celery_beat.models import CrontabSchedule, IntervalSchedule, PeriodicTask

    from tests.promises.beat.django_scheduler import MARK

    with connection.cursor() as cursor:
        cursor.execute("PRAGMA journal_mode=WAL")  # a reader does not wait for a stopped writer
    call_command("migrate", verbosity=0)
    second, _ = CrontabSchedule.objects.get_or_create(day_of_month=MARK, timezone="UTC")
    hourly, _ = CrontabSchedule.objects.get_or_create(
        minute=os.environ["TEST_MINUTE"], timezone="UTC"
    )
    two, _ = IntervalSchedule.objects.get_or_create(every=2, period="seconds")
    schedules = {
        "tick": {"crontab": second},
        "interval": {"interval": two},
        "hourly": {"crontab": hourly},
    }
    for name in names:
        PeriodicTask.objects.create(
            name=name, task=f"tests.promises.beat.{name}", **schedules[name]
        )


if __name__ == "__main__":
    main(sys.argv[1:])
