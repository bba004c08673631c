"""Every way a task ends, as data: the tests play each, and `make endings` prints what it measured.

In the order of the table in docs/endings.md.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.promises.worker import redelivery, unstarted
from tests.promises.worker.ending import (
    BODY,
    KEEPER,
    MAIN,
    TTL,
    VERSION,
    Ending,
    Stage,
    begin_again,
)
from tests.support.wait import died

__all__ = ["ENDINGS", "POOLS", "params", "played_on"]

POOLS = unstarted.POOLS
ONE_PROCESS = unstarted.ONE_PROCESS
DEATH = (MAIN, KEEPER)
"""Processes that may release the lock of a dead pool child."""
LONG = 30.0
"""Seconds that a body lasts which does not come to its end by itself."""


# -- what is done to a body --------------------------------------------------------------------


def kill_child(stage: Stage) -> None:
    os.kill(stage.run.pid, signal.SIGKILL)


def revoke(name: str) -> Callable[[Stage], None]:
    def act(stage: Stage) -> None:
        stage.cluster.app.control.revoke(stage.sent.id, terminate=True, signal=name)

    return act


def revoke_stubborn(stage: Stage) -> None:
    revoke("SIGTERM")(stage)
    stage.contender.has_it()
    pid = stage.run.pid
    os.kill(pid, signal.SIGKILL)  # else billiard calls its next task, if killed, terminated
    died(pid)


def warm(stage: Stage) -> None:
    stage.worker.terminate()
    stage.worker.said("Warm shutdown")
    assert stage.worker.ended() == 0


def cold(stage: Stage) -> None:
    stage.worker.process.send_signal(signal.SIGQUIT)
    stage.worker.ended()


def cold_then_another(stage: Stage) -> None:
    """The message of a task with late acknowledgement is back in the queue: another takes it."""
    cold(stage)
    stage.contender.has_it()
    assert stage.cluster.client.llen("celery") == 1
    with begin_again(stage):
        stage.cluster.result(stage.sent)
        stage.cluster.settled()


def soft(stage: Stage) -> None:
    stage.worker.process.send_signal(signal.SIGQUIT)
    stage.worker.said("Initiating Soft Shutdown")
    stage.worker.ended()


def group(stage: Stage) -> None:
    os.killpg(stage.worker.process.pid, signal.SIGTERM)
    stage.worker.ended()


def kill_main(stage: Stage) -> None:
    os.kill(stage.worker.process.pid, signal.SIGKILL)
    stage.worker.ended()
    died(stage.run.pid, 1.0)  # its children die with it


def exits(stage: Stage) -> None:
    assert stage.worker.ended() == 1


def next_child(stage: Stage) -> None:
    """The child ends after its one task, and another takes the next."""
    first = stage.cluster.result(stage.sent) and stage.run.pid
    stage.cluster.result(stage.cluster.send("work", stage.key))
    assert stage.cluster.runs(stage.key)[-1].pid != first


def as_it_takes_it(newest: str, older: str, since: tuple[int, int]) -> str:
    return newest if since <= VERSION else older


# Billiard 4.3 reports a SystemExit itself, which a Celery before 5.7 cannot write as a result.
EXITED = as_it_takes_it("FAILURE", "PENDING", (5, 7))

# Acknowledged when the body has ended, whatever is configured: solo, and greenlets before 5.7.
LATE = ("solo",) if VERSION >= (5, 7) else ("solo", "gevent")

# A warm shutdown of Celery 5.4 leaves a greenlet's message unacknowledged, though it succeeded.

ENDINGS = (
    # -- Python survives: the process of the body frees the lock ---------------------------------
    Ending("returns", args=(0.4,), pools=POOLS),
    Ending("raises", args=(0.4, "raise"), state="FAILURE", pools=POOLS),
    Ending("`self.retry()`, three times", args=(0.4, "retry"), runs=4, pools=POOLS,
           seldom=ONE_PROCESS),
    Ending("`self.retry(countdown=0)`, three times", args=(0.4, "retry at once"), runs=4,
           pools=POOLS),
    Ending("`autoretry_for`, twice", "autoretry", args=(0.4,), runs=3, pools=POOLS,
           seldom=ONE_PROCESS),
    Ending("its retries are exhausted", args=(0.4, "retry forever"), state="FAILURE", runs=4,
           pools=POOLS, seldom=ONE_PROCESS),
    Ending("`Ignore`", args=(0.4, "ignore"), state="PENDING", pools=POOLS, seldom=ONE_PROCESS),
    Ending("`Reject`, late ack", "late", args=(0.4, "reject"), pools=POOLS, seldom=ONE_PROCESS,
           state=as_it_takes_it("FAILURE", "PENDING", (5, 7))),
    Ending("`Reject(requeue=True)`, late ack", "late", args=(0.4, "requeue"), runs=2, pools=POOLS),
    Ending("soft time limit", args=(LONG,), options={"soft_time_limit": 0.4}, state="FAILURE"),
    Ending("soft time limit, caught", "soft", args=(LONG, 0.5),
           options={"soft_time_limit": 0.4}, runs=2),
    # -- the pool child dies: the main process frees the lock ------------------------------------
    Ending("hard time limit", args=(LONG,), options={"time_limit": 0.6}, state="FAILURE",
           by=(BODY, *DEATH), pools=("prefork", "gevent")),
    Ending("hard time limit, body does not listen to SIGTERM", "stubborn", args=(LONG, LONG),
           options={"time_limit": 0.6}, state="FAILURE", by=DEATH),
    Ending("`revoke(terminate=True)`, SIGTERM", args=(LONG,), act=revoke("SIGTERM"),
           state="REVOKED"),
    Ending("the same, body goes on for 1 s", "stubborn", args=(LONG, 1.0), act=revoke_stubborn),
    Ending("the same, body tidies up for 1 s", "tidy", args=(LONG, 1.0), act=revoke("SIGTERM"),
           state="REVOKED"),
    Ending("`revoke(terminate=True)`, SIGKILL", args=(LONG,), act=revoke("SIGKILL"),
           state="REVOKED", by=DEATH),
    Ending("`kill -9` of the child", args=(LONG,), act=kill_child, state="FAILURE", by=DEATH),
    Ending("the child is killed from within, as by the OOM killer", args=(0.4, "SIGKILL"),
           state="FAILURE", by=DEATH, seldom=("prefork",)),
    Ending("segmentation fault", args=(0.4, "SIGSEGV"), state="FAILURE", by=DEATH,
           seldom=("prefork",)),
    Ending("`os._exit()`", args=(0.4, "_exit"), state="FAILURE", by=DEATH,
           seldom=("prefork",)),
    Ending("`kill -9`, late ack, `reject_on_worker_lost`", "late", args=(LONG,), act=kill_child,
           runs=2, by=DEATH),
    Ending("`kill -9`, `retry_on_worker_lost`", "lost_retry", act=kill_child, runs=2, by=DEATH,
           since=(5, 7)),
    Ending("`SystemExit`", args=(0.4, "SystemExit"), state=EXITED),
    Ending("`KeyboardInterrupt`", args=(0.4, "KeyboardInterrupt"), state=EXITED),
    # -- the worker ends -------------------------------------------------------------------------
    Ending("`MemoryError` (Celery ends the worker)", args=(0.4, "MemoryError"), act=exits,
           state="FAILURE", worker={}, seldom=("prefork",)),
    Ending("warm shutdown, body of 3 x ttl", "short_ttl", args=(3.0,), act=warm, worker={},
           pools=POOLS if VERSION >= (5, 5) else POOLS[:3], seldom=ONE_PROCESS),
    Ending("soft shutdown, body of 2 x ttl ends in time", "short_ttl", args=(2.0,), act=soft,
           worker={"worker_soft_shutdown_timeout": 4.0}, since=(5, 5), seldom=("prefork",)),
    Ending("soft shutdown of 2 x ttl, body too long", "short_ttl", args=(LONG,), act=soft,
           state="RETRY", worker={"worker_soft_shutdown_timeout": 2.0}, since=(5, 5)),
    Ending("cold shutdown, early ack", args=(LONG,), act=cold, worker={}, by=(BODY, *DEATH),
           state=as_it_takes_it("RETRY", "PENDING or FAILURE", (5, 5))),
    Ending("cold shutdown, early ack (Celery fails at it, and ends)", args=(LONG,), act=cold,
           state="PENDING or RETRY", worker={}, pools=("gevent",), since=(5, 5),
           seldom=("gevent",)),
    Ending("cold shutdown, early ack (Celery fails in the body)", args=(LONG,), act=cold,
           state="FAILURE", worker={}, pools=("solo",), since=(5, 7),
           seldom=("solo",)),
    Ending("cold shutdown, late ack", "late", args=(LONG,), act=cold_then_another, runs=2,
           worker={}),
    # The main process frees what a child leaves that a second signal has struck in its release.
    Ending("SIGTERM to the whole group", args=(LONG,), act=group, by=(BODY, MAIN), worker={},
           state=as_it_takes_it("FAILURE", "PENDING or FAILURE", (5, 7))),
    Ending("`kill -9` of the main process", "short_ttl", args=(LONG,), act=kill_main,
           state="PENDING", by=(TTL, KEEPER), within=1.5, worker={}, pools=POOLS,
           seldom=ONE_PROCESS, unacknowledged=LATE),
    Ending('the same, with `redlock_keeper="process"`', "work", args=(LONG,), act=kill_main,
           state="PENDING", by=(KEEPER,), worker={"redlock_keeper": "process"}, pools=POOLS,
           seldom=ONE_PROCESS, unacknowledged=LATE),
    Ending("`max_tasks_per_child=1`", args=(0.4,), act=next_child,
           worker={"worker_max_tasks_per_child": 1}),
    Ending("`max_memory_per_child=1`", args=(0.4,), act=next_child,
           worker={"worker_max_memory_per_child": 1}, seldom=("prefork",)),
    *redelivery.ENDINGS,
    *unstarted.ENDINGS,
)  # fmt: skip


def played_on(pool: str, own: bool) -> list[Ending]:
    """Return the endings that this Celery can play on a pool, with a worker of their own or not."""
    found = [ending for ending in ENDINGS if pool in ending.pools and ending.since <= VERSION]
    return [ending for ending in found if (ending.worker is not None) == own]


def params(pool: str, own: bool) -> list[Any]:
    """The same as parameters of a test; see `Ending.seldom`."""
    return [
        pytest.param(ending, marks=[pytest.mark.slow] if pool in ending.seldom else [])
        for ending in played_on(pool, own)
    ]
