"""What the demonstration's worker and beats run: one task, locked by order, and a periodic one.

The body of the first takes its time, and writes down when it enters and leaves; that of the other
writes down which beat sent it, and when. The checker believes nothing else.
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
    # The nodes have just been started, on purpose; else none would vote for the first 3 seconds.
    redlock_restart_guard="off",
    # A demonstration is in a hurry: retry after 0.3 to 2 seconds. The defaults are 1 to 60.
    redlock_wait=0.15,
    redlock_retry_backoff=0.3,
    redlock_retry_backoff_max=2.0,
    # The message of a child that is killed comes back: its charge is run again, not lost.
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    task_ignore_result=True,
    # Several beats, no leader: with `redlock_nodes` set, each tick is sent by one of them.
    beat_schedule={"tick": {"task": "tick", "schedule": INTERVAL}},
    result_expires=None,  # no other entry
    task_routes={"tick": {"queue": "ticks"}},  # not behind all the charges
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
        current_lease().ensure()  # what every body should ask before it writes
    except BaseException as error:
        journal.write("failed", error=repr(error), **facts)
        raise
    journal.write("exit", **facts)


@app.task(name="tick", bind=True)
def tick(self: Any) -> None:
    """The periodic job. It takes no lock: two messages of one tick would both run, and be seen."""
    journal.write("tick", task=self.request.id, **self.request.get("demo"))


@signals.before_task_publish.connect(sender="tick")
def mark(headers: Any = None, **_signal: Any) -> None:
    """Write into the message when it was sent, and by which beat."""
    headers["demo"] = {"sent": time.monotonic(), "beat": int(os.environ["DEMO_BEAT"])}


class Refused(Listener):
    """Notices in a pool child that a charge was refused its lock, and so waits for it."""

    def held(self, resource: str, holder: object) -> None:
        """Write it down."""
        request = charge.request
        if request.id and request.args:
            journal.write("wait", order=request.args[0], task=request.id)


subscribe(Refused())


@signals.task_retry.connect
def put_off(request: Any = None, reason: Any = None, **_signal: Any) -> None:
    """The lock was not granted in time, and the charge has been sent again, for later."""
    why = "no quorum" if isinstance(reason.exc, QuorumUnavailable) else "held"
    journal.write("away", order=request.args[0], task=request.id, why=why)


@signals.beat_init.connect
@signals.worker_init.connect
def follow(**_signal: Any) -> None:
    """Die with the demonstration: its end of our stdin closes, however it ends."""

    def until_it_ends() -> None:
        # Not sys.stdin: a child forked meanwhile would never get its lock, which is taken here.
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=until_it_ends, daemon=True).start()


@signals.worker_ready.connect
@signals.beat_init.connect
def ready(**_signal: Any) -> None:
    """Tell the demonstration."""
    if beat := os.environ.get("DEMO_BEAT"):
        journal.write("beat", beat=int(beat), up=True)
    else:
        journal.write("ready")
