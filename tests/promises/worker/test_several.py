"""Tasks with several keys, and with a limit, on real workers."""

from __future__ import annotations

import os
import random
import signal
import socket

from tests.support.cluster import TASKS, Cluster
from tests.support.machine import in_time
from tests.support.wait import died, wait_until
from tests.support.worker import Worker


def test_task_with_several_keys_excludes_others_from_each_of_them(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    sent = cluster.send("move", f"{key}-a", f"{key}-b", 0.5)
    cluster.entered(f"{key}-a")
    for name in ("a", "b"):
        assert cluster.redlock.try_acquire(f"k:{key}-{name}") is None
    later = cluster.send("work", f"{key}-b")
    assert cluster.result(sent) == f"k:{key}-a + k:{key}-b"
    cluster.result(later)
    (first,), (second,) = cluster.runs(f"{key}-b", sent), cluster.runs(f"{key}-b", later)
    assert first.end < second.begin
    cluster.free(f"{key}-a")


def test_killed_child_leaves_none_of_its_keys_locked(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    sent = cluster.send("move", f"{key}-a", f"{key}-b", 30)
    run = cluster.entered(f"{key}-a")
    contenders = [cluster.contend(f"{key}-{name}") for name in ("a", "b")]
    os.kill(run.pid, signal.SIGKILL)
    since = died(run.pid)
    for contender in contenders:
        contender.gets_it(since=since)
    who = f"{TASKS}.move[{sent.id}] of pid {run.pid} on {socket.gethostname()}"
    worker.said(f"freed k:{key}-a + k:{key}-b, which {who} held when it died")


def test_tasks_with_random_pairs_of_keys_all_come_to_their_end(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    pairs = [random.sample(range(5), 2) for _ in range(20)]
    sent = [cluster.send("move", f"{key}-{one}", f"{key}-{other}") for one, other in pairs]
    for result, pair in zip(sent, pairs, strict=True):
        one, other = sorted(pair)
        assert cluster.result(result, 30.0) == f"k:{key}-{one} + k:{key}-{other}"


def most_inside(cluster: Cluster, key: str) -> int:
    """Return how many bodies of a key were at work at a time, at most.

    Check that none is any more.
    """
    inside, most = 0, 0
    for line in sorted(cluster.lines(resource=key), key=lambda line: line.at):
        inside += {"in": 1, "out": -1}[line.kind]
        most = max(most, inside)
    assert inside == 0
    return most


def test_limits_of_each_tenant_and_of_all_tenants_hold_together(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """A function of the arguments allows one of a tenant, and two of all tenants; both are used."""
    sent = {
        tenant: [cluster.send("tenants", key, tenant) for _ in range(4)] for tenant in ("a", "b")
    }
    sent["c"] = [cluster.send("tenants", key, "c", 2) for _ in range(4)]
    for tenant, results in sent.items():
        for result in results:
            assert cluster.result(result, 30.0).startswith(f"crowd:{key} + tenant:")
        assert most_inside(cluster, f"{key}-{tenant}") <= (2 if tenant == "c" else 1)
    assert most_inside(cluster, key) == 2


def test_killed_child_leaves_the_slots_of_all_its_keys_free(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    killed = cluster.send("tenants", key, "a", 1, 60.0)
    pid = wait_until(lambda: cluster.accepted_by(killed), 10.0, "its body has begun")
    wait_until(lambda: cluster.lines("in", f"{key}-a"), 10.0, "its body has begun")
    waits = cluster.send("tenants", key, "a")
    os.kill(pid, signal.SIGKILL)
    since = died(pid)
    wait_until(lambda: len(cluster.lines("in", f"{key}-a")) == 2, 20.0, "the next has begun")
    in_time(since, cluster.lines("in", f"{key}-a")[-1].at, 1.0, "from its death to the next")
    assert cluster.state(waits) == "SUCCESS"
