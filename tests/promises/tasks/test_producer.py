"""Modules that a program with locked tasks loads: at its start, and when a task first runs."""

from __future__ import annotations

import subprocess
import sys

DECLARES = """
import sys
from celery import Celery

app = Celery("producer", broker="memory://")
app.conf.redlock_enabled = False

from celery_redlock import SingletonTask, locked

@app.task(base=SingletonTask, lock_key="a:{number}")
def work(number):
    return number

@app.task(base=SingletonTask, lock_key="b:{number}", lock_scope="until_executed")
def unique(number):
    return number

@app.task
@locked("a:<number>")
def also(number):
    return number

def ours():
    return {name for name in sys.modules if name.startswith("celery_redlock")}
"""
RUNS = (
    *("tenacity", "celery.app.control", "celery_redlock.events"),
    *(f"celery_redlock.{room}" for room in ("locking", "stores", "keepalive", "runtime")),
    *(f"celery_redlock.messages.{name}" for name in ("run", "delivery", "consume", "conflict")),
    *(f"celery_redlock.messages.{name}" for name in ("endings", "publication", "reservation")),
    *("celery_redlock.worker.startup", "celery_redlock.protocol.restart_guard"),
)
"""Modules that acquire, release or reserve, or are loaded with modules that do."""


def program(code: str) -> str:
    """Return the output of a program that declares the tasks and then runs this code."""
    done = subprocess.run(
        [sys.executable, "-c", DECLARES + code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_declaring_and_publishing_loads_no_module_that_takes_locks() -> None:
    loaded = program("work.delay(1), also.delay(1), unique.name; print(*sys.modules)").split()
    assert "celery_redlock.task" in loaded
    assert {*RUNS, "redis"} & set(loaded) == set()
    assert set(RUNS) <= set(program("work(1); app.control; print(*sys.modules)").split())


def test_lock_in_another_store_works_without_redis_py() -> None:
    printed = program("""
sys.modules["redis"] = None
from celery_redlock import AsyncRedlock, NotAcquired, Redlock

for url in ("etcd://127.0.0.1:1", "postgresql://127.0.0.1:1/none"):
    redlock = Redlock([url])
    try:
        redlock.acquire("a")
    except NotAcquired as error:
        print(type(error).__name__, type(AsyncRedlock([url])).__name__)
try:
    Redlock(["redis://127.0.0.1:1"])
except ImportError as error:
    print("redis" in str(error))
""")
    assert printed.split() == [*["QuorumUnavailable", "AsyncRedlock"] * 2, "True"]


def test_celery_command_loads_no_module_of_ours_that_takes_locks() -> None:
    """Celery loads the commands of all packages for each of its own commands."""
    code = """
import sys
from celery.__main__ import main

sys.argv = ["celery", "--version"]
try:
    main()
except SystemExit:
    print(*(name for name in sys.modules if name.startswith("celery_redlock")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = done.stdout.splitlines()[-1].split()
    assert set(loaded) <= {
        *("celery_redlock", "celery_redlock.cli", "celery_redlock.cli.nodes_options"),
        "celery_redlock.worker",
        *("celery_redlock.worker.remote_control", "celery_redlock.protocol"),
        *("celery_redlock.protocol.errors", "celery_redlock.protocol.texts"),
    }
    assert "celery_redlock.cli" in loaded


def test_revoke_before_remote_control_is_loaded_is_remembered() -> None:
    """By any app's own control; a test may give an app another one."""
    told = program("""
from celery_redlock import install
from celery_redlock.messages.revokes import was_revoked

install()
app.control = "mine"
print(app.control)
del app.control
app.control.revoke("one")
unique.AsyncResult("two").revoke()
other = Celery("other", broker="memory://")
other.control.revoke("three")
print(*map(was_revoked, ("one", "two", "three", "four")))
app.control = "mine"
print(app.control, other.control.app is other)
""").split()
    assert told == ["mine", "True", "True", "True", "False", "mine", "True"]


def test_interrupt_while_modules_are_loaded_leaves_it_to_the_next_call() -> None:
    told = program("""
class Strikes:
    struck = set()

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.startswith("celery_redlock") and name not in cls.struck:
            cls.struck.add(name)
            raise KeyboardInterrupt

sys.meta_path.insert(0, Strikes)
while True:
    try:
        print(work(1))
        break
    except KeyboardInterrupt:
        pass
loaded = ours()
print(also(2), work.apply((3,)).get(), unique.apply((4,)).get(), ours() == loaded)
print(len(Strikes.struck) > 30, "celery_redlock.worker.startup" in Strikes.struck)
""")
    assert told.split() == ["1", "2", "3", "4", "True", "True", "True"]


def test_several_threads_may_load_the_modules_at_once() -> None:
    told = program("""
import threading

app.finalize()  # which Celery does not let several threads do at once
begin, results = threading.Barrier(8), []

def first(task, number):
    begin.wait()
    results.append(task(number))

calls = [(task, number) for number in range(4) for task in (work, also)]
threads = [threading.Thread(target=first, args=call) for call in calls]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sorted(results))
""")
    assert told == "[0, 0, 1, 1, 2, 2, 3, 3]"
