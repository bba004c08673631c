"""A worker refuses to start with settings that cannot work, and says which; one node is enough."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from celery_redlock.server import LocalServer, start_servers
from tests.support.cluster import READY, TASKS, Cluster
from tests.support.worker import ROOT, Worker


def refusal(cluster: Cluster, **conf: Any) -> str:
    """Return the output of a worker that refuses to start with these settings."""
    worker = Worker(cluster, ("-c", "1"), conf)
    try:
        assert worker.ended(READY) != 0
    finally:
        worker.kill()
    assert " ready." not in worker.text
    return worker.text


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("redlock_ttl", "ten", "redlock_ttl must be a number of seconds"),
        ("redlock_ttll", 10, "no option redlock_ttll; did you mean redlock_ttl?"),
        ("redlock_nodes", ["http://127.0.0.1:1"], "redlock_nodes[0]: the scheme 'http'"),
    ],
)
def test_worker_refuses_to_start_with_an_invalid_setting(
    cluster: Cluster, setting: str, value: Any, words: str
) -> None:
    """`tests/promises/tasks/test_settings.py` has all of them."""
    said = refusal(cluster, **{setting: value})
    assert f"celery_redlock: {words}" in said or f"celery_redlock: there is {words}" in said
    assert "Traceback" not in said


def test_worker_reads_its_nodes_in_a_namespace(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    node = cluster.nodes[4]
    monkeypatch.setenv("TEST_NAMESPACED", f'{{"CELERY_REDLOCK_NODES": ["{node.url}"]}}')
    with cluster.worker("-c", "1") as worker:
        assert cluster.result(cluster.send("nodes")) == [f"127.0.0.1:{node.port}"]
        assert "redlock_nodes is not set" not in worker.text


def test_worker_without_nodes_locks_on_its_broker(cluster: Cluster, key: str) -> None:
    with cluster.worker("-c", "2", redlock_nodes=None) as worker:
        worker.said(f"tasks are locked on one Redis alone, 127.0.0.1:{cluster.broker.port}.")
        assert cluster.result(cluster.send("nodes")) == [f"127.0.0.1:{cluster.broker.port}"]
        sent = [cluster.send("work", key) for _ in range(4)]
        for one in sent:
            assert cluster.result(one) == {"retries": 0, "token": True}
        assert worker.text.count("redlock_nodes is not set") == 1
        (line,) = [line for line in worker.text.splitlines() if "redlock_nodes is not" in line]
        assert "INFO/MainProcess" in line
        assert "not when it restarts without its data" in line


def test_worker_with_redlock_enabled_false_takes_no_lock(cluster: Cluster, key: str) -> None:
    """A task runs although another holds its resource, and no node is needed."""
    nowhere = ["redis://127.0.0.1:1/0"]
    with cluster.worker("-c", "2", redlock_enabled=False, redlock_nodes=nowhere) as worker:
        worker.said("redlock_enabled is False: no task takes a lock")
        with cluster.redlock.lock(f"k:{key}"):
            sent = cluster.send("work", key)
            assert cluster.result(sent) == {"retries": 0, "token": False}


def test_worker_starts_without_its_nodes(cluster: Cluster, key: str) -> None:
    """Unlike an invalid setting, missing nodes may come back: tasks wait for them."""
    with cluster.worker("-c", "1", redlock_nodes=["redis://127.0.0.1:1/0"]) as worker:
        why = "1 node, 0 answer: nothing can be locked until 1 does (127.0.0.1:1)"
        assert why in worker.text and "tasks are locked on" not in worker.text
        sent = cluster.send("work", key)
        worker.said(f"work[{sent.id}] waits (unavailable, attempt 1")
        assert cluster.runs(key) == []
        cluster.client.delete("celery")


def test_worker_without_a_quorum_does_not_log_that_tasks_are_locked(cluster: Cluster) -> None:
    there, *away = cluster.nodes[0].url, "redis://127.0.0.1:1/0", "redis://127.0.0.1:2/0"
    with cluster.worker("-c", "1", redlock_nodes=[there, *away]) as worker:
        (line,) = [one for one in worker.text.splitlines() if "nothing can be locked" in one]
        assert "WARNING/MainProcess" in line
        assert "3 nodes, 1 answers: nothing can be locked until 2 do (127.0.0.1:" in line
        assert "tasks are locked on" not in worker.text
    with cluster.worker("-c", "1", redlock_nodes=[there, cluster.nodes[1].url, away[0]]) as worker:
        assert "tasks are locked on 3 nodes" in worker.text


def test_invalid_option_in_task_annotations_is_one_line(cluster: Cluster) -> None:
    """Here tasks are made while the app is imported; below, when the worker begins."""
    said = refusal(cluster, task_annotations={f"{TASKS}.work": {"lock_ttl": "ten"}})
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "celery_redlock: " in line]
    words = "lock_ttl must be a number of seconds"
    assert line.startswith(f"celery_redlock: {TASKS}.work: {words}"), line


def test_invalid_annotation_of_a_task_made_late_is_one_line(tmp_path: Path) -> None:
    """It is made after the app was imported. Commands go on: the doctor finds more."""
    (tmp_path / "late_shop.py").write_text(
        "from celery import Celery\n"
        "from celery_redlock import SingletonTask\n"
        "app = Celery('shop', broker='memory://')\n"
        "app.conf.redlock_nodes = ['redis://127.0.0.1:1/0']\n"
        "app.conf.task_annotations = {'shop.charge': {'lock_ttl': 'ten'}}\n"
        "@app.task(name='shop.charge', base=SingletonTask)\n"
        "def charge(): ...\n"
    )

    def run(*command: str, module: str = "tests.support.run_celery") -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-m", module, "-A", "late_shop", *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=READY,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        assert "Traceback" not in done.stderr + done.stdout
        return done.stdout, done.stderr

    with ThreadPoolExecutor() as threads:
        refused = [threads.submit(run, command) for command in ("worker", "beat")]
        doctor = threads.submit(run, "redlock", "doctor", "--timeout", "0.3", module="celery")
    for command in refused:
        assert command.result()[1].splitlines()[-1] == (
            "celery_redlock: shop.charge: lock_ttl must be a number of seconds >= 0.02; it is 'ten'"
            " (from task_annotations)"
        )
    found, _errors = doctor.result()
    assert "WRONG      configuration: tasks: shop.charge: lock_ttl must be" in found
    assert "WRONG      quorum: 1 node: " in found


# -- Nodes that are none, and nodes that may not vote yet


def node_refusal(cluster: Cluster, nodes: list[str]) -> str:
    """The one line that says why a worker does not start with these nodes."""
    said = refusal(cluster, redlock_nodes=nodes)
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if "celery_redlock: node " in line]
    return line


def test_worker_refuses_a_replica_and_a_member_of_a_cluster(cluster: Cluster) -> None:
    master = cluster.nodes[0]
    config = ["--replicaof", "127.0.0.1", str(master.port)]
    with LocalServer(config=config) as replica:
        line = node_refusal(cluster, [master.url, replica.url])
        assert f"node 127.0.0.1:{replica.port} is not usable: it is a replica" in line
        assert f"of 127.0.0.1:{master.port}" in line
    with LocalServer(config=["--cluster-enabled", "yes"]) as member:
        line = node_refusal(cluster, [member.url])
        assert f"node 127.0.0.1:{member.port} is not usable: it is a member of a Redis" in line


SAID_OF_NODES = ("started", "evicts keys")


def test_worker_on_nodes_just_started_logs_it_once_and_its_tasks_wait(
    cluster: Cluster, key: str
) -> None:
    """It logs once for all its processes; its tasks wait, and then run."""
    config = ["--maxmemory-policy", "allkeys-lru"]
    with start_servers(3, config=config) as nodes:
        urls = [node.url for node in nodes]
        conf: dict[str, Any] = {
            "redlock_nodes": urls,
            "redlock_restart_guard": "uptime",
            "redlock_ttl": 2.0,
            "task_annotations": {
                "tests.promises.worker.tasks.late": {"lock_ttl": 9.5},
                "tests.promises.worker.tasks.paced_slowly": {"lock_rate": "1/h"},
            },
        }
        with cluster.worker("-c", "3", **conf) as worker:
            sent = [cluster.send("work", f"{key}{number}") for number in range(6)]
            worker.said(" the longest ttl in use is ")
            # That of another task, of which this worker knows.
            assert set(re.findall(r"the longest ttl in use is (\S+) s", worker.text)) == {"9.5"}
            worker.said("waits (unavailable, attempt 1", 10)
            told = [
                f"node 127.0.0.1:{node.port} {what} " for node in nodes for what in SAID_OF_NODES
            ]
            for words in told:  # two are enough for that, and the third may answer later
                worker.said(words, 10)
            lines = [line for line in worker.text.splitlines() if "The longest ttl in use" in line]
            assert all("WARNING/MainProcess" in line for line in lines)
            for one in sent:
                assert cluster.result(one, 60) == {"retries": 0, "token": True}
            pattern = rf"next in (\S+) s\): (k:{key}\d): (.*)"
            waits = re.findall(pattern, worker.text)
            assert {name for _, name, _ in waits} == {f"k:{key}{number}" for number in range(6)}
            for pause, _, votes in waits:
                left = sorted(map(float, re.findall(r"no vote for another (\S+) s", votes)))
                # Any other node may have a vote at once, for all that is known.
                assert float(pause) > (left[-2] if len(left) > 1 else 0.0)
            assert [worker.text.count(words) for words in told] == [1] * len(told)
