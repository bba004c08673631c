"""`autoretry_for` beside a lock: it retries what the body raises, and no refusal of the lock.

Over fake nodes, by Celery's own tracer. Every way to declare a lock means the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from celery import states
from celery.exceptions import Reject, Retry

from celery_redlock import (
    ConfigurationError,
    DuplicateTask,
    LeaseLost,
    QuorumUnavailable,
    ResourceHeld,
    SingletonTask,
    Skipped,
    current_lease,
    locked,
)
from celery_redlock.config.task_lock import resources_of
from tests.support.delivering import deliver, rob, take
from tests.support.fake_lock import FakeRedlock

WAYS = ("under", "over", "class", "under bound", "over bound", "class bound", "under another")
KEY = "order:1"
Make = Callable[..., Any]


@pytest.fixture(params=WAYS)
def make(request: pytest.FixtureRequest, app: Any) -> Make:
    """Declare a task with autoretry and a lock."""
    way, _, more = request.param.partition(" ")

    def make(body: Callable[..., Any], **options: Any) -> Any:
        given = {"name": "charge", "shared": False, "max_retries": 3, "default_retry_delay": 1}
        given |= {name: options.pop(name) for name in ("acks_late",) if name in options}
        given["autoretry_for"] = options.pop("autoretry_for", (Exception,))

        def charge(order: Any) -> Any:
            return body()

        def bound(self: Any, order: Any) -> Any:
            return body()

        function = bound if more == "bound" else charge
        given["bind"] = more == "bound"
        if way == "class":
            prefixed = {f"lock_{name}": value for name, value in options.items()}
            given |= {"base": SingletonTask, "lock_key": "order:{order}"}
            return app.task(**given, **prefixed)(function)
        lock = locked("order:<order>", **options)
        if way == "over":
            return lock(app.task(**given)(function))
        return app.task(**given)(other(lock(function)) if more == "another" else lock(function))

    return make


def other(function: Callable[..., Any]) -> Callable[..., Any]:
    """Another decorator between the two."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def ran() -> str:
    return "ran"


def test_conflict_policy_raise_fails_a_task_with_autoretry(
    make: Make, redlock: FakeRedlock, sent: list[Any]
) -> None:
    redlock.acquire(KEY)
    result, info = deliver(make(ran, on_conflict="raise"), 1)
    assert isinstance(result, ResourceHeld)
    assert info.state == states.FAILURE
    assert sent == []


def test_conflict_policy_reject_rejects_a_task_with_autoretry(
    make: Make, redlock: FakeRedlock, sent: list[Any]
) -> None:
    redlock.acquire(KEY)
    result, _info = deliver(make(ran, on_conflict="reject", acks_late=True), 1)
    assert isinstance(result, Reject)
    assert sent == []


def test_a_missing_quorum_fails_a_task_that_retries_its_exceptions(
    make: Make, redlock: FakeRedlock, sent: list[Any]
) -> None:
    nodes: Any = redlock.driver
    nodes.dead |= {0, 1, 2}
    result, _info = deliver(make(ran, on_unavailable="raise"), 1)
    assert isinstance(result, QuorumUnavailable)
    assert sent == []


@pytest.mark.parametrize("scope", ["until_executed", "until_and_while_executing"])
def test_duplicate_of_a_task_with_autoretry_fails_as_duplicate(
    make: Make, redlock: FakeRedlock, sent: list[Any], scope: Any
) -> None:
    task = make(ran, scope=scope, on_duplicate="raise")
    take(redlock, "another", task="charge")
    result, _info = deliver(task, 1)
    assert isinstance(result, DuplicateTask)
    assert sent == []


def test_a_key_that_cannot_be_made_fails_a_task_that_retries_its_exceptions(
    make: Make, sent: list[Any]
) -> None:
    result, _info = deliver(make(ran), object())
    assert isinstance(result, ConfigurationError)
    assert sent == []


def test_waiting_spends_no_retry_of_a_task_that_retries_its_exceptions(
    make: Make, redlock: FakeRedlock, sent: list[Any]
) -> None:
    redlock.acquire(KEY)
    assert isinstance(deliver(make(ran), 1)[0], Retry)
    assert [again.options["retries"] for again in sent] == [0]


def test_conflict_policy_skip_skips_a_task_with_autoretry(make: Make, redlock: FakeRedlock) -> None:
    redlock.acquire(KEY)
    assert Skipped.of(deliver(make(ran, on_conflict="skip"), 1)[0]) is not None


def test_exceptions_of_the_body_are_retried_under_a_lock(
    make: Make, redlock: FakeRedlock, sent: list[Any]
) -> None:
    def body() -> None:
        assert current_lease().resource == KEY
        raise ValueError

    result, _info = deliver(make(body, on_conflict="raise"), 1)
    assert isinstance(result, Retry)
    assert [again.options["retries"] for again in sent] == [1]
    assert redlock.free(KEY)


def test_refusal_of_a_lock_taken_in_the_body_is_retried(
    make: Make, redlock: FakeRedlock, sent: list[Any]
) -> None:
    """The refusal is an exception of the body."""
    redlock.acquire("another")

    def body() -> None:
        with redlock.lock("another"):
            pass

    task = make(body, on_conflict="raise", autoretry_for=(ResourceHeld,))
    result, _info = deliver(task, 1)
    assert isinstance(result, Retry)
    assert [again.options["retries"] for again in sent] == [1]


@pytest.mark.parametrize("kinds", [(Exception,), (LeaseLost,)])
def test_a_body_that_returns_after_its_lease_was_lost_is_retried(
    make: Make, redlock: FakeRedlock, sent: list[Any], kinds: Any
) -> None:
    """`LeaseLost` is an exception of the body, though it is raised after the body has returned."""
    task = make(lambda: rob(redlock, KEY) or redlock.clock.advance(60.0), autoretry_for=kinds)
    result, _info = deliver(task, 1)
    assert isinstance(result, Retry)
    assert isinstance(result.exc, LeaseLost)
    assert [again.options["retries"] for again in sent] == [1]


def test_a_task_with_autoretry_takes_its_lock_once(make: Make, redlock: FakeRedlock) -> None:
    """Taken twice, it would count as two starts under a rate."""
    driver: Any = redlock.driver
    assert deliver(make(ran), 1)[0] == "ran"
    assert driver.rounds.count("acquire") == 1


def test_a_task_with_autoretry_that_calls_itself_shares_its_lock(
    make: Make, redlock: FakeRedlock
) -> None:
    calls: list[bool] = []

    def body() -> str:
        calls.append(redlock.free(KEY))
        return "inner" if len(calls) > 1 else str(task(1))

    task = make(body)
    assert deliver(task, 1)[0] == "inner"
    assert calls == [False, False]
    assert redlock.free(KEY)


def test_a_plain_call_of_a_task_with_autoretry_raises_its_refusal(
    make: Make, redlock: FakeRedlock
) -> None:
    task = make(ran)
    assert task(1) == "ran"
    redlock.acquire(KEY)
    with pytest.raises(ResourceHeld):
        task(1)


def test_the_key_of_a_task_with_autoretry_is_known_outside_of_a_call(make: Make) -> None:
    """Parking, reservations and the commands need it."""
    assert resources_of(make(ran), (1,), {}) == (KEY,)
