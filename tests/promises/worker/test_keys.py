"""One key for the arguments of a producer, of the main process, and of the body."""

from __future__ import annotations

import importlib
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from celery_redlock.config.task_lock import resource_of
from tests.support.bodies import Line
from tests.support.cluster import TASKS, Cluster
from tests.support.wait import wait_until
from tests.support.worker import Worker


@pytest.fixture(scope="module", params=["json", "pickle"])
def worker(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Worker]:
    conf = {"task_serializer": request.param, "accept_content": ["json", "pickle"]}
    cluster.app.conf.update(conf)
    with cluster.worker("-c", "1", **conf) as worker:
        yield worker


@pytest.fixture(scope="module")
def tasks(cluster: Cluster) -> Any:
    """The tasks as a producer has them; only their keys are asked for here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_CONF", json.dumps(cluster.conf))
        return importlib.import_module("tests.promises.worker.tasks")


def test_main_process_and_body_make_the_same_key(
    cluster: Cluster, worker: Worker, tasks: Any
) -> None:
    """The main process makes it from the message, to release the lock of a dead child."""
    pytest.importorskip("pydantic")
    sent = cluster.send("hold_model", {"id": 9})
    resource = resource_of(tasks.hold_model, ({"id": 9, "lines": []},), {})

    def lines() -> list[Line]:
        return [line for line in cluster.lines("here") if line.task == sent.id]

    (here,) = wait_until(lines, 5.0, "the body runs")
    assert here.resource == resource
    os.kill(here.pid, signal.SIGKILL)
    worker.said(f"freed {resource}, which {TASKS}.hold_model[{sent.id}] of pid {here.pid} on ")
