"""`celery inspect redlock`: a worker reports what it holds and waits for, and asks no node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from celery import Celery
from click.testing import CliRunner

from celery_redlock.cli import redlock
from celery_redlock.doctor import Finding
from celery_redlock.doctor.workers import examine_workers
from tests.support.cluster import READY, TASKS, Cluster
from tests.support.nodes import TOKEN, hung
from tests.support.wait import wait_until
from tests.support.worker import ROOT, pool

POOLS = [
    pool("prefork"),
    pool("threads"),
    pytest.param("gevent", marks=[*pool("gevent").marks, pytest.mark.slow]),
]


def told(cluster: Cluster, name: str, kind: str, count: int) -> dict[str, Any]:
    """Return the answer of a worker, once it reports so many of this kind."""
    asked = cluster.app.control.inspect(timeout=5.0, destination=[name], limit=1)

    def enough() -> dict[str, Any] | None:
        answer = (asked._request("redlock") or {}).get(name)
        return answer if answer is not None and len(answer[kind]) == count else None

    answer = wait_until(enough, 30.0, f"it tells of {count} {kind}")
    assert answer is not None
    return answer


def as_an_operator_sees(cluster: Cluster, node: str) -> dict[str, Any]:
    """`celery inspect redlock`, of an app whose own module imports nothing of ours."""
    command = [sys.executable, "-m", "celery", "-b", cluster.broker.url, "inspect", "-t", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def inspect() -> str:
        done = subprocess.run(
            [*command, "--json", "redlock"], env=environment, capture_output=True, timeout=READY
        )
        return "" if done.returncode else done.stdout.decode()

    output = wait_until(inspect, READY, "a worker answers in a second")
    assert "SECRET" in cluster.conf["redlock_nodes"][0] and "SECRET" not in output
    assert not TOKEN.search(output)
    answer: dict[str, Any] = json.loads(output)[node]
    return answer


def shown(cluster: Cluster, resource: str) -> str:
    """Return the output of `show` for a user that may only look, once the worker answers it."""
    app = Celery("tests.promises.worker.operator", set_as_current=False)
    app.conf.update(cluster.conf, redlock_nodes=[node.url for node in cluster.nodes])

    def show() -> str:
        site = SimpleNamespace(app=app)
        said = CliRunner().invoke(redlock, ["show", resource], obj=site).output
        return "" if "none answered" in said else said

    return wait_until(show, READY, "the worker answers show")


def waiting(cluster: Cluster, resource: str) -> int:
    """Return the number of waiters, by `ls` once the worker answers it."""
    app = Celery("tests.promises.worker.operator", set_as_current=False)
    app.conf.update(cluster.conf, redlock_nodes=[node.url for node in cluster.nodes])
    site = SimpleNamespace(app=app)

    def ask() -> dict[str, Any] | None:
        said = json.loads(CliRunner().invoke(redlock, ["ls", "--json"], obj=site).stdout)
        return None if said["unasked"] else said

    said = wait_until(ask, READY, "the worker answers ls")
    assert said is not None
    return next(one["waiting"] for one in said["entries"] if one["resource"] == resource)


def compared(app: Celery) -> list[Finding]:
    """Return the findings of the doctor, once the worker answers it."""
    answered: list[list[Finding]] = []

    def look() -> bool:
        answered.append(list(examine_workers(app, 0.5)))
        return not any(finding.level == "unchecked" for finding in answered[-1])

    wait_until(look, 30.0, "the worker answers the doctor")
    return answered[-1]


@pytest.mark.parametrize("name", POOLS)
def test_inspect_shows_holds_and_waits_without_asking_the_nodes(
    cluster: Cluster, key: str, name: str
) -> None:
    node = f"{name}@test"
    with cluster.worker("-P", name, "-c", "3", "-n", node, queue=name) as worker:
        held = cluster.send("fenced", key, queue=name)
        cluster.entered(key)
        parked = cluster.send("work", key, queue=name)
        with cluster.redlock.lock(f"k:{key}-p"):
            patient = cluster.send("patient", f"{key}-p", queue=name)
            answer = told(cluster, node, "waits", 2)
            assert answer["pool"] == {
                "slots": 1 if name == "solo" else 3,
                "busy": 2,
                "queues": [name],
            }
        with hung(cluster.nodes):  # none of them is asked
            told(cluster, node, "holds", 1)
        (hold,) = answer["holds"]
        assert (hold["resource"], hold["task"]) == (f"k:{key}", f"{TASKS}.fenced")
        assert hold["task_id"] == held.id
        family = psutil.Process(worker.process.pid)
        assert hold["pid"] in {family.pid, *(child.pid for child in family.children(True))}
        assert 0 < hold["remaining"] <= 30 and hold["held_for"] >= 0
        waits = {wait["task_id"]: wait for wait in answer["waits"]}
        assert waits[parked.id]["where"] == "parked"
        assert waits[parked.id]["holder"] == f"{TASKS}.fenced {held.id}"
        assert waits[patient.id]["where"] == "slot"
        assert waits[patient.id]["resource"] == f"k:{key}-p"
        assert waits[patient.id]["holder"] is None  # nobody of this worker
        assert all(wait["waited"] >= 0 for wait in waits.values())
        if name == "prefork":
            # The worker stands in line as well, once: it is no waiter besides.
            wait_until(lambda: waiting(cluster, f"k:{key}") == 1, 10.0, "one waits")
            assert f"parked): {TASKS}.work {parked.id}" in shown(cluster, f"k:{key}")
            seen = as_an_operator_sees(cluster, node)
            assert seen["holds"][0]["task_id"] == held.id
            assert seen["settings_digest"] == answer["settings_digest"]
            assert compared(cluster.app) == []
            other = Celery("other", broker=cluster.broker.url, set_as_current=False)
            other.conf.update({**cluster.conf, "redlock_prefix": "other:"})
            (finding,) = compared(other)
            other.close()
            assert (finding.level, finding.where) == ("wrong", node)
        cluster.tell(key)
        assert cluster.result(held) == hold["fencing_token"]
        for sent in (parked, patient):
            assert cluster.state(sent) == "SUCCESS"
        told(cluster, node, "waits", 0)  # results are stored before that is known
        assert told(cluster, node, "holds", 0)["waits"] == []


def test_inspect_shows_a_stopped_body_and_nodes_that_the_worker_cannot_use(
    cluster: Cluster, key: str
) -> None:
    urls = [
        "redis://:SECRET@127.0.0.1:1/0",
        *cluster.conf["redlock_nodes"][1:],
    ]  # the first is away
    with cluster.worker("-c", "1", "-n", "odd@test", queue=key, redlock_nodes=urls):
        held = cluster.send("fenced", key, queue=key)
        pid = cluster.entered(key).pid
        answer = told(cluster, "odd@test", "unusable", 1)
        assert "refused" in answer["unusable"]["127.0.0.1:1"] and "SECRET" not in str(answer)
        assert not answer["holds"][0]["stopped"]
        said = [one.what for one in compared(cluster.app)]
        assert any(what.startswith("it can use 4 of 5 nodes, not 127.0.0.1:1 (") for what in said)
        os.kill(pid, signal.SIGSTOP)
        (hold,) = told(cluster, "odd@test", "holds", 1)["holds"]
        os.kill(pid, signal.SIGCONT)
        assert (hold["pid"], hold["stopped"]) == (pid, True)
        cluster.tell(key)
        assert cluster.state(held) == "SUCCESS"
