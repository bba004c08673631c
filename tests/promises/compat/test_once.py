"""celery-once's README, played: its code with the import changed, a real worker, a real Redis."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from celery import chord, states

from celery_redlock import ConfigurationError, DuplicateTask, Skipped
from celery_redlock.compat.once import AlreadyQueued
from tests.support.wait import wait_until

HOUR = 60 * 60


def test_queue_once_raises_until_the_first_call_has_ended(project: Any, once: Any) -> None:
    first = once.example.delay(10)
    with pytest.raises(AlreadyQueued):
        once.example.delay(10)
    with pytest.raises(AlreadyQueued):
        once.example.apply_async(args=(10,))
    assert project.done(first) == [10]
    again = once.example.apply_async(args=(10,))
    assert again.id != first.id
    assert project.done(again) == [10]


def test_already_queued_error_has_the_time_left(project: Any, once: Any) -> None:
    """The time is what is left of the reservation, of a queued task and of a running one."""
    later = once.slow_add.apply_async((3, 3), queue="parked", once={"timeout": 99})
    with pytest.raises(AlreadyQueued) as raised:
        once.slow_add.delay(3, 3)
    assert 60 < raised.value.countdown <= 99
    project.unpark()
    first = once.slow_task.delay()
    wait_until(lambda: first.id in project.active(), 5.0, "it runs", every=0.02)
    with pytest.raises(AlreadyQueued) as raised:
        once.slow_task.delay()
    error = raised.value
    assert 0 < error.countdown <= 30
    assert error.message == f"Expires in {error.countdown} seconds"
    assert isinstance(error, DuplicateTask) and error.task_id == first.id
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.countdown, copy.message, copy.task_id) == (
        error.countdown,
        error.message,
        first.id,
    )
    assert project.done(first, later) == ["Done!", 6]


def test_queue_once_key_is_free_after_an_exception(project: Any, once: Any) -> None:
    first = once.fails.delay()
    with pytest.raises(AlreadyQueued):
        once.fails.delay()
    project.wake.touch()
    assert project.state(first) == "FAILURE"
    project.nothing_reserved()
    assert once.fails.delay().id != first.id


def test_graceful_option_of_a_call_returns_a_rejected_result(project: Any, once: Any) -> None:
    first = once.example.delay(10)
    result = once.example.apply_async(args=(10,), once={"graceful": True})
    assert result.result is None
    assert result.state == states.REJECTED
    with pytest.raises(AlreadyQueued):
        once.example.delay(10)
    assert project.done(first) == [10]


def test_graceful_option_of_a_task_can_be_overridden_by_a_call(project: Any, once: Any) -> None:
    first = once.graceful_task.delay()
    assert once.graceful_task.delay().result is None
    with pytest.raises(AlreadyQueued):
        once.graceful_task.apply_async(once={"graceful": False})
    assert project.done(first) == ["Done!"]


def test_apply_accepts_the_once_option(project: Any, once: Any) -> None:
    """`apply` runs in this process, where nothing is queued."""
    project.wake.touch()
    assert once.example.apply(args=(10,), once={"graceful": True}).get() == 10


def test_queue_once_with_other_arguments_has_another_key(project: Any, once: Any) -> None:
    sent = [once.slow_add.delay(1, 1), once.slow_add.delay(1, 2)]
    with pytest.raises(AlreadyQueued):
        once.slow_add.delay(1, b=2)
    assert project.done(*sent) == [2, 3]


def test_direct_call_of_queue_once_is_not_affected(project: Any, once: Any) -> None:
    sent = once.slow_add.apply_async((1, 1), queue="parked")
    project.wake.touch()
    assert once.slow_add(1, 1) == 2
    project.unpark()
    assert project.done(sent) == [2]


def test_queue_once_refuses_an_argument_without_a_stable_text(project: Any, once: Any) -> None:
    """celery-once took its `str()`, so that no key was ever found again."""
    with pytest.raises(ConfigurationError, match=r"argument 'a' of .*slow_add .*lock_key"):
        once.slow_add.apply_async((object(), 1), queue="parked", serializer="pickle")
    assert project.parked == []
    assert project.reservations == {}


def test_queue_once_compares_the_named_keys(project: Any, once: Any) -> None:
    first = once.slow_add_a.delay(1, 1)
    with pytest.raises(AlreadyQueued):
        once.slow_add_a.delay(1, 2)
    other = once.slow_add_a.delay(2, 2)
    assert project.done(first, other) == [2, 4]


def test_queue_once_with_empty_keys_has_one_key_for_the_task(project: Any, once: Any) -> None:
    first = once.slow_add_none.delay(1, 1)
    with pytest.raises(AlreadyQueued):
        once.slow_add_none.delay(2, 2)
    other = once.slow_add.delay(1, 1)
    assert project.done(first, other) == [2, 2]


def test_queue_once_timeout_comes_from_task_call_or_settings(
    project: Any, once: Any, conf: Callable[..., None]
) -> None:
    """The message has no worker."""

    def reserved(task: Any, **options: Any) -> float:
        task.apply_async(queue="parked", **options)
        seconds = project.reserved_for()
        project.forget()
        return seconds

    assert reserved(once.long_running_task) == pytest.approx(10 * HOUR, abs=60)
    assert reserved(once.long_running_task, once={"timeout": 900}) == pytest.approx(900, abs=60)
    assert reserved(once.slow_task) == pytest.approx(HOUR, abs=60)
    conf(ONCE={**project.conf["ONCE"], "settings": {"default_timeout": 7 * HOUR}})
    assert reserved(once.slow_task) == pytest.approx(7 * HOUR, abs=60)


def test_queue_once_message_outlives_its_reservation(project: Any, once: Any) -> None:
    """It does not expire, and runs once there is a worker, unless another task has its key."""
    sent = once.slow_task.apply_async(queue="parked", once={"timeout": 0.1})
    assert [headers["expires"] for headers in project.parked] == [None]
    project.nothing_reserved()
    project.unpark()
    assert project.done(sent) == ["Done!"]


def test_unlock_before_run_frees_the_key_when_the_body_begins(project: Any, once: Any) -> None:
    """One may be queued; while its body runs, another one may be queued, and run beside it."""
    first = once.unlocked_task.apply_async(queue="parked")
    with pytest.raises(AlreadyQueued):
        once.unlocked_task.delay()
    project.unpark()
    project.nothing_reserved()
    second = once.unlocked_task.delay()
    assert second.id != first.id
    wait_until(lambda: len(project.active()) == 2, 5.0, "both run", every=0.05)
    assert project.done(first, second) == ["Done!", "Done!"]


def test_queue_once_base_class_with_its_own_call_runs_it(project: Any, once: Any) -> None:
    assert project.done(once.example_task.delay(1)) == ["inside"]


def test_duplicate_in_a_chord_of_queue_once_ends_with_the_marker(project: Any, once: Any) -> None:
    """celery-once raised in the producer, or hung."""
    first = once.slow_task.delay()
    sent = chord([once.slow_task.s(), once.slow_add.s(1, 1)], project.sink.s()).apply_async()
    wait_until(
        lambda: any(
            Skipped.of(project.app.backend.get_task_meta(one.id)["result"])
            for one in sent.parent.results
        ),
        5.0,
        "the duplicate has ended",
        every=0.02,
    )
    (skipped, total), _done = project.done(sent, first)
    assert Skipped.of(skipped) and total == 2
