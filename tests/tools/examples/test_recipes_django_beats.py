"""The page of docs/recipes on two beats and the Django admin: from the form to the log line."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from celery_redlock.server import LocalServer
from tests.support.program import Program
from tests.support.recipes import ROOT, blocks, celery, queued
from tests.support.wait import wait_until

pytestmark = pytest.mark.worker

pytest.importorskip("django_celery_beat")

BELOW = """
import os
SECRET_KEY = "for tests"
INSTALLED_APPS = [
    "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes",
    "django.contrib.messages", "django.contrib.sessions",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [{
    "BACKEND": "django.template.backends.django.DjangoTemplates",
    "APP_DIRS": True,
    "OPTIONS": {"context_processors": [
        "django.template.context_processors.request",
        "django.contrib.auth.context_processors.auth",
        "django.contrib.messages.context_processors.messages",
    ]},
}]
DATABASES = {"default": {
    "ENGINE": "django.db.backends.sqlite3",
    "NAME": os.path.join(os.path.dirname(__file__), "shop.sqlite"),
    "OPTIONS": {"timeout": 20},
}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "shop.urls"
ALLOWED_HOSTS = ["testserver"]
STATIC_URL = "/static/"
USE_TZ = True
"""
URLS = """
from django.contrib import admin
from django.urls import path
urlpatterns = [path("admin/", admin.site.urls)]
"""
MIGRATE = """
import django; django.setup()
from django.core.management import call_command
from django.db import connection
with connection.cursor() as cursor:
    cursor.execute("PRAGMA journal_mode=WAL")  # beats do not keep each other from reading
call_command("migrate", verbosity=0)
"""
ADD = """
import django; django.setup()
from django.contrib.auth.models import User
from django.test import Client
from django_celery_beat.models import IntervalSchedule, PeriodicTask
client = Client()
client.force_login(User.objects.create_superuser("admin"))
form = "/admin/django_celery_beat/"
none = {"periodictask_set-TOTAL_FORMS": "0", "periodictask_set-INITIAL_FORMS": "0"}
given = {"every": "1", "period": "seconds", **none}
assert client.post(f"{form}intervalschedule/add/", given).status_code == 302
(second,) = IntervalSchedule.objects.all()
given = {"name": "report", "regtask": "", "task": "shop.report", "enabled": "on",
         "interval": str(second.pk), "args": "[]", "kwargs": "{}", "headers": "{}"}
answer = client.post(f"{form}periodictask/add/", given)
assert answer.status_code == 302, answer.context["errors"]
assert PeriodicTask.objects.filter(name="report", enabled=True).exists()
"""
SENDS = "Scheduler: Sending due task report (shop.report)"


def run(script: str, directory: Path) -> None:
    paths = os.pathsep.join([str(directory), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_recipe_django_beats_send_each_tick_of_an_entry_of_the_admin_once(
    server: LocalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "shop.settings")
    settings, tasks = blocks("django-beats", "py")
    command = blocks("django-beats", "sh")[0].splitlines()[1]
    starts, _sends, refused = blocks("django-beats", "text")[0].splitlines()
    shop = tmp_path / "shop"
    shop.mkdir()
    (shop / "__init__.py").touch()
    (shop / "settings.py").write_text(BELOW + settings.replace("redis://localhost", server.url))
    (shop / "celery.py").write_text(tasks)
    (shop / "urls.py").write_text(URLS)
    run(MIGRATE, tmp_path)
    arguments = command.partition("#")[0].split()[3:]
    assert arguments == ["beat", "--loglevel", "INFO"]
    refused = re.sub(r"every-.*", "every-1s) was sent by pid ", refused)
    with contextlib.ExitStack() as stack:
        beats = [
            stack.enter_context(celery(tmp_path, name, *arguments, "--pidfile="))
            for name in ("one", "two")
        ]
        for beat in beats:
            beat.said(starts.removesuffix(" ..."), 60.0)
        begin = time.monotonic()
        run(ADD, tmp_path)

        def sent() -> int:
            return sum(beat.text.count(SENDS) for beat in beats)

        def other_of_a_tick() -> Program | None:
            return next((beat for beat in beats if refused in beat.text), None)

        wait_until(lambda: sent() >= 3, 60.0, "ticks are sent", seen=lambda: beats[0].text)
        other = wait_until(other_of_a_tick, 60.0, "the other beat does not send it again")
        (killed,) = (beat for beat in beats if beat is not other)
        killed.kill()
        before = other.text.count(SENDS)
        wait_until(lambda: other.text.count(SENDS) >= before + 3, 60.0, "the other goes on")
    assert sent() <= time.monotonic() - begin + 2, "more than one a second"
    assert sent() - 1 <= queued(server) <= sent()  # the one that was killed may just have begun
