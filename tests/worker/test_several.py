"""Tasks with several keys, and with a limit, on real workers."""

from __future__ import annotations

import os
import random
import signal
import socket

import pytest

from tests.support.cluster import TASKS, Cluster
from tests.support.wait import died
from tests.support.worker import Worker

pytestmark = pytest.mark.worker


def test_a_task_excludes_others_from_each_of_its_keys(
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


def test_a_child_that_is_killed_leaves_none_of_its_keys(
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


def test_random_pairs_in_any_order_all_come_to_their_end(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    pairs = [random.sample(range(5), 2) for _ in range(20)]
    sent = [cluster.send("move", f"{key}-{one}", f"{key}-{other}") for one, other in pairs]
    for result, pair in zip(sent, pairs, strict=True):
        one, other = sorted(pair)
        assert cluster.result(result, 30.0) == f"k:{key}-{one} + k:{key}-{other}"


def test_a_limit_of_two_lets_two_in(cluster: Cluster, worker: Worker, key: str) -> None:
    sent = [cluster.send("crowd", key) for _ in range(8)]
    assert {cluster.result(result, 30.0) for result in sent} == {f"crowd:{key}"}
    inside, most = 0, 0
    for line in sorted(cluster.lines(resource=key), key=lambda line: line.at):
        inside += {"in": 1, "out": -1}[line.kind]
        most = max(most, inside)
    assert (most, inside) == (2, 0)  # of three children
