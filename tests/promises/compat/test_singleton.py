"""celery-singleton's README, played: its code with the import changed, a real worker and Redis."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_redlock import DuplicateTask
from celery_redlock.compat.singleton import DuplicateTaskError, clear_locks
from tests.support.wait import wait_until

DAY = 24 * 60 * 60


def test_singleton_quick_start_returns_the_queued_result(project: Any, singleton: Any) -> None:
    async_result = singleton.do_stuff.delay(1, 2, 3, a="b")
    async_result2 = singleton.do_stuff.delay(1, 2, 3, a="b")
    assert async_result == async_result2
    assert project.done(async_result) == ["I just woke up"]


def test_singleton_returns_one_result_until_the_task_has_ended(
    project: Any, singleton: Any
) -> None:
    a = singleton.do_stuff.delay(1, 2, 3)
    b = singleton.do_stuff.delay(1, 2, 3)
    assert a == b
    c = singleton.do_stuff.delay(4, 5, 6)
    assert a != c
    project.done(a, c)
    d = singleton.do_stuff.delay(1, 2, 3)
    assert a != d
    assert project.done(d) == ["I just woke up"]


@pytest.mark.parametrize("name", ["do_something", "do_something_named"])
def test_unique_on_compares_the_named_arguments(project: Any, singleton: Any, name: str) -> None:
    """The option is a list of names, or one name."""
    do_something = getattr(singleton, name)
    task1 = do_something.delay(username="bob", otherarg=99)
    task2 = do_something.delay(username="bob", otherarg=100)
    assert task1 == task2
    assert do_something.delay("bob") == task1
    assert do_something.delay("alice") != task1


def test_raise_on_duplicate_raises_with_the_id_of_the_first(project: Any, singleton: Any) -> None:
    task1 = singleton.do_something_raising.delay("bob")
    with pytest.raises(DuplicateTaskError) as raised:
        singleton.do_something_raising.delay("bob")
    error = raised.value
    assert error.task_id == task1.id
    assert str(error) == f"Attempted to queue a duplicate of task ID {task1.id}"
    assert isinstance(error, DuplicateTask)
    assert pickle.loads(pickle.dumps(error)).task_id == task1.id


def test_raise_on_duplicate_of_the_app_applies_to_all_tasks(
    project: Any, singleton: Any, conf: Callable[..., None]
) -> None:
    conf(singleton_raise_on_duplicate=True)
    singleton.do_stuff.delay(1)
    with pytest.raises(DuplicateTaskError):
        singleton.do_stuff.delay(1)
    quietly = singleton.do_something_quietly.delay("bob")
    assert singleton.do_something_quietly.delay("bob") == quietly


def test_lock_expiry_frees_the_key_of_a_queued_task(project: Any, singleton: Any) -> None:
    task1 = singleton.runs_for_12_seconds.apply_async(queue="parked")
    assert singleton.runs_for_12_seconds.apply_async(queue="parked") == task1
    wait_until(lambda: not project.reservations, 2.0, "it has expired", every=0.01)
    assert singleton.runs_for_12_seconds.apply_async(queue="parked") != task1
    project.forget()


def test_lock_expiry_does_not_let_a_second_body_run(project: Any, singleton: Any) -> None:
    """In contrast to celery-singleton, a running task keeps its key until it ends."""
    task1 = singleton.runs_for_12_seconds.delay()
    over = time.monotonic() + 2.2
    wait_until(lambda: time.monotonic() > over, 5.0, "its ttl and its expiry are over twice")
    assert project.active() == [task1.id]
    assert singleton.runs_for_12_seconds.delay() == task1
    project.done(task1)


def test_lock_expiry_of_the_app_is_the_default(
    project: Any, singleton: Any, conf: Callable[..., None]
) -> None:
    """There None was "never"; here it is a day, for messages whose end no process sees."""
    for expiry, seconds in ((None, DAY), (600, 600)):
        conf(singleton_lock_expiry=expiry)
        singleton.do_stuff.apply_async((expiry,), queue="parked")
        assert project.reserved_for() == pytest.approx(seconds, abs=60)
        project.forget()


def test_clear_locks_frees_nothing_and_warns(
    project: Any, singleton: Any, caplog: pytest.LogCaptureFixture
) -> None:
    task1 = singleton.do_stuff.delay(1)
    with caplog.at_level(logging.WARNING):
        clear_locks(project.app)
    assert "clear_locks() does nothing" in caplog.text
    assert singleton.do_stuff.delay(1) == task1
