"""Every ending that the body's process does not survive: free within a second, and no sooner.

The bodies write signs of life until they die, and a contender waits for each lock: had it been
freed while the body lived, the oracle of conftest.py would see the two overlap.
"""

from __future__ import annotations

import os
import signal

import pytest
from celery.worker.request import Request

from tests.support import wait_until
from tests.worker.harness import Cluster, Worker, died

pytestmark = pytest.mark.worker


def test_hard_time_limit(cluster: Cluster, worker: Worker, key: str) -> None:
    sent = cluster.send("work", key, 30, time_limit=0.5)
    run = cluster.entered(key)
    contender = cluster.contend(key)
    contender.gets_it(since=died(run.pid))
    assert cluster.state(sent) == "FAILURE"
    cluster.settled()
    assert len(cluster.runs(key, sent)) == 1


def test_hard_time_limit_of_a_body_that_does_not_listen(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """It lives on, from the limit until SIGKILL: its lock must not be free in between."""
    cluster.send("stubborn", key, 30, 30, time_limit=0.5)
    run = cluster.entered(key)
    contender = cluster.contend(key)
    contender.gets_it(since=died(run.pid))
    assert cluster.runs(key)[0].ended is False


def test_revoke_with_sigterm(cluster: Cluster, worker: Worker, key: str) -> None:
    sent = cluster.send("work", key, 30)
    run = cluster.entered(key)
    contender = cluster.contend(key)
    cluster.app.control.revoke(sent.id, terminate=True, signal="SIGTERM")
    contender.gets_it(since=died(run.pid))
    assert cluster.state(sent) == "REVOKED"
    cluster.settled()
    assert len(cluster.runs(key, sent)) == 1


def test_revoke_with_sigterm_of_a_body_that_does_not_listen(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """The main process calls it revoked at once; the body takes another second."""
    sent = cluster.send("stubborn", key, 30, 1.0)
    cluster.entered(key)
    contender = cluster.contend(key)
    cluster.app.control.revoke(sent.id, terminate=True, signal="SIGTERM")
    assert cluster.state(sent) == "REVOKED"
    contender.gets_it(since=lambda: cluster.runs(key, sent)[0].end)
    run = cluster.runs(key, sent)[0]
    assert run.ended and run.end - run.begin > 1.0
    os.kill(run.pid, signal.SIGKILL)  # else billiard calls its next task, if killed, terminated
    died(run.pid)


def test_revoke_with_sigkill(cluster: Cluster, worker: Worker, key: str) -> None:
    sent = cluster.send("work", key, 30)
    run = cluster.entered(key)
    contender = cluster.contend(key)
    cluster.app.control.revoke(sent.id, terminate=True, signal="SIGKILL")
    contender.gets_it(since=died(run.pid))
    assert cluster.state(sent) == "REVOKED"
    cluster.settled()
    assert len(cluster.runs(key, sent)) == 1


def test_child_is_killed(cluster: Cluster, worker: Worker, key: str) -> None:
    sent = cluster.send("work", key, 30)
    run = cluster.entered(key)
    contender = cluster.contend(key)
    os.kill(run.pid, signal.SIGKILL)
    contender.gets_it(since=died(run.pid))
    assert cluster.state(sent) == "FAILURE"
    cluster.settled()
    assert len(cluster.runs(key, sent)) == 1
    worker.said(f"freed k:{key}, which process {run.pid} held when it died")


def test_child_is_killed_and_its_message_comes_back(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """acks_late and reject_on_worker_lost: the second delivery of the same id runs."""
    sent = cluster.send("late", key, 30)
    run = cluster.entered(key)
    contender = cluster.contend(key)
    os.kill(run.pid, signal.SIGKILL)
    contender.gets_it(since=died(run.pid))
    assert cluster.result(sent) == 2
    first, second = cluster.runs(key, sent)
    assert not first.ended and second.ended
    cluster.settled()


@pytest.mark.parametrize("then", ["_exit", "SystemExit"])
def test_body_exits(cluster: Cluster, worker: Worker, key: str, then: str) -> None:
    sent = cluster.send("work", key, 0.5, then)
    run = cluster.entered(key)
    contender = cluster.contend(key)
    contender.gets_it(since=died(run.pid))
    # Billiard 4.3 reports the SystemExit itself, which an older Celery cannot write as a result.
    if then == "_exit" or hasattr(Request, "_worker_lost_info"):
        assert cluster.state(sent) == "FAILURE"
    cluster.settled()
    assert len(cluster.runs(key, sent)) == 1


def test_child_is_killed_while_it_waits_for_a_lock(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """It holds nothing; and the one who holds it is not robbed."""
    with cluster.redlock.lock(f"k:{key}") as lease:
        sent = cluster.send("patient", key)
        pid = wait_until(lambda: cluster.accepted_by(sent), 5.0, "a child has taken it")
        os.kill(pid, signal.SIGKILL)
        died(pid)
        assert cluster.state(sent) == "FAILURE"
        assert cluster.redlock.try_acquire(f"k:{key}") is None
        lease.ensure()
    cluster.free(key, within=0.0)


def test_another_childs_lock_survives(cluster: Cluster, worker: Worker, key: str) -> None:
    """Only what the dead child held is freed."""
    other = cluster.send("work", f"{key}-other", 3.0)
    cluster.entered(f"{key}-other")
    bystander = cluster.contend(f"{key}-other")
    cluster.send("work", key, 30)
    run = cluster.entered(key)
    os.kill(run.pid, signal.SIGKILL)
    died(run.pid)
    cluster.free(key)
    assert cluster.result(other) == {"retries": 0, "token": True}
    bystander.gets_it(since=lambda: cluster.runs(f"{key}-other", other)[0].end)


def test_copy_of_a_running_task(cluster: Cluster, worker: Worker, key: str) -> None:
    """The same id delivered twice: the copy neither runs beside it, nor frees its lock."""
    sent = cluster.send("work", key, 1.0)
    cluster.entered(key)
    cluster.send("work", key, 0.05, task_id=sent.id)
    worker.said(f"work[{sent.id}] waits (held, attempt 2")
    assert len(cluster.runs(key)) == 1
    contender = cluster.contend(key)
    contender.gets_it(since=lambda: cluster.runs(key)[0].end)
    cluster.settled()
