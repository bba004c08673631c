"""The app of the demonstration's worker and beats: one task, locked by order, and a periodic one.

The body of the first takes some time, and records when it enters and leaves; the body of the other
records which beat sent it, and when. The checker relies on nothing else.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from celery import Celery, signals

from celery_redlock import QuorumUnavailable, current_lease, locked
from celery_redlock.demo.journal import INTERVAL, Journal
from celery_redlock.events import Listener, subscribe

app = Celery("demo", broker=os.environ["DEMO_BROKER"])
app.conf.update(
    redlock_nodes=os.environ["DEMO_NODES"].split(),
    redlock_enabled=os.environ["DEMO_LOCKS"] == "yes",
    redlock_ttl=3.0,
    # The nodes were just started, on purpose; with the guard none would vote for the first 3 s.
    redlock_restart_guard="off",
    # A demonstration is in a hurry: retry after 0.3 to 2 seconds. The defaults are 1 to 60.
    redlock_wait=0.15,
    redlock_retry_backoff=0.3,
    redlock_retry_backoff_max=2.0,
    # The message of a killed child is delivered again: its charge is run again, not lost.
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    task_ignore_result=True,
    # Several beats, no leader: with `redlock_nodes` set, each tick is sent by one of them.
    beat_schedule={"tick": {"task": "tick", "schedule": INTERVAL}},
    result_expires=None,  # without it Celery would add an entry for a clean-up task
    task_routes={"tick": {"queue": "ticks"}},  # so that ticks do not wait behind all charges
)
journal = Journal(os.environ["DEMO_JOURNAL"])


@app.task(name="charge", bind=True)
@locked("order:<order>")
def charge(self: Any, order: int, seconds: float) -> None:
    """Charge an order, which takes `seconds`; never two at a time for the same order."""
    facts = {"order": order, "task": self.request.id}
    journal.write("enter", seconds=seconds, **facts)
    try:
        time.sleep(seconds)
        current_lease().ensure()  # as every body should do before it writes
    except BaseException as error:
        journal.write("failed", error=repr(error), **facts)
        raise
    journal.write("exit", **facts)


@app.task(name="tick", bind=True)
def tick(self: Any) -> None:
    """Run the periodic job. It takes no lock, so that both messages of one tick would show."""
    journal.write("tick", task=self.request.id, **self.request.get("demo"))


@signals.before_task_publish.connect(sender="tick")
def mark(headers: Any = None, **_signal: Any) -> None:
    """Write the time of sending and the beat into the message."""
    headers["demo"] = {"sent": time.monotonic(), "beat": int(os.environ["DEMO_BEAT"])}


class Refused(Listener):
    """Listener in a pool child for charges that are refused their lock, and so wait for it."""

    def held(self, resource: str, holder: object) -> None:
        """Record the charge that waits."""
        request = charge.request
        if request.id and request.args:
            journal.write("wait", order=request.args[0], task=request.id)


subscribe(Refused())


@signals.task_retry.connect
def put_off(request: Any = None, reason: Any = None, **_signal: Any) -> None:
    """Record that the lock was not granted in time, and the charge was sent again, for later."""
    why = "no quorum" if isinstance(reason.exc, QuorumUnavailable) else "held"
    journal.write("away", order=request.args[0], task=request.id, why=why)


@signals.beat_init.connect
@signals.worker_init.connect
def follow(**_signal: Any) -> None:
    """Exit together with the demonstration: the pipe to our stdin closes however it ends."""

    def until_it_ends() -> None:
        # Not sys.stdin: this thread takes its lock, which a child forked meanwhile could never get.
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=until_it_ends, daemon=True).start()


@signals.worker_ready.connect
@signals.beat_init.connect
def ready(**_signal: Any) -> None:
    """Report that this process is ready."""
    if beat := os.environ.get("DEMO_BEAT"):
        journal.write("beat", beat=int(beat), up=True)
    else:
        journal.write("ready")
