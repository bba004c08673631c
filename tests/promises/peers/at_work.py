"""The app of the workers and the beats; its configuration comes in the environment."""

from __future__ import annotations

import json
import os

from celery import Celery

from tests.promises.beat.schedules import EverySecond
from tests.promises.peers.project import define

app = Celery("tests.promises.peers.at_work")
app.conf.update(json.loads(os.environ["TEST_CONF"]))
app.conf.beat_schedule = {"tick": {"task": "peers.tick", "schedule": EverySecond()}}
define(app)
