"""Canvas in eager mode: all runs in the caller, under its locks; nothing is reserved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_redlock import Redlock, ResourceHeld
from tests.promises.canvas import tasks
from tests.promises.canvas.cells import CELLS, SELVES, Cell, Self
from tests.promises.canvas.play import Maker, expected, expected_of_itself
from tests.promises.canvas.tasks import POLICIES, Policy, show
from tests.support.names import Servers

EAGER = [cell for cell in CELLS if cell.eager]
EAGER_SELVES = [cell for cell in SELVES if not cell.one]  # as Cell.eager


@pytest.fixture(scope="module")
def app(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path: Path = tmp_path_factory.mktemp("eager") / "bodies.log"
    app = tasks.make_app(
        {
            "broker_url": "memory://",
            "result_backend": "cache+memory://",
            "task_always_eager": True,
            "task_store_eager_result": True,
            "redlock_nodes": [server.url for server in servers],
            "redlock_restart_guard": "off",
            "redlock_wait": 0.01,
            "test_log": str(path),
        }
    )
    yield app
    Redlock.from_app(app).close()
    app.close()


@pytest.fixture
def nothing_is_left(servers: Servers) -> Iterator[None]:
    yield
    for server in servers:
        with redis.Redis(port=server.port) as client:
            assert client.keys("redlock:*") == []


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_eager_canvas_runs_to_its_end(app: Any, policy: Policy, nothing_is_left: None) -> None:
    for cell in EAGER:
        maker = Maker(app, policy)
        assert show(cell.publish(maker).get(timeout=5.0)) == expected(policy, cell, "nobody")


@pytest.mark.parametrize("cell", EAGER_SELVES, ids=[cell.name for cell in EAGER_SELVES])
def test_eager_canvas_of_duplicates_runs_one_after_another(
    app: Any, cell: Self, nothing_is_left: None
) -> None:
    policy = POLICIES["while_executing_retry"]
    maker = Maker(app, policy)
    assert show(cell.publish(maker).get(timeout=5.0)) in expected_of_itself(policy, cell)


@pytest.mark.parametrize("cell", EAGER, ids=[cell.name for cell in EAGER])
def test_eager_canvas_whose_lock_is_held_raises(app: Any, servers: Servers, cell: Cell) -> None:
    maker = Maker(app, POLICIES["while_executing_retry"])
    other = Redlock([server.url for server in servers])
    with other.lock(f"k:{maker.key}"), pytest.raises(ResourceHeld):
        cell.publish(maker).get(timeout=5.0)
    other.close()
