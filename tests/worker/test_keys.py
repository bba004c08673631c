"""One key for the producer's arguments, the worker's decoded ones, and those of the body."""

from __future__ import annotations

import datetime
import decimal
import importlib
import json
import os
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import celery
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
        return importlib.import_module("tests.worker.tasks")


ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((1, "1", 1.5, True, None), {}),
    (((1, 2), [3, (4,)]), {"a": {"b": (1,)}}),
    (({1: 2, "x": None},), {}),
    ((uuid.UUID(int=7),), {"when": datetime.datetime(2026, 1, 2, 3, 4, 5, 6)}),
    ((datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),), {}),
    ((datetime.date(2026, 1, 2), datetime.time(3, 4)), {"price": decimal.Decimal("1.50")}),
    (("naïve", "a:b", 'quo"te', "\U0001f600", b"bytes"), {"z": 1, "a": 2}),
    (("x" * 5000,), {}),
]


@pytest.mark.parametrize(("args", "kwargs"), ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_producer_and_body_make_the_same_key(
    cluster: Cluster, worker: Worker, tasks: Any, args: Any, kwargs: Any
) -> None:
    sent = cluster.send("keyed", *args, kwargs=kwargs)
    assert cluster.result(sent) == resource_of(tasks.keyed, args, kwargs)


def test_key_includes_defaults_for_producer_and_body(
    cluster: Cluster, worker: Worker, tasks: Any
) -> None:
    keys = {
        resource_of(tasks.defaulted, (1,), {}),
        resource_of(tasks.defaulted, (), {"a": 1}),
        resource_of(tasks.defaulted, (1,), {"b": 2}),
        cluster.result(cluster.send("defaulted", 1)),
        cluster.result(cluster.send("defaulted", kwargs={"b": 2, "a": 1})),
    }
    assert len(keys) == 1
    assert cluster.result(cluster.send("defaulted", "1")) not in keys


def test_key_of_a_pydantic_model_is_the_same_for_producer_and_body(
    cluster: Cluster, worker: Worker, tasks: Any
) -> None:
    """The producer has a model or a dict, the message a dict, the body a model."""
    pytest.importorskip("pydantic")
    if celery.VERSION < (5, 5):
        pytest.skip("Celery has pydantic=True since 5.5")
    model = tasks.Order(id=5, lines=["a"])
    keys = {
        resource_of(tasks.modelled, (model,), {}),
        resource_of(tasks.modelled, ({"id": 5, "lines": ["a"]},), {}),
        cluster.result(cluster.send("modelled", {"id": 5, "lines": ["a"]})),
        cluster.result(cluster.send("modelled", kwargs={"order": {"lines": ["a"], "id": 5}})),
        cluster.result(cluster.send("locked_model", {"id": 5, "lines": ["a"]})).replace(
            "locked_model", "modelled"
        ),
    }
    assert len(keys) == 1


def test_main_process_and_body_make_the_same_key(
    cluster: Cluster, worker: Worker, tasks: Any
) -> None:
    """The main process makes it from the message, to release the lock of a dead child."""
    sent = cluster.send("hold_model", {"id": 9})
    resource = resource_of(tasks.hold_model, ({"id": 9, "lines": []},), {})

    def lines() -> list[Line]:
        return [line for line in cluster.lines("here") if line.task == sent.id]

    (here,) = wait_until(lines, 5.0, "the body runs")
    assert here.resource == resource
    os.kill(here.pid, signal.SIGKILL)
    worker.said(f"freed {resource}, which {TASKS}.hold_model[{sent.id}] of pid {here.pid} on ")
