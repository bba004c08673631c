"""Platforms without locks: what works there, and the error that says why the rest does not.

A program on Windows can declare tasks and publish them. It runs in a process that lacks what
Windows lacks: Celery's own modules are imported before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from celery_redlock import ConfigurationError, Redlock
from tests.support.names import Patch

PROGRAM = """
import json, multiprocessing.connection, multiprocessing.util, os, select, signal, socket, sys
import billiard.util, celery.app.base, celery.app.task, click, kombu.transport.memory, redis
from celery import Celery

for module in ("fcntl", "resource", "termios", "pwd", "grp", "syslog"):
    sys.modules[module] = None
for module, names in {
    os: "fork register_at_fork getuid geteuid getpgid setsid killpg sched_getaffinity uname",
    select: "poll epoll",
    signal: "pthread_kill setitimer pthread_sigmask SIGUSR1 SIGUSR2 SIGALRM SIGHUP SIGKILL SIGURG",
    socket: "AF_UNIX TCP_USER_TIMEOUT",
}.items():
    for name in filter(lambda name: hasattr(module, name), names.split()):
        delattr(module, name)

def tried(do):
    try:
        return do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def imported(line):
    return tried(lambda: exec(line, {}))

import celery_redlock
app = Celery("windows", broker="memory://")
app.conf.redlock_nodes = ["redis://127.0.0.1:1"]

@app.task(name="plain")
@celery_redlock.locked("order:<order_id>")
def plain(order_id): ...

@app.task(name="single", base=celery_redlock.SingletonTask, lock_key="order:<order_id>")
def single(order_id): ...

@app.task(name="reserved")
@celery_redlock.locked("order:<order_id>", scope="until_executed")
def reserved(order_id): ...

def queued():
    with app.connection_for_read() as connection:
        return connection.default_channel.queue_declare("celery", passive=True).message_count

print(json.dumps({
    "declared": imported("from celery_redlock import current_lease, Skipped, lock_lost, Holder"),
    "install": imported("import celery_redlock.measures, celery_redlock.signals"),
    "plugin": imported("import celery_redlock.testing.pytest_plugin"),
    "plain": tried(lambda: type(plain.delay(1)).__name__),
    "single": tried(lambda: type(single.delay(1)).__name__),
    "reserved": [tried(lambda: str(reserved.delay(1))), tried(lambda: str(reserved.delay(1)))],
    "queued": queued(),
    "body": tried(lambda: plain(1)),
    "Redlock": imported("from celery_redlock import Redlock"),
    "AsyncRedlock": imported("from celery_redlock import AsyncRedlock"),
}))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("what", ["declared", "install", "plugin"])
def test_import_for_declarations_succeeds_on_windows(said: dict[str, object], what: str) -> None:
    assert said[what] is None


def test_publishing_without_a_reservation_succeeds_on_windows(said: dict[str, object]) -> None:
    assert said["plain"] == said["single"] == "AsyncResult"
    assert said["queued"] == 2


def test_publishing_with_a_reservation_on_windows_says_posix_only(said: dict[str, object]) -> None:
    first, second = said["reserved"]  # type: ignore[misc]
    assert "POSIX systems only" in first and first == second


@pytest.mark.parametrize("what", ["Redlock", "AsyncRedlock", "body"])
def test_taking_a_lock_on_windows_says_posix_only(said: dict[str, object], what: str) -> None:
    assert str(said[what]).startswith("ImportError: ") and "POSIX systems only" in str(said[what])


def test_attribute_error_while_loading_a_public_name_is_shown() -> None:
    program = """
import sys, types
sys.modules["celery_redlock.task"] = types.ModuleType("celery_redlock.task")
from celery_redlock import locked
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (
        "celery_redlock.locked cannot be loaded: module 'celery_redlock.task' has no" in done.stderr
    )
    assert "direct cause" in done.stderr


def test_redlock_is_refused_where_eventlet_has_patched_python(monkeypatch: Patch) -> None:
    patcher = SimpleNamespace(is_monkey_patched=lambda module: module == "thread")
    monkeypatch.setitem(sys.modules, "eventlet.patcher", patcher)
    with pytest.raises(ConfigurationError, match="Use the pool gevent, threads or prefork"):
        Redlock(["redis://127.0.0.1:1"])
