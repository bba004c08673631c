"""The pages of docs/recipes that are about processes and servers: beats, a helper, a restart."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml
from celery.beat import PersistentScheduler
from celery.exceptions import TaskRevokedError

from celery_redlock import (
    LeaseLost,
    Redlock,
    Skipped,
)
from celery_redlock.server import LocalServer
from tests.support.nodes import admin
from tests.support.recipes import ROOT, blocks, celery, code, queued, running, value
from tests.support.wait import wait_until

pytestmark = pytest.mark.worker


def app_of(text: str) -> Any:
    """The app of a page, to send with."""
    names: dict[str, Any] = {"__name__": "shop"}
    exec(text, names)
    return names["app"]


def is_kept(server: LocalServer) -> bool:
    """Return True if a tick's claim lasts until the next one is due."""
    with admin(server) as client:
        return any(client.pttl(key) > 60_000 for key in client.keys("redlock:beat:*"))


def test_recipe_nightly_sends_one_task_from_two_beats(server: LocalServer, tmp_path: Path) -> None:
    """Both beats last sent it the night before last."""
    text = code("nightly", server)
    (tmp_path / "shop.py").write_text(text)
    app = app_of(text)
    (command,) = blocks("nightly", "sh")
    _celery, _app, _shop, *arguments, _schedule = shlex.split(command)
    assert arguments[-1] == "--schedule"
    beats = []
    with contextlib.ExitStack() as stack:
        for name in ("one", "two"):
            file = str(tmp_path / f"{name}.schedule")
            schedule = PersistentScheduler(app, schedule_filename=file)
            schedule.schedule["nightly"].last_run_at = datetime.now(timezone.utc) - timedelta(2)
            schedule.close()
            program = celery(tmp_path, name, *arguments, file, "--pidfile=")
            beats.append(stack.enter_context(program))
        for beat in beats:
            beat.said("each tick is sent by one beat", 30.0)
        refused = re.compile(r"\) (was|is being) sent by ")
        wait_until(lambda: any(refused.search(beat.text) for beat in beats), 30.0, "one is refused")
        # Not only queued: a beat that is ended while the broker answers it does not know of that.
        wait_until(lambda: is_kept(server), 10.0, "the other has sent it, and knows")
    assert queued(server) == 1, [beat.text for beat in beats]
    app.close()


DJANGO = """
import django; django.setup()
from django.db import connection, transaction
from redis import Redis
from shop.models import Order
from shop.tasks import app, charge
from shop.views import pay
with connection.schema_editor() as editor:
    editor.create_model(Order)
redis = Redis.from_url(app.conf.broker_url)
try:
    with transaction.atomic():
        assert pay(None).status_code == 202
        raise ZeroDivisionError
except ZeroDivisionError:
    assert redis.keys() == [] and not Order.objects.exists()
with transaction.atomic():
    pay(None)
    assert redis.keys() == []
assert redis.llen("celery") == 2
assert b"redlock:turnover#reserved" in redis.keys(), redis.keys()
order = Order.objects.get()
charge(order.pk)
assert Order.objects.get().paid
"""

DJANGO_SETTINGS = """
SECRET_KEY = "x"
INSTALLED_APPS = ["shop"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
"""


def test_recipe_django_on_commit_sends_after_the_commit(
    server: LocalServer, tmp_path: Path
) -> None:
    tasks, views = blocks("django-on-commit", "py")
    shop = tmp_path / "shop"
    shop.mkdir()
    (shop / "__init__.py").touch()
    (shop / "settings.py").write_text(DJANGO_SETTINGS)
    model = "class Order(models.Model):\n    paid = models.BooleanField(default=False)\n"
    (shop / "models.py").write_text(f"from django.db import models\n{model}")
    app = f"from celery import Celery\napp = Celery('shop', broker={server.url!r})\n"
    assert (tasks[:15], views[:15]) == ("# shop/tasks.py", "# shop/views.py")
    (shop / "tasks.py").write_text(app + tasks)
    (shop / "views.py").write_text(views)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", DJANGO],
        env={**os.environ, "PYTHONPATH": paths, "DJANGO_SETTINGS_MODULE": "shop.settings"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


RENDER = """def render(user_id, text):
    import pathlib, time
    with open("begun", "a") as file:
        file.write(f"{user_id} {text}\\n")
    while not pathlib.Path("go").exists():
        time.sleep(0.02)
"""
TIDY_UP = """def tidy_up(user_id):
    with open("tidied", "a") as file:
        file.write(f"{user_id}\\n")
"""


def test_recipe_newest_wins_stops_the_call_at_work(server: LocalServer, tmp_path: Path) -> None:
    """Another user's call is at work all the time."""
    changes = {"def render(user_id, text): ...\n": RENDER, "def tidy_up(user_id): ...\n": TIDY_UP}
    text = code("newest-wins", server, changes)
    (tmp_path / "shop.py").write_text(text)
    app = app_of(text)
    preview = app.tasks["shop.preview"]

    def lines(name: str) -> list[str]:
        file = tmp_path / name
        return file.read_text().splitlines() if file.exists() else []

    arguments = ("worker", "-c", "3", "-l", "INFO", "--without-mingle", "--without-gossip")
    with celery(tmp_path, "worker", *arguments) as worker:
        worker.said(" ready.", 60.0)
        first, other = preview.delay(7, "a"), preview.delay(8, "x")
        wait_until(lambda: sorted(lines("begun")) == ["7 a", "8 x"], 30.0, "both are at work")
        *replaced, newest = [preview.delay(7, text) for text in "bcde"]
        wait_until(
            lambda: "7 e" in lines("begun"), 30.0, "the newest begins", seen=lambda: worker.text
        )
        assert not newest.ready() and not other.ready()
        assert lines("tidied")[0] == "7"
        wait_until(lambda: first.state == "REVOKED", 30.0, "the first is cancelled")
        (tmp_path / "go").touch()
        assert (value(newest), value(other)) == (None, None), worker.text
        for one in replaced:
            assert isinstance(value(one), TaskRevokedError) or Skipped.of(one.result), one.state
    app.close()


def test_recipe_c_call_keeps_the_lock_while_the_gil_is_kept(
    server: LocalServer, tmp_path: Path
) -> None:
    """The call lasts one and a half ttls, in a thread of a worker; another task wants its key."""
    solve = """def solve(name):
    import ctypes
    print("solving")
    ctypes.PyDLL(None).usleep(4_500_000)  # keeps the GIL, unlike CDLL
    return name
"""
    keeper = 'redlock_keeper = "process"\n'
    changes = {"def solve(name): ...\n": solve, keeper: f"{keeper}app.conf.redlock_ttl = 3.0\n"}
    text = code("c-call", server, changes)
    (tmp_path / "shop.py").write_text(text)
    app = app_of(text)
    other = Redlock([server.url])
    arguments = ("worker", "-P", "threads", "-c", "2", "--without-mingle", "--without-gossip")
    with celery(tmp_path, "worker", *arguments, "-l", "INFO") as worker:
        worker.said(" ready.", 30.0)
        trained = app.tasks["shop.train"].delay("forest")
        worker.said("solving")

        def alone() -> bool:
            taken = other.try_acquire("model:forest")
            assert taken is None or trained.ready(), "another has its lock while it runs"
            return trained.ready()

        wait_until(alone, 30.0, "it is trained", every=0.05)
        assert value(trained) == "forest"
    other.close()
    app.close()


def test_recipe_one_redis_locks_on_the_broker(server: LocalServer) -> None:
    with running("one-redis", server) as shop:
        assert value(shop.charge.delay(7)) is None
        assert Redlock.from_app(shop.app).nodes == (f"127.0.0.1:{server.port}",)


def compose() -> list[str]:
    """Return the arguments that the page gives a server in Compose."""
    (text,) = blocks("one-redis", "yaml")
    program, *arguments = shlex.split(yaml.safe_load(text)["services"]["redis"]["command"])
    assert program == "redis-server"
    return arguments


@pytest.mark.parametrize("remembers", [True, False])
def test_recipe_one_redis_with_a_disk_remembers_its_locks(remembers: bool) -> None:
    lost: list[LeaseLost] = []
    with LocalServer(config=compose() if remembers else ()) as server:
        redlock = Redlock([server.url], ttl=30.0 if remembers else 3.0)
        other = Redlock([server.url])
        with redlock.lock("order:7", on_lost=lost.append):
            server.restart()
            assert (other.try_acquire("order:7") is None) == remembers
            wait_until(lambda: lost or remembers, 10.0, "the first is told")
        redlock.close()
        other.close()
    assert bool(lost) != remembers
