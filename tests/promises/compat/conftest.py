"""A node, a broker, a worker and a sender of a project that has just changed its imports."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from celery_redlock import Redlock
from celery_redlock.server import LocalServer, start_servers
from tests.promises.compat.project import WAKE, define
from tests.support.cluster import Cluster
from tests.support.wait import wait_until


class Moved(Cluster):
    """The sender of a project whose locks are where celery-once's were: on one Redis."""

    def __init__(self, node: LocalServer, broker: LocalServer, path: Path) -> None:
        once = {
            "backend": "celery_once.backends.Redis",
            "settings": {"url": node.url, "default_timeout": 60 * 60},
        }
        super().__init__(
            [node],
            broker,
            path,
            tasks="tests.promises.compat.at_work",
            ONCE=once,
            redlock_nodes=None,
        )
        made = define(self.app)
        self.once, self.singleton, self.sink = made.once, made.singleton, made.sink
        self.wake = path / "wake"

    def close(self) -> None:
        Redlock.from_app(self.app).close()
        super().close()

    @property
    def reservations(self) -> dict[str, float]:
        """Return the reservations on the node, and the seconds left of each."""
        with redis.Redis(port=self.nodes[0].port) as client:
            names = client.keys("*#reserved")
            return {name.decode(): client.pttl(name) / 1000 for name in names}

    @property
    def parked(self) -> list[dict[str, Any]]:
        """The headers of the messages that no worker takes."""
        return [json.loads(one)["headers"] for one in self.client.lrange("parked", 0, -1)]

    def reserved_for(self) -> float:
        """Return the ttl of the only reservation, once its message is out."""
        wait_until(lambda: min(self.reservations.values()) > 60.0, 5.0, "it is made to last")
        (seconds,) = self.reservations.values()
        return seconds

    def forget(self) -> None:
        """Delete parked messages and their reservations."""
        self.client.delete("parked")
        with redis.Redis(port=self.nodes[0].port) as client:
            client.flushall()

    def active(self) -> list[str]:
        """The ids of the tasks whose bodies run."""
        found = self.app.control.inspect(timeout=0.3).active() or {}
        return [task["id"] for tasks in found.values() for task in tasks]

    def done(self, *sent: Any) -> list[Any]:
        """Wake the tasks; return their results, and check that no reservation is left."""
        self.wake.touch()
        results = [self.result(one) for one in sent]
        self.nothing_reserved()
        return results

    def nothing_reserved(self) -> None:
        wait_until(lambda: not self.reservations, 2.0, "nothing is reserved", every=0.01)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moved]:
    path = tmp_path_factory.mktemp("compat")
    os.environ[WAKE] = str(path / "wake")  # of the worker as well, which inherits it
    with start_servers(2) as (node, broker):
        project = Moved(node, broker, path)
        with project.worker("-c", "3"):
            yield project
        project.close()
    del os.environ[WAKE]


@pytest.fixture(autouse=True)
def _asleep(project: Moved) -> Iterator[None]:
    """Tasks sleep until they are woken; after each test nothing is queued, running or reserved."""
    project.wake.unlink(missing_ok=True)
    yield
    project.done()
    project.settled()


@pytest.fixture
def once(project: Moved) -> SimpleNamespace:
    return project.once


@pytest.fixture
def singleton(project: Moved) -> SimpleNamespace:
    return project.singleton


@pytest.fixture
def conf(project: Moved) -> Iterator[Callable[..., None]]:
    """Changes the sender's settings for one test."""
    before: dict[str, Any] = {}

    def change(**settings: Any) -> None:
        for name, value in settings.items():
            before.setdefault(name, project.app.conf.get(name))
            project.app.conf[name] = value

    yield change
    project.app.conf.update(before)
