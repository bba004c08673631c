"""The app that the campaign's workers run. The message chooses the acts of a body.

Bodies keep their own account (`journal.py`). With TEST_MUTANT, a bug is planted into the library
(`mutants.py`) before anything else: only here, and never without being asked.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import signal
import sys
import time
import uuid
from datetime import datetime
from typing import Any

from celery import Celery, Task, bootsteps
from celery.backends.base import Backend
from celery.exceptions import SoftTimeLimitExceeded
from celery.signals import (
    before_task_publish,
    task_postrun,
    task_prerun,
    task_received,
    worker_shutting_down,
)
from celery.worker import WorkController
from celery.worker.consumer import Tasks
from celery.worker.control import inspect_command
from celery.worker.state import active_requests, reserved_requests
from kombu.message import Message

from celery_redlock import SingletonTask, current_lease
from celery_redlock.keepalive import sidecar
from celery_redlock.protocol.errors import LeaseLost
from tests.campaign.worker import tracing
from tests.campaign.worker.journal import Pen, now, short
from tests.campaign.worker.register import Register

NAME = "tests.campaign.worker.project"
PULSE = 0.02
"""Seconds between two signs of life."""
GREEN = "gevent" in sys.argv
STUCK = 15.0
"""Seconds after which a worker that stops is about to be killed: it writes down where it stands."""
PRODUCED = tuple(f"r{number}" for number in range(4))
"""Keys of the producers' tasks."""

app = Celery(NAME)
app.conf.update(json.loads(os.environ["TEST_CONF"]))
PAUSE = 1.0 if app.conf.get("task_default_queue_type") == "quorum" else 0.1
"""Seconds until a task tries again; RabbitMQ delays for whole ones."""
register = Register(os.environ["TEST_JOURNAL"])
pen = Pen(os.environ["TEST_JOURNAL"], os.environ["TEST_WORKER"])

if os.environ.get("TEST_MUTANT"):
    from tests.campaign.worker import mutants

    mutants.plant(os.environ["TEST_MUTANT"])

tracing.install()
# The extender process writes a trace as well.
sidecar.START = sidecar.START.replace(
    "; from", "; from tests.campaign.worker import tracing; tracing.install(); from", 1
)

# A worker must not outlive a campaign that is killed.
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


class Account:
    """The lines of a run of a body."""

    def __init__(self, task: Task, resource: str, *, shared: bool) -> None:
        self.shared = shared
        self.held = current_lease()
        self.task = task.request.id
        self.retries = task.request.retries
        self.resource = resource
        self.run = uuid.uuid4().hex[:10]
        self.token = short(self.held.token)
        self.closed = False

    def change(self) -> None:
        """Write to the locked register, and note if it was accepted."""
        fence = self.held.fencing_token
        if fence is not None:
            self.note("wrote", register.write(self.resource, fence))

    def note(self, kind: str, accepted: bool | None = None) -> None:
        """Write a line with the lease as the library reports it at this moment."""
        # In this order: "held" later than the deadlines before and after it is a lie.
        before = self.held.lease.deadline
        at = now()
        held = not self.held.lost
        lease = self.held.lease
        valid = max(before, lease.deadline)
        more = self.retries if accepted is None else accepted
        fields = (self.run, self.resource, self.token, lease.fencing_token, round(valid, 6), held)
        pen.write(kind, self.task, *fields, more, self.shared, at=at)

    def close(self) -> None:
        """Write the end of the body, whatever interrupts it in here."""
        struck: BaseException | None = None
        while not self.closed:
            try:
                self.change()
                self.note("exit")
                self.closed = True
            except BaseException as error:
                struck = error
        if struck is not None:
            raise struck


def live(account: Account, seconds: float, manner: str = "sleep") -> None:
    """Work, with signs of life."""
    end = time.monotonic() + seconds
    if manner == "gil":  # a C call that holds the interpreter: no thread runs meanwhile
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    account.change()
    beats = 0
    while (left := end - time.monotonic()) > 0:
        account.note("alive")
        beats += 1
        if beats % 10 == 0:
            account.change()
        if manner == "loop":
            for _ in range(200_000):
                pass
        else:
            time.sleep(min(left, PULSE))


def occupy(task: Task, resource: str, seconds: float, manner: str, *, shared: bool = False) -> int:
    """Run a body.

    Args:
        task: The task that runs.
        resource: What it has locked.
        seconds: How long it works.
        manner: "sleep", "loop", "gil"; "stubborn": goes on for a while after a request to exit;
            "raise", "retry": how it ends; "_exit": so does its process.
        shared: It only reads.
    """
    if manner == "_exit" and os.getpid() == pen.main:
        manner = "sleep"  # not a pool child: it would end the worker
    if manner in ("loop", "gil") and GREEN:
        manner = "sleep"  # it would stop all greenlets: nobody promises them anything
    account = Account(task, resource, shared=shared)
    account.note("enter")
    try:
        live(account, seconds, manner)
        if manner == "retry" and task.request.retries < 2:
            raise task.retry(countdown=PAUSE)  # the body waits for the broker
    except LeaseLost:
        account.note("told")
        raise
    except SystemExit:
        if manner == "stubborn":
            live(account, 0.6)
        raise
    except SoftTimeLimitExceeded:
        live(account, 0.2)
        raise
    finally:
        if manner == "_exit":
            os._exit(3)
        account.close()
    if manner == "raise":
        raise ValueError("as asked")
    return task.request.retries


def again(task: Task, manner: str) -> str:
    """Return how to end: a message delivered before ends no process, or would do so again."""
    return "sleep" if task.request.delivery_info.get("redelivered") else manner


@app.task(base=SingletonTask, bind=True, lock_key="{resource}", max_retries=3)
def early(self: Task, resource: str, seconds: float, manner: str = "sleep") -> int:
    """Run, acknowledged early (Celery's default): it may be lost with its process."""
    return occupy(self, resource, seconds, manner)


@app.task(base=SingletonTask, bind=True, lock_key="{resource}", max_retries=3, acks_late=True,
          reject_on_worker_lost=True)  # fmt: skip
def late(self: Task, resource: str, seconds: float, manner: str = "sleep") -> int:
    """Run, acknowledged late: it is never lost."""
    return occupy(self, resource, seconds, again(self, manner))


@app.task(base=SingletonTask, bind=True, lock_key="{resource}", lock_on_conflict="skip")
def skipping(self: Task, resource: str, seconds: float, manner: str = "sleep") -> int:
    """Run, unless another one runs."""
    return occupy(self, resource, seconds, manner)


if app.conf.redlock_nodes[0].startswith("redis:"):  # others refuse it when the worker starts

    @app.task(base=SingletonTask, bind=True, lock_key="{resource}", lock_shared=True,
              lock_fencing=False, max_retries=3, acks_late=True,
              reject_on_worker_lost=True)  # fmt: skip
    def reading(self: Task, resource: str, seconds: float, manner: str = "sleep") -> int:
        """Run beside others of its kind, and beside nothing else of that key."""
        return occupy(self, resource, seconds, again(self, manner), shared=True)


@app.task(base=SingletonTask, bind=True, lock_key="{resource}", lock_fencing=False, max_retries=3)
def writing(self: Task, resource: str, seconds: float, manner: str = "sleep") -> int:
    """Run as `early`, without a fencing token, for which nodes receive another request."""
    return occupy(self, resource, seconds, manner)


@app.task(base=SingletonTask, bind=True, lock_key="{resource}", lock_scope="until_executed",
          max_retries=3, acks_late=True)  # fmt: skip
def reserved(self: Task, resource: str, seconds: float) -> int:
    """Run, as a task of which one may be queued or at work."""
    return occupy(self, resource, seconds, "sleep")


@app.task
def probe() -> None:
    """Do nothing; it takes a slot for a moment."""


@app.task
def fill(seconds: float) -> None:
    """Take a slot for some seconds."""
    time.sleep(seconds)


@task_received.connect
def received(request: Any = None, **_signal: Any) -> None:
    pen.write("received", request.id, *_due(request.eta))


NOTHING = ("", "", "", None, 0.0, False)
"""The fields of a line between the task's id and `more`."""
DELAY = re.compile(r"^(?:[01]\.){28}")
"""Celery's prefix of the routing key of a message that RabbitMQ delays: seconds, in bits."""


def _due(eta: Any) -> tuple[Any, ...]:
    """Return the fields of a line that show when a message is due."""
    if eta is None:
        return ()
    eta = datetime.fromisoformat(eta) if isinstance(eta, str) else eta
    return *NOTHING, round(now() + eta.timestamp() - time.time(), 3)


def _noted(process_task: Any) -> Any:
    """A way into the pool, that is written down."""

    def noted(self: Any, request: Any) -> Any:
        pen.write("pooled", request.id)
        return process_task(self, request)

    return noted


for name in ("_process_task", "_process_task_sem"):
    setattr(WorkController, name, _noted(getattr(WorkController, name)))


def _returned(reject: Any) -> Any:
    """A way back into the queue, that is written down before another can receive it."""

    def returned(self: Message, requeue: bool = False) -> None:
        if requeue:
            pen.write("returned", str(self.headers.get("id", "")))
        reject(self, requeue=requeue)

    return returned


Message.reject = _returned(Message.reject)  # type: ignore[method-assign]


def _storing(store_result: Any) -> Any:
    """When Celery writes what became of a task: it may have to connect for that."""

    def storing(self: Any, task_id: str, *args: Any, **options: Any) -> Any:
        pen.write("storing", task_id)
        try:
            return store_result(self, task_id, *args, **options)
        finally:
            pen.write("stored", task_id)

    return storing


Backend.store_result = _storing(Backend.store_result)


class Connection(bootsteps.StartStopStep):
    """Writes when the worker begins to consume, and when it stops."""

    requires = (Tasks,)

    def start(self, consumer: Any) -> None:
        pen.write("connected", "")

    def stop(self, consumer: Any) -> None:
        pen.write("disconnected", "")


app.steps["consumer"].add(Connection)


@worker_shutting_down.connect
def stopping(**_signal: Any) -> None:
    pen.write("stopping", "")
    faulthandler.dump_traceback_later(STUCK)


@inspect_command(name="window")
def window(state: Any) -> dict[str, Any]:
    """Return the prefetch window: its value, that of the transport, and the slots of the pool.

    With the tasks that the worker counts as in hand, and those that kombu has not acknowledged.
    """
    consumer = state.consumer
    virtual = getattr(consumer.task_consumer.channel, "qos", None)
    return {
        "value": consumer.qos.value,
        "wire": getattr(virtual, "prefetch_count", -1),
        "most": getattr(consumer, "max_prefetch_count", 0),
        "reserved": [
            f"{one.id} ({'active' if one in active_requests else 'not active'},"
            f" of pid {one.worker_pid})"
            for one in tuple(reserved_requests)
        ],
        "filled": len(getattr(virtual, "_delivered", ())) - len(getattr(virtual, "_dirty", ())),
    }


@task_prerun.connect
def got(task_id: str = "", **_signal: Any) -> None:
    pen.write("got", task_id)


@task_postrun.connect
def done(task_id: str = "", **_signal: Any) -> None:
    pen.write("done", task_id)


@before_task_publish.connect
def sent(headers: Any = None, routing_key: Any = None, **_signal: Any) -> None:
    due = _due(headers.get("eta"))
    delay = DELAY.match(routing_key or "")
    if not due and delay:
        due = (*NOTHING, round(now() + int(delay[0].replace(".", ""), 2), 3))
    pen.write("sent", headers["id"], *due)
