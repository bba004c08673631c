"""A lease that is lost in mid-body: never quiet, and by default an exception in the body."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import psutil
import pytest
import redis

from celery_redlock import LeaseLost
from tests.support.cluster import TASKS, Cluster, steal
from tests.support.machine import brief, in_time
from tests.support.nodes import hung
from tests.support.program import stopped
from tests.support.wait import wait_until
from tests.support.worker import Worker, often

BRIEF = 1.7
"""Seconds that a body lasts which goes on though its lease, of a second, is lost."""
PUNCTUAL = 0.05
"""Seconds after its deadline within which a body is interrupted."""


POOLS = [often(name) for name in ("prefork", "threads", "solo", "gevent")]


@pytest.fixture(scope="module", params=POOLS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def worker(cluster: Cluster, name: str) -> Iterator[Worker]:
    with cluster.worker("-c", "3", "-P", name) as worker:
        yield worker


def interruptible(name: str, kind: str) -> None:
    """Skip what no exception can be raised in; `test_green.py` has what happens then."""
    if name == "gevent" and kind == "loop":
        pytest.skip("a greenlet is struck when it waits")
    if name == "threads" and kind in ("recv", "one sleep"):
        pytest.skip("only the main thread can be woken")


@pytest.mark.parametrize("kind", ["sleep", "loop", "one sleep", "recv"])
def test_lease_lost_is_raised_in_the_body(
    cluster: Cluster, worker: Worker, name: str, key: str, kind: str
) -> None:
    interruptible(name, kind)
    sent = cluster.send("short_ttl", key, 20.0, kind)
    cluster.entered(key)
    steal(cluster, key)
    with pytest.raises(LeaseLost, match=f"k:{key}: the lease is over"):
        cluster.result(sent)
    run = cluster.runs(key, sent)[0]
    assert run.ended
    in_time(run.begin, run.end, 3.0, "a body whose lock was lost at once")
    worker.said(f"lost the lock k:{key} held by {TASKS}.short_ttl[{sent.id}]")
    line = shown(worker, f"lost the lock k:{key}")
    assert "ERROR/" in line
    (told,) = cluster.lines("loss", f"k:{key}")  # the listener
    task, task_id, host, pid, held_for, reason, votes = told.detail
    assert (task, task_id, pid) == (f"{TASKS}.short_ttl", sent.id, run.pid)
    assert host == socket.gethostname()
    assert 0.0 < held_for < 10.0
    assert reason == "refused"
    # Two refusals are enough where a third node did not have the lease yet.
    assert votes.count("no") >= 2 and votes.count("yes") < 3, votes
    assert f"held by {task}[{sent.id}] of pid {pid} on {host}, after" in line
    assert f"{held_for:.1f} s: refused (" in line
    for node in cluster.nodes:
        assert f"127.0.0.1:{node.port} " in line
    with redis.Redis(port=cluster.nodes[0].port) as client:  # the thief's key is not ours to free
        assert client.get(f"redlock:k:{key}") == b"a thief"
    cluster.settled()


@pytest.mark.parametrize("kind", ["sleep", "loop"])
def test_body_is_interrupted_at_its_deadline_when_a_majority_is_gone(
    cluster: Cluster, worker: Worker, name: str, key: str, kind: str
) -> None:
    """It is interrupted within 50 ms, unless the machine was busy elsewhere.

    Of three bodies the first counts: side by side or, where one stops others, one after the other.
    """
    interruptible(name, kind)
    alone = name == "solo" or kind == "loop"  # loops would delay each other's interruption
    tries, count = (3, 1) if alone else (1, 3)
    lates: list[float] = []
    begin = time.monotonic()
    for again in range(tries):
        lates += told_late(cluster, f"{key}{again}", kind, count)
        if min(lates) < PUNCTUAL:
            break
    assert min(lates) >= 0.0
    brief(min(lates), PUNCTUAL, f"to be told, in {lates},", since=begin)


def told_late(cluster: Cluster, key: str, kind: str, count: int) -> list[float]:
    """Return the seconds from the deadline to the interruption of bodies that lose a majority."""
    sent = [cluster.send("punctual", f"{key}{i}", 20.0, kind) for i in range(count)]
    for i in range(count):
        cluster.entered(f"{key}{i}")
    with hung(cluster.nodes[:3]):
        told = [cluster.result(one) for one in sent]
    assert [reason for reason, _late, _lost in told] == ["expired"] * count
    assert all(lost for _reason, _late, lost in told)
    for i in range(count):
        (loss,) = cluster.lines("loss", f"k:{key}{i}")
        assert loss.detail[-1][:3] == ["silent"] * 3
        cluster.free(f"{key}{i}", within=5.0)
    return [late for _reason, late, _lost in told]


def shown(worker: Worker, words: str) -> str:
    worker.said(words)
    return next(line for line in worker.text.splitlines() if words in line)


def test_sleeping_thread_is_interrupted_only_after_its_sleep(
    cluster: Cluster, worker: Worker, name: str, key: str
) -> None:
    """A signal ends a sleep of the main thread, a hub that of a greenlet; threads sleep on."""
    if name != "threads":
        pytest.skip("above, as `one sleep`")
    sent = cluster.send("short_ttl", key, BRIEF, "one sleep")
    cluster.entered(key)
    steal(cluster, key)
    with pytest.raises(LeaseLost):
        cluster.result(sent)
    run = cluster.runs(key, sent)[0]
    assert run.end - run.begin >= BRIEF


def test_bodies_with_on_lost_log_or_callable_and_repaired_leases_run_on(
    cluster: Cluster, worker: Worker, name: str, key: str
) -> None:
    """Side by side: a body that only logs its loss, one with a function for it, and a repaired one.

    The keys of the last one are gone from a majority, and no other client has them: it is repaired
    before the deadline and keeps its lock.
    """
    sent = {}
    for task in ("lost_log", "lost_told"):
        sent[task] = cluster.send(task, f"{key}-{task}", BRIEF)
        cluster.entered(f"{key}-{task}")
        steal(cluster, f"{key}-{task}")
    repaired = cluster.send("short_ttl", key, BRIEF)
    cluster.entered(key)
    for node in cluster.nodes[:2]:
        with redis.Redis(port=node.port) as client:
            assert client.delete(f"redlock:k:{key}") == 1
    contender = cluster.contend(key)
    assert cluster.result(repaired) > 0.0
    contender.gets_it(since=lambda: cluster.runs(key, repaired)[0].end)
    for task, one in sent.items():
        assert cluster.result(one) is True  # ran to its end; current_lease().lost
        run = cluster.runs(f"{key}-{task}")[0]
        assert run.end - run.begin >= BRIEF
    worker.said(f"lost the lock k:{key}-lost_log held by {TASKS}.lost_log[{sent['lost_log'].id}]")
    (told,) = cluster.lines("told", f"k:{key}-lost_told")
    assert told.detail is True
    assert told.at < cluster.runs(f"{key}-lost_told")[0].end


def test_max_lifetime_ends_a_body_that_hangs(cluster: Cluster, worker: Worker, key: str) -> None:
    sent = cluster.send("hangs", key, 20.0)
    with pytest.raises(LeaseLost, match="max_lifetime"):
        cluster.result(sent)
    run = cluster.runs(key, sent)[0]
    assert run.end - run.begin > 0.4
    in_time(run.begin, run.end, 3.0, "a body of 0.5 s at most")
    cluster.free(key)


def test_silent_body_is_interrupted_and_stays_locked_until_it_has_ended(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    sent = cluster.send("silent", key, 20.0)
    cluster.entered(key)
    contender = cluster.contend(key)
    with pytest.raises(LeaseLost, match=r"no progress was reported for .* \(stalled\)"):
        cluster.result(sent)
    run = cluster.runs(key, sent)[0]
    assert run.ended and run.end - run.begin > 0.95
    in_time(run.begin, run.end, 3.0, "a body that may be silent for a second")
    contender.gets_it(since=run.end)
    (loss,) = cluster.lines("loss", f"k:{key}")  # the listener
    assert loss.detail[-2] == "stalled"
    line = shown(worker, f"s under the lock k:{key} held by {TASKS}.silent[{sent.id}]")
    assert "ERROR/" in line and "is interrupted" in line
    assert f"lost the lock k:{key}" not in worker.text  # which was kept


def test_unresponsive_body_keeps_its_lock_until_its_process_is_killed_or_it_ends(
    cluster: Cluster, worker: Worker, name: str, key: str
) -> None:
    """It keeps it beyond the ttl. A process of its own is killed."""
    killed = name == "prefork"
    sent = cluster.send("deaf", key, 20.0 if killed else 1.6)
    cluster.entered(key)
    contender = cluster.contend(key)
    if killed:
        assert cluster.state(sent) == "FAILURE"  # WorkerLostError
        worker.said(f"killing process {cluster.runs(key, sent)[0].pid}: its work under the lock")
    else:
        assert cluster.result(sent) == [True, False]
        assert "killing" not in worker.text
    run = cluster.runs(key, sent)[-1]  # since its interruption, if it lived that long
    assert run.ended is not killed
    assert killed or run.end - run.begin > 1.5
    contender.gets_it(since=run.end)


def test_silent_body_that_goes_on_is_interrupted_by_a_loss_too(
    cluster: Cluster, worker: Worker, name: str, key: str
) -> None:
    if name == "prefork":
        pytest.skip("it is killed before that")
    sent = cluster.send("deaf", key, 20.0)
    cluster.entered(key, 2)
    steal(cluster, key)
    with pytest.raises(LeaseLost, match=f"k:{key}: the lease is over"):
        cluster.result(sent)
    assert [loss.detail[-2] for loss in cluster.lines("loss", f"k:{key}")] == ["stalled", "refused"]


def test_body_in_an_endless_c_call_is_killed(
    cluster: Cluster, worker: Worker, name: str, key: str
) -> None:
    """Nothing in its process can run: the main process sees that it is silent."""
    if name != "prefork":
        pytest.skip("it shares its process with others")
    sent = cluster.send("silent", key, 30.0, "gil")
    run = cluster.entered(key)
    assert cluster.state(sent) == "FAILURE"
    worker.said(f"killing process {run.pid}: its work under the lock k:{key}")
    cluster.free(key)


def test_body_that_reports_progress_or_is_only_watched_runs_on(
    cluster: Cluster, worker: Worker, name: str, key: str
) -> None:
    """Both side by side: a report inside of another block counts as well."""
    sent = [cluster.send(task, f"{key}-{task}", 2.5) for task in ("silence_logged", "silence_told")]
    reports = cluster.send("reporting", f"{key}-reporting", 2.6)
    assert [cluster.result(one) for one in sent] == [False, False]  # the locks were kept
    assert cluster.result(reports) is False  # never silent
    assert cluster.lines("loss", f"k:{key}-reporting") == []
    line = shown(worker, f"under the lock k:{key}-silence_logged held by {TASKS}.silence_logged")
    assert "WARNING/" in line and "goes on" in line
    for task in ("silence_logged", "silence_told"):
        assert cluster.lines("loss", f"k:{key}-{task}")[0].detail[-2] == "stalled"
    (told,) = cluster.lines("silent", f"k:{key}-silence_told")
    assert told.detail == [True, False]


def test_reporting_body_survives_a_long_stop_of_its_whole_worker(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """The worker stops as by `docker pause`, for more than twice the time a body may be silent."""
    sent = cluster.send("reporting", key, 6.0)
    cluster.entered(key)
    with contextlib.ExitStack() as stops:
        main = psutil.Process(worker.process.pid)
        for process in [*main.children(recursive=True), main]:  # which wakes up first
            stops.enter_context(stopped(process.pid))
        time.sleep(4.5)
    assert cluster.result(sent) is False  # never silent
    assert cluster.lines("loss", f"k:{key}") == []


def test_worker_that_interrupted_bodies_still_runs_tasks(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """No exception was raised outside of a body, and each child takes tasks."""
    sent = [cluster.send("work", f"{key}{i}") for i in range(9)]
    for one in sent:
        assert cluster.result(one) == {"retries": 0, "token": True}
    assert "unrecoverable" not in worker.text.lower()
    assert "Traceback" not in worker.text.split("ready.")[0]
    wait_until(lambda: not cluster.client.hlen("unacked"), 5.0, "all are acknowledged")
