"""The app of the worker; its configuration comes in the environment."""

from __future__ import annotations

import json
import os

from celery import Celery

from tests.promises.compat.project import define

app = Celery("tests.promises.compat.at_work")
app.conf.update(json.loads(os.environ["TEST_CONF"]))
define(app)
