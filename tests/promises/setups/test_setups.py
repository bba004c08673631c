"""Locked tasks on pytest-celery's broker, backend and worker; see conftest.py for where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pytest_celery import CeleryTestSetup

from celery_redlock.testing import assert_skipped
from tests.support.wait import wait_until

SOON = 30.0
"""Seconds; on a machine that is busy."""

Send = Callable[..., Any]


def test_task_of_a_setup_runs_one_body_at_a_time(celery_setup: CeleryTestSetup, send: Send) -> None:
    assert celery_setup.ready(control=True)
    celery_setup.worker.assert_log_exists("tasks are locked on 3 nodes", timeout=30)
    first = send("a", 2.0)
    celery_setup.worker.wait_for_log("begins a", timeout=30)
    marker = assert_skipped(send("a"), within=SOON)
    assert first.id in marker["holder"] and marker["resource"] == "work:a"
    assert first.get(timeout=SOON) == "worked on a"
    assert send("a").get(timeout=SOON) == "worked on a"


def test_killed_worker_of_a_setup_holds_nothing_for_long(
    celery_setup: CeleryTestSetup, send: Send
) -> None:
    send("a", 600.0)
    celery_setup.worker.wait_for_log("begins a", timeout=30)
    celery_setup.worker.kill()
    assert celery_setup.worker.container.status == "exited"
    celery_setup.worker.restart()
    assert celery_setup.worker.ready()

    def worked() -> bool:
        result = send("a").get(timeout=SOON)
        return bool(result == "worked on a")

    # The lock ends with its ttl, three seconds. Not before the worker has been asked often.
    wait_until(worked, SOON, "it is locked no more")


@pytest.mark.slow
def test_restarted_empty_broker_of_a_setup_frees_no_lock(
    celery_setup: CeleryTestSetup, send: Send
) -> None:
    """The locks are elsewhere."""
    first = send("a", 600.0)
    celery_setup.worker.wait_for_log("begins a", timeout=30)
    celery_setup.broker.restart()
    assert first.id in assert_skipped(send("a"), within=60.0)["holder"]
