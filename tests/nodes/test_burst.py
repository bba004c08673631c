"""Tasks that are published one after the other: their reservations are made to last together."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from celery import Celery

from celery_redlock import Redlock, SingletonTask
from celery_redlock.messages.reservation import UNSENT_TTL_S
from celery_redlock.worker import startup
from tests.support.names import Servers
from tests.support.nodes import admin
from tests.support.wait import wait_until

COUNT = 60


def app_on(nodes: list[str]) -> Any:
    app = Celery("burst", broker="memory://", set_as_current=False)
    app.conf.update(redlock_nodes=nodes, redlock_restart_guard="off", task_ignore_result=True)
    return app


def publish(app: Any, count: int = COUNT) -> None:
    @app.task(base=SingletonTask, name="one", lock_key="burst:{n}", lock_scope="until_executing")
    def one(n: int) -> None: ...

    for number in range(count):
        one.delay(number)


def lasting(servers: Servers) -> int:
    """Return how many reservations on the first node outlast the time of an unsent message."""
    with admin(servers[0]) as node:
        left = [node.pttl(f"redlock:burst:{n}#reserved") for n in range(COUNT)]
    return sum(ttl > 2000 * UNSENT_TTL_S for ttl in left)


def renewals(servers: Servers) -> int:
    with admin(servers[0]) as node:
        return int(node.info("commandstats").get("cmdstat_eval", {}).get("calls", 0))


def test_reservations_of_a_burst_are_prolonged_soon_with_few_requests(servers: Servers) -> None:
    app = app_on([server.url for server in servers])
    before = renewals(servers)
    publish(app)
    wait_until(lambda: lasting(servers) == COUNT, 10.0, "all are made to last")
    assert renewals(servers) - before < COUNT * 0.8
    Redlock.from_app(app).close()


def test_single_reservation_is_prolonged_at_once(servers: Servers) -> None:
    app = app_on([server.url for server in servers])
    publish(app, 1)
    # At once where it was acknowledged in time; 0.3 s later elsewhere.
    wait_until(lambda: lasting(servers) == 1, 10.0, "it is made to last", every=0.001)


def test_program_that_ends_at_once_prolongs_all_its_reservations(servers: Servers) -> None:
    code = f"""
from celery_redlock.locking import prolonging
from {__name__} import *

prolonging.READ_AFTER_S = 60.0
publish(app_on({[server.url for server in servers]}))
"""
    environment = {**os.environ, "PYTHONPATH": "."}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)
    wait_until(lambda: lasting(servers) == COUNT, 3.0, "all are made to last")


def test_pool_child_that_ends_prolongs_all_its_reservations(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_on([server.url for server in servers])
    monkeypatch.setattr("celery_redlock.locking.prolonging.READ_AFTER_S", 60.0)
    monkeypatch.setattr("celery._state.get_current_app", lambda: app)
    publish(app)
    assert lasting(servers) < COUNT
    startup.disconnect()  # a handler of `worker_process_shutdown`
    wait_until(lambda: lasting(servers) == COUNT, 3.0, "all are made to last")
    Redlock.from_app(app).close()
