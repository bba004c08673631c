"""Tasks that read and tasks that write under one key, on prefork workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import redis

from celery_redlock import ResourceHeld, Skipped
from celery_redlock.server import start_servers
from tests.support import bodies
from tests.support.bodies import Run
from tests.support.cluster import Cluster
from tests.support.nodes import SHARED_RULE, refused_by, with_acl_user
from tests.support.wait import died, wait_until
from tests.support.worker import Worker


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Under the ACL rule of the docs, with what shared locks need besides."""
    with start_servers(6, config=with_acl_user(*SHARED_RULE)) as (*nodes, broker):
        cluster = Cluster(
            nodes, broker, tmp_path_factory.mktemp("worker"), tasks="tests.promises.worker.reading"
        )
        yield cluster
        cluster.close()
        for node in nodes:
            assert refused_by(node) == set(), "the words in docs/shared.md are not enough"


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Iterator[Worker]:
    """Two workers: readers and writers meet within one, and over both."""
    with cluster.worker("-c", "4") as worker, cluster.worker("-c", "2"):
        yield worker


def reads(cluster: Cluster, key: str) -> list[Run]:
    return bodies.runs(
        line for line in cluster.lines() if line.resource.startswith(f"k:read-{key}-")
    )


def reading(cluster: Cluster, key: str, count: int = 1) -> list[Run]:
    """Wait until so many read at once; those."""

    def now() -> list[Run]:
        running = [run for run in reads(cluster, key) if not run.ended]
        return running if len(running) >= count else []

    return wait_until(now, 20.0, f"{count} read at once")


def in_line(cluster: Cluster, key: str) -> bool:
    with redis.Redis.from_url(cluster.nodes[0].url) as client:
        return bool(client.zcard(f"redlock:shared:{key}#line"))


def alone(cluster: Cluster, key: str) -> None:
    """Check that no writer was there while one read."""
    readers = reads(cluster, key)
    for write in cluster.runs(f"write-{key}"):
        beside = [run for run in readers if run.begin < write.end and write.begin < run.end]
        assert beside == [], write


def test_reading_tasks_run_side_by_side_and_a_writing_one_alone(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    first = [cluster.send("read", key, 0.5) for _ in range(3)]
    reading(cluster, key, 3)
    writer = cluster.send("write", key, 0.3)
    behind = [cluster.send("read", key, 0.2) for _ in range(4)]
    for sent in (*first, *behind):
        assert cluster.result(sent, 30.0) == "read"
    assert cluster.result(writer, 30.0) == "wrote"
    alone(cluster, key)
    cluster.settled()


def test_killed_reading_task_keeps_no_writer_out(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    sent = cluster.send("read_or_skip", key, 60.0)
    (run,) = reading(cluster, key)
    writer = cluster.send("write", key, 0.05)
    os.kill(run.pid, signal.SIGKILL)
    died(run.pid)
    assert cluster.result(writer, 20.0) == "wrote"
    assert cluster.state(sent) == "FAILURE"
    alone(cluster, key)


def test_revoked_writing_task_that_waits_lets_readers_in(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    with cluster.redlock.lock(f"shared:{key}", shared=True):
        writer = cluster.send("write", key, 0.05)
        wait_until(lambda: in_line(cluster, key), 10.0, "the writer waits")
        behind = cluster.send("read", key, 0.05)
        time.sleep(0.5)
        assert reads(cluster, key) == []
        cluster.app.control.revoke(writer.id)
        assert cluster.result(behind, 10.0) == "read"


def test_copy_of_a_reading_task_does_not_run_beside_it(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    sent = cluster.send("read", key, 1.5)
    reading(cluster, key)
    cluster.send("read", key, 1.5, task_id=sent.id)
    assert cluster.result(cluster.send("read", key, 0.1), 10.0) == "read"
    assert cluster.result(sent, 20.0) == "read"
    cluster.settled()
    first, *others = [run for run in reads(cluster, key) if run.task == sent.id]
    assert all(run.begin > first.end for run in others)


def test_conflict_policies_apply_to_reading_and_writing_tasks(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    with cluster.redlock.lock(f"shared:{key}", shared=True):
        assert cluster.result(cluster.send("read_or_skip", key, 0.05)) == "read"
        with pytest.raises(ResourceHeld, match="reader"):
            cluster.result(cluster.send("write_instead", key, 0.05))
    with cluster.redlock.lock(f"shared:{key}"):
        skipped = cluster.result(cluster.send("read_or_skip", key, 0.05))
        assert Skipped.of(skipped) is not None
