"""Five nodes, a lock over them, and the commands that look at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from celery_redlock import Redlock
from celery_redlock.cli import main
from celery_redlock.server import LocalServer
from tests.support.nodes import all_connected


@pytest.fixture
def redlock(servers: list[LocalServer]) -> Iterator[Redlock]:
    """A lock over the five servers."""
    lock = Redlock([server.url for server in servers], ttl=20)
    yield all_connected(lock)
    lock.close()


@pytest.fixture
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer for all workers at once; tests/promises/worker/test_inspect.py has real ones."""
    monkeypatch.setattr("celery_redlock.doctor.workers.ask", lambda *_: ({}, "no worker was asked"))


@pytest.fixture
def cli(servers: list[LocalServer]) -> Callable[..., Any]:
    """Calls a command, on these nodes."""
    nodes = ",".join(server.url for server in servers)
    return lambda *arguments, **how: CliRunner().invoke(main, ["--nodes", nodes, *arguments], **how)
