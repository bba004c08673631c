"""A message that the broker delivers again while its first body runs: kept out, then done or run.

Over fake nodes, by Celery's own tracer; see test_task.py, whose fixtures these are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import states
from celery.exceptions import Ignore
from celery.worker import state

from celery_redlock import SingletonTask
from celery_redlock.messages.endings import received
from celery_redlock.messages.headers import ATTEMPTS
from celery_redlock.protocol.lease import Lease
from celery_redlock.protocol.values import Owner
from tests.support.delivering import Waits, deliver
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Log, Patch

AGAIN = {"delivery_info": {"redelivered": True}}
COPY = {ATTEMPTS: {"copy": True}}


@pytest.fixture
def first(redlock: FakeRedlock) -> Lease:
    """The lock of the first delivery."""
    return redlock.acquire("k", owner=Owner("here", 1, task_id="the-id", task="copied"))


@pytest.fixture
def declare(app: Any) -> Callable[..., Any]:
    def declare(**options: Any) -> Any:
        app.tasks.pop("copied", None)

        @app.task(name="copied", base=SingletonTask, lock_key="k", **options)
        def task() -> str:
            return "ran"

        task.backend.forget("the-id")  # the memory of this backend is that of all apps
        return task

    return declare


@pytest.mark.parametrize(
    "policy", ["retry", "skip", "raise", "wait", "reject", "replace", lambda *_asked: "skip"]
)
def test_copy_of_a_running_delivery_is_kept_out_by_every_policy(
    first: Lease, declare: Any, sent: list[Any], policy: str
) -> None:
    """The copy waits as long as necessary, because its first delivery may still die."""
    options = {"acks_late": True, "lock_on_deadline": "skip", "lock_wait": 0}
    task = declare(lock_on_conflict=policy, lock_retry_deadline=10.0, **options)
    task.backend.store_result("the-id", None, states.STARTED)
    result, _info = deliver(task, **AGAIN)
    assert isinstance(result, Ignore)
    (again,) = sent
    assert again.options["headers"][ATTEMPTS]["copy"] is True
    result, _info = deliver(task, **{ATTEMPTS: {"copy": True, "since": 0.0}})
    assert isinstance(result, Ignore)
    assert sent[1].options["headers"][ATTEMPTS]["copy"] is True
    # Its state is that of the first: RETRY written over SUCCESS would have it run again.
    assert task.backend.get_state("the-id") == states.STARTED


def test_copy_of_a_running_delivery_looks_again_at_least_every_half_minute(
    first: Lease, declare: Any, sent: list[Any], caplog: Log
) -> None:
    """It should run soon after the first delivery dies, which may be at work for hours."""
    caplog.set_level(logging.INFO)
    task = declare(lock_wait=0)
    for held in range(64):
        deliver(task, **{ATTEMPTS: {"copy": True, "held": held}})
    assert len(sent) == 64
    pauses = [again.options["countdown"] for again in sent]
    ceilings = [1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 59]
    assert all(0.1 <= pause <= most for pause, most in zip(pauses, ceilings, strict=True))
    assert sum(pauses) > 300.0
    assert caplog.text.count("waits (held") == 7  # the first, the second, the fourth ...


@pytest.mark.parametrize(
    ("owner", "request_"),
    [
        ({"task_id": "other", "task": "copied"}, AGAIN),
        ({"task_id": ""}, AGAIN),
        ({"task_id": "the-id", "retries": 1, "task": "copied"}, AGAIN),
        # Somebody gave two messages one id.
        ({"task_id": "the-id", "task": "copied"}, {}),
        ({"task_id": "the-id", "task": "another"}, AGAIN),
    ],
)
def test_deliveries_of_other_tasks_or_retries_are_no_copies(
    redlock: FakeRedlock, declare: Any, sent: list[Any], owner: Any, request_: Any
) -> None:
    redlock.acquire("k", owner=Owner("here", 1, **owner))
    deliver(declare(), **request_)
    (again,) = sent
    assert "copy" not in again.options["headers"][ATTEMPTS]


def test_copy_does_not_run_when_the_first_delivery_has_succeeded(
    declare: Any, redlock: FakeRedlock, caplog: Log
) -> None:
    caplog.set_level(logging.INFO)
    task = declare()
    task.backend.store_result("the-id", "first", states.SUCCESS)
    result, info = deliver(task, **COPY)
    assert isinstance(result, Ignore)
    assert info.state == states.IGNORED
    assert task.backend.get_result("the-id") == "first"
    assert redlock.free("k")
    assert "is done: this was a second delivery" in caplog.text


@pytest.mark.parametrize("before", [None, states.STARTED, states.RETRY, states.FAILURE])
def test_copy_runs_when_the_first_delivery_has_not_succeeded(
    declare: Any, before: str | None
) -> None:
    task = declare()
    if before:
        task.backend.store_result("the-id", None, before)
    assert deliver(task, **COPY)[0] == "ran"


@pytest.mark.parametrize("answer", ["rpc://", OSError("away")])
def test_copy_runs_where_the_result_backend_cannot_answer(
    declare: Any, monkeypatch: Patch, answer: Any
) -> None:
    task = declare()
    task.backend.store_result("the-id", "first", states.SUCCESS)
    asked: list[str] = []

    def ask(task_id: str) -> str:
        asked.append(task_id)
        raise answer

    if answer == "rpc://":
        monkeypatch.setattr(task.backend, "as_uri", lambda: answer)
    else:
        monkeypatch.setattr(task.backend, "get_state", ask)
    assert deliver(task, **COPY)[0] == "ran"
    assert len(asked) == (answer != "rpc://")


def test_copy_ends_quietly_if_the_first_delivery_ends_while_it_waits(
    first: Lease, redlock: FakeRedlock, declare: Any, sent: list[Any], waits: Waits
) -> None:
    """The copy has seen the holder of the lock before it waits in its process."""
    task = declare(lock_wait=0.3)

    def then(wait: float | None) -> None:
        if wait:
            task.backend.store_result("the-id", "first", states.SUCCESS)
            redlock.release(first)

    waits.then = then  # type: ignore[method-assign]
    assert isinstance(deliver(task, **AGAIN)[0], Ignore)
    assert (waits, sent) == ([0.0, 0.3], [])


class Received:
    """A message as a worker's main process has it."""

    def __init__(
        self, task: Any, id: str = "the-id", redelivered: bool = True, body: bytes = b"[[], {}]"
    ) -> None:
        self.task = task
        self.name = task.name
        self.id = id
        self.body = body
        self.delivery_info = {"redelivered": redelivered}
        self.content_type = "application/x-python-serialize"
        self.request_dict: dict[str, Any] = {ATTEMPTS: "forged"}

    @property
    def copy(self) -> bool:
        return self.request_dict[ATTEMPTS] == {"copy": True}


@pytest.fixture
def at_work(declare: Any) -> Iterator[Received]:
    """A request whose body runs in this worker."""
    request = Received(declare(), redelivered=False)
    state.active_requests.add(request)
    yield request
    state.active_requests.discard(request)


def test_main_process_recognises_a_copy_of_a_running_message(
    at_work: Received, declare: Any
) -> None:
    again = Received(declare())
    received(again)
    assert again.copy
    assert deliver(again.task, **again.request_dict)[0] == "ran"
    again.task.backend.store_result("the-id", "first", states.SUCCESS)
    assert isinstance(deliver(again.task, **again.request_dict)[0], Ignore)


def test_main_process_takes_no_other_message_for_a_copy(
    at_work: Received, declare: Any, app: Any
) -> None:
    received(at_work)
    others = [
        Received(declare(), id="other"),
        Received(declare(), redelivered=False),
        Received(declare(), body=b"[[1], {}]"),  # somebody gave two messages one id
    ]
    others.append(Received(declare()))
    others[-1].name = "another"

    @app.task(name="unlocked")
    def unlocked() -> None: ...

    others.append(Received(unlocked))
    for request in others:
        received(request)
    assert not any(request.copy for request in (at_work, *others))
    assert others[0].request_dict[ATTEMPTS] == "forged"
    assert others[-1].request_dict == {ATTEMPTS: "forged"}
