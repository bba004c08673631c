"""No work is lost by a reservation: it ends before its message, never the other way round."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import states
from celery.result import AsyncResult

from celery_redlock import Skipped
from tests.promises.worker.reserving import Reservations
from tests.support.cluster import Cluster
from tests.support.wait import died, wait_until
from tests.support.worker import ROOT, Worker, pool

POOLS = [
    pool("prefork"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("threads", "solo")),
    pool("gevent"),
]
"""The main process receives a revoke in the same way in all of them, except beside greenlets."""


def by_another_process(cluster: Cluster, sent: Any) -> None:
    """A revoke of which this process does not know."""
    arguments = {"task_id": sent.id, "terminate": False, "signal": "TERM"}
    cluster.app.control.broadcast("revoke", arguments=arguments)


def say(cluster: Cluster, sent: Any, state: str) -> None:
    """Let the result of a task say this."""
    meta = {"task_id": sent.id, "status": state, "result": None, "traceback": None, "children": []}
    cluster.client.set(f"celery-task-meta-{sent.id}", json.dumps(meta))


# -- Revoked -------------------------------------------------------------------------------------


def test_call_after_a_revoke_runs_though_no_worker_saw_the_revoke(
    cluster: Cluster, reservations: Reservations, key: str
) -> None:
    task = reservations.until_executed
    first = task.apply_async((key,), queue=key)
    first.revoke()
    second = task.apply_async((key,), queue=key)
    with cluster.worker("-c", "2", queue=key):
        assert Skipped.of(cluster.result(second)) is None
        assert cluster.state(first) == "SUCCESS"
        assert [run.task for run in cluster.runs(key)] == [second.id]


@pytest.mark.parametrize("name", POOLS)
def test_worker_that_receives_a_revoke_frees_the_reservation(
    cluster: Cluster, reservations: Reservations, key: str, name: str
) -> None:
    task = reservations.until_executed
    with cluster.worker("-P", name, "-c", "2", queue=key) as worker:
        first = task.apply_async((f"{key}-id",), countdown=60, queue=key)
        stamped = task.s(f"{key}-stamp").set(countdown=60, queue=key).stamp(who=key)
        stamped.apply_async()
        wait_until(lambda: worker.text.count(" received") == 2, 10.0, "both are received")

        def heard() -> bool:  # a worker may be ready before it listens
            by_another_process(cluster, first)
            return f"Tasks flagged as revoked: {first.id}" in worker.text

        wait_until(heard, 10.0, "the worker knows what is revoked", every=0.1)
        reservations.freed(f"{key}-id", 2.0)
        assert reservations.of(f"{key}-stamp")
        cluster.app.control.revoke_by_stamped_headers({"who": [key]})
        reservations.freed(f"{key}-stamp", 3.0)


def test_canvas_member_runs_though_a_revoked_call_has_its_key(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    """It is published in any case, and checks the reservation when it is about to run."""
    task = reservations.until_executed
    first = task.apply_async((key,), countdown=60, queue=f"{key}-nobody")
    say(cluster, first, states.REVOKED)
    member = cluster.signature("until_executed", key)
    second = member.apply_async(root_id="r", parent_id="p")
    assert Skipped.of(cluster.result(second)) is None


@pytest.mark.parametrize(
    "scope", ["until_executed", "until_executing", "until_and_while_executing"]
)
def test_message_replaced_by_a_call_that_was_revoked_runs(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str, scope: str
) -> None:
    """Its reservation had ended, another call was published and then revoked: one of them runs."""
    task = reservations.tasks[scope]
    first = task.apply_async((key,), queue="parked")
    reservations.forget(key)
    second = task.apply_async((key,), countdown=60, queue=f"{key}-nobody")
    say(cluster, second, states.REVOKED)
    cluster.unpark()
    assert Skipped.of(cluster.result(first)) is None
    assert [run.task for run in cluster.runs(key)] == [first.id]


def test_terminated_task_gives_way_to_the_next_call_though_it_runs(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    task = reservations.until_executed
    first = task.apply_async((key, 30.0))
    cluster.entered(key)
    first.revoke(terminate=True)
    second = task.apply_async((key,))
    assert second.id != first.id
    assert Skipped.of(cluster.result(second, 15.0)) is None


# -- A message outlives its reservation ----------------------------------------------------------


@pytest.mark.parametrize("scope", ["until_executed", "until_executed_late", "until_executing"])
def test_message_outlives_its_reservation(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str, scope: str
) -> None:
    sent = reservations.tasks[scope].apply_async((key,), queue="parked", lock={"reserve_ttl": 0.3})
    reservations.freed(key)
    cluster.unpark()
    assert cluster.state(sent) == "SUCCESS"
    assert len(cluster.runs(key)) == 1


def test_message_that_comes_back_late_from_a_dead_worker_runs(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str
) -> None:
    """Redis returns it after its visibility timeout: as late as the reservation ends."""
    task = reservations.until_executed_late
    with cluster.worker("-c", "1", queue=key) as worker:
        sent = task.apply_async((key, 30.0), queue=key, lock={"reserve_ttl": 1.0})
        cluster.entered(key)
        worker.process.kill()
        died(worker.process.pid)
    reservations.forget(key, lock=True)  # a ttl later
    for tag, message in cluster.client.hgetall("unacked").items():
        body, _exchange, routing_key = json.loads(message)
        if routing_key == key:
            body["properties"]["delivery_info"]["redelivered"] = True
            body["args"] = None
            cluster.client.lpush("celery", json.dumps(body))
            cluster.client.hdel("unacked", tag)
    cluster.entered(key, 2)
    reservations.kept(key, sent)
    cluster.tell(key)


OF_ALL = (("prefork", "behind another"), ("threads", "with an ETA"), ("gevent", "parked"))
"""Cases of `make test`; `make test-all` has the others.

(A solo worker receives nothing meanwhile.)
"""


def held() -> Iterator[Any]:
    for name in ("prefork", "threads", "gevent"):
        for where in ("behind another", "parked", "with an ETA"):
            marks = [] if (name, where) in OF_ALL else [pytest.mark.slow]
            yield pytest.param(name, where, marks=[*pool(name).marks, *marks])


@pytest.mark.parametrize(("name", "where"), [*held()])
def test_reservation_is_prolonged_while_a_worker_has_its_message(
    cluster: Cluster, reservations: Reservations, key: str, name: str, where: str
) -> None:
    options: dict[str, Any] = {"queue": key, "lock": {"reserve_ttl": 3.0}}
    slots = "1" if where == "behind another" else "3"
    with (
        cluster.worker("-P", name, "-c", slots, queue=key, redlock_ttl=1.0) as worker,
        contextlib.ExitStack() as locked,
    ):
        if where == "behind another":
            reservations.while_executing.apply_async((f"{key}-long", 60.0), queue=key)
            cluster.entered(f"{key}-long")
        elif where == "parked":
            locked.enter_context(cluster.redlock.lock(f"k:{key}"))
        else:
            options["countdown"] = 5.0
        sent = reservations.until_executed.apply_async((key,), **options)
        worker.said(f"until_executed[{sent.id}] received")
        shorten(cluster, key, 3.0)
        until = time.monotonic() + 3.5
        while time.monotonic() < until:
            reservations.kept(key, sent)
            time.sleep(0.02)
        assert reservations.left(key) <= 3.0
        locked.close()
        cluster.tell(f"{key}-long")
        assert Skipped.of(cluster.result(sent)) is None
        reservations.freed(key)


def shorten(cluster: Cluster, key: str, seconds: float) -> None:
    """Shorten the reservation to what a producer leaves that dies right after it has sent."""
    for node in cluster.nodes:
        with redis.Redis.from_url(node.url) as client:
            client.pexpire(f"redlock:k:{key}#reserved", int(seconds * 1000))


# -- Clocks --------------------------------------------------------------------------------------

FAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)
PUBLISH = """
import json, sys
from celery import Celery
from tests.promises.worker.reserving import declare
conf, queue, key = json.loads(sys.argv[1])
app = Celery("tests.promises.worker.elsewhere")
app.conf.update(conf)
print(declare(app, lambda *_args: None)["until_executed"].apply_async((key,), queue=queue).id)
"""


@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed")
@pytest.mark.parametrize(
    "shift",
    [
        pytest.param("-2h", id="behind"),
        pytest.param("+2h", id="ahead", marks=pytest.mark.slow),
    ],
)
def test_clock_of_the_producer_does_not_change_a_reservation(
    cluster: Cluster, worker: Worker, reservations: Reservations, key: str, shift: str
) -> None:
    environment = {
        **os.environ,
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME": shift,
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PUBLISH, json.dumps([cluster.conf, "parked", key])],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60.0, check=True,
    )  # fmt: skip
    sent = AsyncResult(done.stdout.strip(), app=cluster.app)
    reservations.kept(key, sent)
    cluster.unpark()
    assert cluster.state(sent) == "SUCCESS"
    reservations.freed(key)  # its result is stored before that, and at its end it is killed
    assert len(cluster.runs(key)) == 1
