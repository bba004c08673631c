"""The app that the beats of these tests run; its configuration comes in the environment.

Every message says in its headers who sent it and when, by this module's own account: the library is
not asked. `beat_asked` is when the schedule last answered that its entry is due, before this
message; `beat_sent` is when the message is on its way to the broker. The tick is claimed between
the two, and the due time that a message is for lies before the first or between them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from celery import Celery, Task
from celery.schedules import BaseSchedule, crontab, schedule
from celery.signals import before_task_publish

import celery_redlock
from tests.promises.beat.schedules import EverySecond, SecondCrontab
from tests.support.machine import end_with_parent

KIND = os.environ.get("TEST_KIND", "persistent")

end_with_parent()

app = Celery(os.environ.get("TEST_MAIN", "tests.promises.beat"))
app.conf.update(json.loads(os.environ.get("TEST_CONF", "{}")))
celery_redlock.install()
if os.environ.get("TEST_PLANTED"):  # of a campaign that looks for a planted bug
    from tests.campaign.publishing import mutants

    mutants.plant(os.environ["TEST_PLANTED"])


def every_second() -> BaseSchedule:
    if KIND != "redbeat":
        return EverySecond()
    from redbeat.schedules import rrule  # the one that redbeat can store

    epoch = datetime.fromtimestamp(int(os.environ["TEST_EPOCH"]), timezone.utc)
    return rrule("SECONDLY", dtstart=epoch)


def entries() -> dict[str, dict[str, Any]]:
    """Return the entries that the environment asks for."""
    known: dict[str, Callable[[], dict[str, Any]]] = {
        "tick": lambda: {"schedule": every_second()},
        "interval": lambda: {"schedule": schedule(2.0)},
        "hourly": lambda: {"schedule": crontab(minute=os.environ["TEST_MINUTE"])},
    }
    names = os.environ.get("TEST_ENTRIES", "tick,interval").split(",")
    return {
        name: {"task": f"tests.promises.beat.{name}", **known[name]()} for name in names if name
    }


class Gated(Task):
    """A task whose first message waits for a file, if one is named, and fails if that says so."""

    gate = os.environ.get("TEST_GATE", "")

    def apply_async(self, *args: Any, **options: Any) -> Any:
        if Gated.gate:
            while not os.path.exists(Gated.gate):
                time.sleep(0.01)
            with open(Gated.gate, encoding="ascii") as file:
                fails = file.read() == "fail"
            Gated.gate = ""
            if fails:
                raise OSError("this message does not leave, as asked")
        return super().apply_async(*args, **options)


def job() -> None: ...


for _name in ("tick", "interval", "hourly"):
    app.task(job, base=Gated, name=f"tests.promises.beat.{_name}")


@celery_redlock.beat_deduplicated.connect
def heard(
    sender: Any = None, resource: str = "", entry: Any = None, tick: str = "", **more: Any
) -> None:
    """Says so, for the log that tests read."""
    print(f"HEARD: {entry.name} {tick} {resource} {sender.name} {more['where']}", flush=True)


# -- the account ----------------------------------------------------------------------------------

_asked: dict[str, float] = {}
"""By task: when its schedule last said that it is due."""


def _note(cls: Any, *tasks: str) -> None:
    answer = cls.is_due

    def is_due(self: Any, last_run_at: Any) -> Any:
        before = time.time()
        state = answer(self, last_run_at)
        if state[0]:
            _asked.update(dict.fromkeys(tasks, before))
        return state

    cls.is_due = is_due


_note(EverySecond, "tests.promises.beat.tick")
_note(SecondCrontab, "tests.promises.beat.tick")
_note(schedule, "tests.promises.beat.interval")
_note(crontab, "tests.promises.beat.hourly")
if KIND == "redbeat":
    from redbeat.schedules import rrule

    _note(rrule, "tests.promises.beat.tick")

app.conf.beat_schedule = entries() if KIND != "django" else {}


@before_task_publish.connect
def stamp(sender: Any = None, headers: Any = None, **_signal: Any) -> None:
    sent = time.time()
    asked = _asked.get(str(sender), sent)
    headers["beat_name"] = os.environ.get("TEST_BEAT", "")
    headers["beat_pid"] = os.getpid()
    headers["beat_asked"] = asked
    headers["beat_sent"] = sent
