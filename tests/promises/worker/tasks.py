"""The app that the workers of these tests run, and its tasks.

Imported by workers only, with their broker, nodes and settings in the environment. What a body does
is chosen by the message, so that one task can come to every kind of end.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_type_hints
from urllib.parse import urlsplit

import redis
from celery import Celery, Task, shared_task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from celery.signals import after_task_publish

from celery_redlock import (
    LeaseLost,
    Redlock,
    RedlockError,
    ResourceHeld,
    SingletonTask,
    current_lease,
    locked,
)
from celery_redlock.events import Listener, subscribe
from celery_redlock.runtime.clock import monotonic
from tests.promises.worker import hearing, paced
from tests.promises.worker.reserving import declare
from tests.support.bodies import VARIABLE, note, runs_of
from tests.support.machine import end_with_parent

NAME = "tests.promises.worker.tasks"

end_with_parent()

app = Celery(NAME)
if "TEST_NAMESPACED" in os.environ:
    app.config_from_object(json.loads(os.environ["TEST_NAMESPACED"]), namespace="CELERY")
    given = json.loads(os.environ["TEST_CONF"])
    app.conf.update({name: given[name] for name in given if not name.startswith("redlock")})
else:
    app.conf.update(json.loads(os.environ["TEST_CONF"]))
PAUSE = app.conf.get("test_pause", 0.1)
"""Seconds between two tries of a task that retries; RabbitMQ delays for whole ones only."""


class Witness(Listener):
    """A listener that writes each loss into the bodies' log."""

    def lost(self, loss: LeaseLost) -> None:
        note("lost", str(loss.resource), "", loss.reason)
        owner = loss.owner
        assert owner is not None
        votes = [vote.vote.value for vote in loss.votes]
        who = [loss.task, owner.task_id, owner.host, owner.pid]
        note("loss", str(loss.resource), "", [*who, loss.held_for, loss.reason, votes])


if VARIABLE in os.environ:  # in a worker; a test that imports this receives nothing
    subscribe(Witness())
if app.conf.get("test_hears"):
    hearing.connect()


def compute() -> None:
    """Compute in Python, in a frame of its own: Python 3.13.0 would skip the `finally`.

    It lasts longer than the switch interval. A shorter loop would keep all other threads waiting,
    because each line that is written releases the GIL and takes it again.
    """
    end = time.monotonic() + 4 * sys.getswitchinterval()
    while time.monotonic() < end:
        pass


def occupy(task: Any, key: str, seconds: float, kind: str = "sleep", until: str = "") -> None:
    """A body: from `enter` to `exit`, with signs of life between, as long as it is let.

    Args:
        until: A file; when it is there, the body ends.
    """
    run = uuid.uuid4().hex[:8]
    note("enter", f"k:{key}", task.request.id, run)
    try:
        end = time.monotonic() + seconds
        if kind == "one sleep":
            time.sleep(seconds)
        if kind == "recv":
            ours, _theirs = socket.socketpair()
            ours.settimeout(seconds)
            ours.recv(1)
        if kind == "gil":
            ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))  # keeps the GIL, unlike CDLL
        if kind == "one call":
            sum(itertools.repeat(1, int(seconds * 5e7)))  # and no signal is handled before its end
            return
        while time.monotonic() < end and not (until and os.path.exists(until)):
            note("alive", f"k:{key}", task.request.id, run)
            if kind == "sleep":
                time.sleep(0.005)
            else:
                compute()
    finally:
        note("exit", f"k:{key}", task.request.id, run)


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", max_retries=3)
def work(self: Task, key: str, seconds: float = 0.05, then: str = "return") -> Any:
    return _work(self, key, seconds, then)


def told(key: str) -> str:
    """Return the file that `Cluster.tell` makes; bodies of this key end once it exists."""
    return f"{os.environ[VARIABLE]}.{key}"


def _work(self: Task, key: str, seconds: float, then: str) -> Any:
    """Only the first try takes its time; the others are short, but where it is to take its time."""
    short = self.request.retries and then != "each takes its time"
    occupy(self, key, min(seconds, 0.05) if short else seconds, until=told(key))
    if then == "raise":
        raise ValueError("as asked")
    if then == "retry" and self.request.retries < 3:
        raise self.retry(countdown=PAUSE)
    if then == "retry at once" and self.request.retries < 3:
        raise self.retry(countdown=0)
    if then == "replace":
        raise self.replace(self.si(key, seconds))
    if then == "retry forever":
        raise self.retry(countdown=PAUSE)
    if then == "ignore":
        raise Ignore
    if then == "_exit":
        os._exit(3)
    if then == "SystemExit":
        raise SystemExit(3)
    if then == "KeyboardInterrupt":
        raise KeyboardInterrupt
    if then == "MemoryError":
        raise MemoryError("as asked")
    if then == "SIGKILL":  # as the OOM killer sends it: nobody in the worker knows beforehand
        os.kill(os.getpid(), signal.SIGKILL)
    if then == "SIGSEGV":
        ctypes.string_at(0)
    if then in ("reject", "requeue") and runs_of(self.request.id) == 1:
        raise Reject("as asked", requeue=then == "requeue")
    return {"retries": self.request.retries, "token": current_lease().token != ""}


declare(app, _work)
paced.declare(app, NAME)


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", lock_hold_for=1.0)
def holding_for(self: Task, key: str, then: str = "return") -> int:
    occupy(self, key, 0.05)
    if then == "retry" and not self.request.retries:
        raise self.retry(countdown=0)
    return int(self.request.retries)


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", autoretry_for=(KeyError,),
          retry_kwargs={"max_retries": 3, "countdown": PAUSE})  # fmt: skip
def autoretry(self: Task, key: str, seconds: float = 0.02) -> int:
    occupy(self, key, min(seconds, 0.05) if self.request.retries else seconds)
    if self.request.retries < 2:
        raise KeyError(key)
    return self.request.retries


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", acks_late=True,
          reject_on_worker_lost=True)  # fmt: skip
def late(self: Task, key: str, seconds: float, then: str = "return") -> int:
    """The first delivery takes `seconds`, and ends as asked; another is short, and returns."""
    first = runs_of(self.request.id) == 0
    occupy(self, key, seconds if first else 0.05)
    if first and then in ("reject", "requeue"):  # of no effect without acks_late
        raise Reject("as asked", requeue=then == "requeue")
    return runs_of(self.request.id)


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", acks_late=True)
def long(self: Task, key: str, seconds: float) -> int:
    occupy(self, key, seconds)
    return 1


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", acks_late=True, ignore_result=True)
def long_ignored(self: Task, key: str, seconds: float) -> None:
    """Ignore the result: only the mark on the nodes shows that the task is done."""
    occupy(self, key, seconds)


def _until_told(policy: str) -> Any:
    def body(self: Task, key: str) -> int:
        """Occupy the first delivery until the test ends it; later ones are short."""
        first = runs_of(self.request.id) == 0
        occupy(self, key, 60.0 if first else 0.05, until=told(key))
        return runs_of(self.request.id)

    return app.task(base=SingletonTask, bind=True, name=f"{NAME}.until_told_{policy}",
                    lock_key="k:{key}", acks_late=True, reject_on_worker_lost=True,
                    lock_on_conflict=policy)(body)  # fmt: skip


until_told_retry = _until_told("retry")
until_told_skip = _until_told("skip")


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", retry_on_worker_lost=True,
          default_retry_delay=max(PAUSE, 0.2))  # fmt: skip
def lost_retry(self: Task, key: str) -> int:
    """Use an option of Celery 5.7; an older Celery ignores it."""
    occupy(self, key, 0.05 if runs_of(self.request.id) else 30.0)
    return runs_of(self.request.id)


@app.task(rate_limit="1/m")
def once_a_minute() -> None: ...


@app.task
def left(key: str) -> dict[str, Any]:
    """Return what an earlier task left on the nodes, as the next task of this process finds it."""
    at, held = time.monotonic(), 0
    for url in app.conf.redlock_nodes:
        with redis.Redis(port=urlsplit(url).port) as client:  # not as the user of the locks
            held += bool(client.exists(f"redlock:k:{key}"))
    return {"at": at, "pid": os.getpid(), "held": held}


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}")
def soft(self: Task, key: str, seconds: float, after: float) -> str:
    """Catch the soft time limit and go on for `after` seconds."""
    try:
        occupy(self, key, seconds)
    except SoftTimeLimitExceeded:
        occupy(self, key, after)
        return "caught"
    return "not limited"


@app.task(base=SingletonTask, bind=True, lock_key=("k:{key}", "k:{other}"),
          lock_retry_backoff=0.2, lock_retry_backoff_max=0.4)  # fmt: skip
def move(self: Task, key: str, other: str, seconds: float = 0.02) -> str:
    """Run under two keys."""
    run = uuid.uuid4().hex[:8]
    note("enter", f"k:{other}", self.request.id, run)
    occupy(self, key, seconds)
    note("exit", f"k:{other}", self.request.id, run)
    return current_lease().resource


@app.task(base=SingletonTask, bind=True, lock_key="crowd:{key}", lock_limit=2,
          lock_retry_backoff=0.2, lock_retry_backoff_max=0.4)  # fmt: skip
def crowd(self: Task, key: str, seconds: float = 0.2) -> str:
    """Run, two at a time."""
    note("in", key, self.request.id)
    time.sleep(seconds)
    note("out", key, self.request.id)
    return current_lease().resource


@app.task(base=SingletonTask, bind=True, lock_key=("tenant:{key}-{tenant}", "crowd:{key}"),
          lock_limit=lambda tenant, many, **_: (many, 2),
          lock_retry_backoff=0.2, lock_retry_backoff_max=0.4)  # fmt: skip
def tenants(self: Task, key: str, tenant: str, many: int = 1, seconds: float = 0.1) -> str:
    """Run at most so many at a time for a tenant, by a function, and two for all tenants."""
    for name in (key, f"{key}-{tenant}"):
        note("in", name, self.request.id)
    time.sleep(seconds)
    for name in (key, f"{key}-{tenant}"):
        note("out", name, self.request.id)
    return current_lease().resource


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}")
def stubborn(self: Task, key: str, seconds: float, after: float) -> None:
    """Go on for `after` seconds after a request to exit."""
    run = uuid.uuid4().hex[:8]
    note("enter", f"k:{key}", self.request.id, run)
    end = time.monotonic() + seconds
    while True:
        try:  # around the condition as well: the signal may come as that is looked at
            while time.monotonic() < end:
                note("alive", f"k:{key}", self.request.id, run)
                time.sleep(0.005)
            break
        except SystemExit:
            end = time.monotonic() + after
    note("exit", f"k:{key}", self.request.id, run)


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}")
def tidy(self: Task, key: str, seconds: float, after: float) -> None:
    """Tidy up for `after` seconds after a request to exit."""
    run = uuid.uuid4().hex[:8]
    note("enter", f"k:{key}", self.request.id, run)
    try:
        time.sleep(seconds)
    finally:
        time.sleep(after)
        note("exit", f"k:{key}", self.request.id, run)


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", lock_wait=30.0)
def patient(self: Task, key: str, seconds: float = 0.05) -> str:
    occupy(self, key, seconds)
    return "done"


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", lock_fencing=True)
def fenced(self: Task, key: str) -> int | None:
    """Go on until the test ends it."""
    occupy(self, key, 60.0, until=told(key))
    return current_lease().fencing_token


def _conflict(policy: str, **options: Any) -> Any:
    def body(self: Task, key: str, seconds: float = 0.02) -> dict[str, Any]:
        note("attempts", f"k:{key}", self.request.id, self.request.get("redlock_attempts"))
        occupy(self, key, seconds)
        return {"retries": self.request.retries, "id": self.request.id}

    return app.task(base=SingletonTask, bind=True, name=f"{NAME}.{policy}", lock_key="k:{key}",
                    lock_wait=0.05, lock_retry_backoff=0.2, lock_retry_backoff_max=0.4,
                    max_retries=0, **options)(body)  # fmt: skip


conflict_retry = _conflict("conflict_retry")
conflict_skip = _conflict("conflict_skip", lock_on_conflict="skip")
conflict_raise = _conflict("conflict_raise", lock_on_conflict="raise")
conflict_deadline = _conflict("conflict_deadline", lock_retry_deadline=0.6)


@app.task
@locked("k:<key>")
def compensate(request: Any, exc: BaseException, traceback: Any, key: str) -> None:
    """An error callback."""
    occupy(SimpleNamespace(request=request), key, 0.02)
    note("compensated", f"k:{key}", request.id, [request.task, type(exc).__name__, request.args])


@app.task
def total(results: Any) -> None: ...


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", lock_wait=0.05,
          lock_retry_backoff=0.1)  # fmt: skip
def slow_to_say(self: Task, key: str) -> None:
    """Fail, in a process that waits for the test once it has sent a message again."""
    raise ValueError("as asked")


@after_task_publish.connect(sender=slow_to_say.name)
def _dawdle(body: Any = None, **_signal: Any) -> None:
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline and not os.path.exists(told(body[0][0])):
        time.sleep(0.01)


def _policy(policy: str, name: str, **options: Any) -> Any:
    def body(self: Task, key: str, seconds: float = 0.05) -> str:
        occupy(self, key, seconds, until=told(key))
        return "ran"

    return app.task(base=SingletonTask, bind=True, name=f"{NAME}.policy_{name}", acks_late=True,
                    lock_key="k:{key}", lock_on_conflict=policy, **options)(body)  # fmt: skip


for _given in ("wait", "reject", "replace"):
    _policy(_given, _given, lock_ttl=8.0)
_policy("replace", "replace_skip", lock_wait=0.5, lock_on_deadline="skip")


unavailable_raise = _conflict("unavailable_raise", lock_on_unavailable="raise")
unavailable_run = _conflict("unavailable_run", lock_on_unavailable="run")


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", lock_ttl=1.0)
def short_ttl(self: Task, key: str, seconds: float, kind: str = "sleep") -> float:
    occupy(self, key, seconds, kind)
    return current_lease().remaining()


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", lock_ttl=1.5)
def strained(self: Task, key: str, seconds: float, kind: str) -> float:
    occupy(self, key, seconds, kind)
    return current_lease().remaining()


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", lock_ttl=4.0)
def longer_ttl(self: Task, key: str, seconds: float, kind: str = "sleep") -> float:
    occupy(self, key, seconds, kind)
    return current_lease().remaining()


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", lock_ttl=9.0)
def nine_seconds_ttl(self: Task, key: str, seconds: float, kind: str) -> float:
    occupy(self, key, seconds, kind)
    return current_lease().remaining()


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", lock_ttl=1.0)
def nested(self: Task, key: str, seconds: float) -> None:
    with Redlock.from_app(app).lock(f"k:{key}:inner", ttl=1.0):
        occupy(self, key, seconds)


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", lock_ttl=1.0, lock_on_lost="log")
def lost_log(self: Task, key: str, seconds: float, kind: str = "sleep") -> bool:
    occupy(self, key, seconds, kind)
    return current_lease().lost


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", lock_ttl=1.0)
def punctual(self: Task, key: str, seconds: float, kind: str) -> list[Any]:
    """Return why it was interrupted, how long after the deadline, and if the lease agrees."""
    try:
        occupy(self, key, seconds, kind)
    except LeaseLost:
        lease = current_lease()
        return [lease.loss().reason, monotonic() - lease.lease.deadline, lease.lost]
    return ["not told", 0.0, False]


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}")
def in_a_thread(self: Task, key: str) -> list[str]:
    """Return what a thread or greenlet of the body can do with the body's lock."""
    found: list[str] = []

    def other() -> None:
        for attempt in (current_lease, Redlock.from_app(app).lock(f"k:{key}").__enter__):
            try:
                attempt()
            except ResourceHeld:
                found.append("ResourceHeld")
            except RedlockError as error:
                found.append(str(error).split(":")[0])

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    return found


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}")
def named(self: Task, key: str, seconds: float) -> list[str]:
    """Return the names of the current lease, read often while others have leases."""
    names = set()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        names.add(current_lease().resource)
        time.sleep(0.005)
    return sorted(names)


def tell(lease: Any) -> None:
    note("told", lease.resource, "", lease.lost)


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", lock_ttl=1.0, lock_on_lost=tell)
def lost_told(self: Task, key: str, seconds: float) -> bool:
    occupy(self, key, seconds)
    return current_lease().lost


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", lock_ttl=1.0, lock_max_lifetime=0.5)
def hangs(self: Task, key: str, seconds: float) -> None:
    occupy(self, key, seconds)


def is_silent(lease: Any) -> None:
    note("silent", lease.resource, "", [lease.stalled, lease.lost])


SILENCE = {"bind": True, "lock_key": "k:{key}", "lock_ttl": 2.0, "lock_progress_timeout": 1.0}


@app.task(base=SingletonTask, **SILENCE)
def silent(self: Task, key: str, seconds: float, kind: str = "sleep") -> None:
    occupy(self, key, seconds, kind)


@app.task(base=SingletonTask, **SILENCE)
def deaf(self: Task, key: str, seconds: float) -> list[bool]:
    """Go on for so long after an interruption."""
    told = False
    try:
        occupy(self, key, 20.0)
    except LeaseLost:
        told = current_lease().stalled
        occupy(self, key, seconds)
    return [told, current_lease().lost]


@app.task(base=SingletonTask, **SILENCE, lock_on_lost="log")
def silence_logged(self: Task, key: str, seconds: float) -> bool:
    occupy(self, key, seconds)
    return current_lease().lost


@app.task(base=SingletonTask, **SILENCE, lock_on_lost=is_silent)
def silence_told(self: Task, key: str, seconds: float) -> bool:
    occupy(self, key, seconds)
    return current_lease().lost


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", lock_progress_timeout=2.0)
def reporting(self: Task, key: str, seconds: float) -> bool:
    """A body that reports from inside of another block."""
    note("enter", f"k:{key}", self.request.id, "reports")
    end = time.monotonic() + seconds
    with Redlock.from_app(app).lock(f"in:{key}"):
        while time.monotonic() < end:
            current_lease().progress()
            note("alive", f"k:{key}", self.request.id, "reports")
            time.sleep(0.05)
    note("exit", f"k:{key}", self.request.id, "reports")
    return current_lease().stalled


@app.task(bind=True)
@locked("k:<key>")
def under(self: Task, key: str, seconds: float = 0.02) -> str:
    occupy(self, key, seconds)
    return current_lease().resource


@locked("k:<key>")
@app.task(bind=True)
def over(self: Task, key: str, seconds: float = 0.02) -> str:
    occupy(self, key, seconds)
    return current_lease().resource


@shared_task(bind=True)
@locked("k:<key>")
def shared_under(self: Task, key: str, seconds: float = 0.02) -> str:
    occupy(self, key, seconds)
    return current_lease().resource


@locked("k:<key>")
@shared_task(bind=True)
def shared_over(self: Task, key: str, seconds: float = 0.02) -> str:
    occupy(self, key, seconds)
    return current_lease().resource


class ByClass(SingletonTask):
    name = f"{NAME}.by_class"
    lock_key = "k:{key}"

    def run(self, key: str, seconds: float = 0.02) -> str:
        occupy(self, key, seconds)
        return current_lease().resource


app.register_task(ByClass())


@app.task(base=SingletonTask)
def add(x: int, y: int = 0) -> int:
    """Key: its name and all its arguments."""
    return x + y


@app.task(base=SingletonTask, bind=True, lock_key="k:{key}", rate_limit="100/s")
def limited(self: Task, key: str, seconds: float = 0.02) -> None:
    occupy(self, key, seconds)


class SlowAfterRetry(SingletonTask):
    """A task whose `on_retry` keeps the first try, and its lock, alive after the second is sent."""

    name = f"{NAME}.slow_after_retry"
    lock_key = "k:{key}"
    lock_wait = 0.05

    def run(self, key: str) -> int:
        occupy(self, key, 0.02)
        if not self.request.retries:
            raise self.retry(countdown=0)
        return self.request.retries

    def on_retry(self, *args: Any) -> None:
        time.sleep(0.8)


app.register_task(SlowAfterRetry())


class Link(SingletonTask):
    """A chain link that is still there, lock and all, for a while after it published the next."""

    name = f"{NAME}.link"
    lock_key = "k:{key}"
    lock_wait = 0.05

    def run(self, key: str) -> str:
        occupy(self, key, 0.02)
        return key

    def on_success(self, *args: Any) -> None:
        time.sleep(0.5)


app.register_task(Link())


@app.task
def nodes() -> list[str]:
    """Where this worker's locks are."""
    return list(Redlock.from_app(app).nodes)


@app.task
@locked("k:<key>")
def factorial(key: str, n: int) -> int:
    """Calls itself: the lock of its delivery is shared."""
    return 1 if n <= 1 else n * factorial(key, n - 1)


try:
    from pydantic import BaseModel
except ImportError:  # a row of the matrix may do without
    pass
else:

    class Order(BaseModel):
        id: int
        lines: list[str] = []

    def typed(function: Callable[..., Any]) -> Callable[..., Any]:
        """Celery 5.5 sees no model in an annotation that is a string."""
        function.__annotations__ = get_type_hints(function)
        return function

    @app.task(base=SingletonTask, pydantic=True, bind=True)
    @typed
    def hold_model(self: Task, order: Order) -> None:
        note("here", current_lease().resource, self.request.id)
        time.sleep(30.0)
