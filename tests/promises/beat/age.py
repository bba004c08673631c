"""Let an entry have run last long ago.

python -m tests.promises.beat.age KIND SCHEDULE-FILE ENTRY TIME
"""

from __future__ import annotations

import sys
from datetime import datetime, timezone

from tests.promises.beat.project import app


def main(kind: str, file: str, name: str, when: str) -> None:
    last = datetime.fromtimestamp(float(when), timezone.utc)
    if kind == "persistent":
        from celery.beat import PersistentScheduler

        scheduler = PersistentScheduler(app, schedule_filename=file)
        scheduler.schedule[name].last_run_at = last
        scheduler.close()
    elif kind == "redbeat":
        from redbeat import RedBeatScheduler, RedBeatSchedulerEntry

        RedBeatScheduler(app)  # stores the entries of the configuration
        key = RedBeatSchedulerEntry.generate_key(app, name)
        RedBeatSchedulerEntry.from_key(key, app=app).reschedule(last)
    else:
        import django

        django.setup()
        from django_celery_beat.models import PeriodicTask

        PeriodicTask.objects.filter(name=name).update(last_run_at=last)


if __name__ == "__main__":
    main(*sys.argv[1:])
