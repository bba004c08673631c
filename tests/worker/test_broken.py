"""Faults that once broke the lock from within: replaced tasks, annotations, solo workers."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, _state

from celery_redlock import ConfigurationError, SingletonTask
from celery_redlock.config.options import TaskOptions
from celery_redlock.locking.redlock import Redlock
from celery_redlock.locking.stack import release_leftovers
from celery_redlock.messages.delivery import Delivery
from celery_redlock.protocol.values import Owner
from celery_redlock.server import start_servers


def test_replaced_task_waits_for_its_predecessor() -> None:
    class Request(dict[str, Any]):
        id = "one"
        retries = 0
        parent_id = None

    def predecessor(request: Request, task_id: str) -> bool:
        delivery = Delivery.__new__(Delivery)
        delivery._request = request
        return delivery._predecessor(Owner("host", 1, task_id))

    assert predecessor(Request(replaced_task_nesting=1), "one")
    assert not predecessor(Request(replaced_task_nesting=1), "other")
    assert not predecessor(Request(replaced_task_nesting=0), "one")  # another delivery of it


@pytest.fixture(autouse=True)
def no_tasks_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tasks are shared with every app to come, unless that is undone.
    monkeypatch.setattr(_state, "_on_app_finalizers", set())


def annotated(**options: Any) -> Any:
    app = Celery(broker="memory://", set_as_current=False)
    app.conf.update(redlock_nodes=["redis://127.0.0.1:1"], task_annotations={"annotated": options})

    @app.task(base=SingletonTask, name="annotated", lock_key="k:{key}", lock_ttl=5)
    def task(key: str) -> None: ...

    app.finalize()
    return task


def test_annotations_set_options_of_the_lock() -> None:
    task = annotated(lock_ttl=0.7)
    options: TaskOptions = task.redlock.options(task.app)
    assert (options.ttl, options.key) == (0.7, "k:{key}")


def test_invalid_annotations_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="lock_ttl"):
        annotated(lock_ttl=-1)


def test_end_of_a_delivery_leaves_the_programs_own_lock_alone() -> None:
    with start_servers(1) as (server,):
        redlock = Redlock([server.url])
        stamped = redlock.lock("left", owner=Owner("host", 1, "task", stamp="stamp"))
        stamped.acquire()
        with redlock.lock("own") as own:
            release_leftovers()
            assert not own.lost
            assert stamped.lost
        redlock.close()
