"""Error callbacks (`link_error`) that are locked tasks: called where their lock is free, else sent.

Over fake nodes: failing tasks by Celery's own tracer, messages over a broker in memory.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import Task, states
from celery.app.task import Context
from celery.exceptions import Reject, Retry
from kombu.exceptions import OperationalError

from celery_redlock import ResourceHeld, SingletonTask, Skipped, locked
from celery_redlock.config.failure import FAILED, pack, unpack
from celery_redlock.config.task_lock import resources_of
from celery_redlock.locking.pauses import Pause
from celery_redlock.messages import conflict
from tests.support.delivering import Box, deliver
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Log, Patch

KEY = "ledger:1"
WAYS = ("under", "over", "class", "under, own base", "over, own base", "under, app's class")


class Running(Task):  # type: ignore[type-arg]
    """A task class as Flask's documentation makes one: its `__call__` calls `run` alone."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class Books:
    """A task that fails, and error callbacks that note what they were called with."""

    def __init__(self, app: Any, redlock: FakeRedlock) -> None:
        self.app, self.redlock = app, redlock
        self.calls: list[tuple[Any, ...]] = []
        self.locked: list[bool] = []

        @app.task(name="charge", shared=False)
        def charge(*_args: Any) -> None:
            raise ValueError("no money", 7)

        self.charge = charge

    def compensate(self, way: str = "under", key: str = "ledger:<order>", **options: Any) -> Any:
        """Declare an error callback."""

        def body(request: Any, exc: Any, traceback: Any, order: Any) -> str:
            self.locked.append(not self.redlock.free(KEY))
            self.calls.append((request, exc, traceback, order))
            return "compensated"

        given = {name: options.pop(name) for name in ("acks_late",) if name in options}
        way, _comma, how = way.partition(", ")
        if how == "app's class":
            self.app.Task = Running
        elif how:
            given["base"] = Running
        task = self.app.task(name="compensate", shared=False, **given)
        if way == "under":
            return task(locked(key, **options)(body))
        if way == "over":
            return locked(key, **options)(task(body))
        options = {f"lock_{name}": value for name, value in options.items()}
        given |= {"name": "compensate", "shared": False, "base": SingletonTask, "lock_key": key}
        return self.app.task(**given, **options)(body)

    def fail(self, *errbacks: Any, args: tuple[Any, ...] = (), **request: Any) -> None:
        _result, info = deliver(self.charge, *args, errbacks=list(errbacks), **request)
        assert info.state == states.FAILURE

    def deliver(self, message: Any, task: Any = None) -> tuple[Any, Any]:
        """Deliver a message that was sent, as a pool child does."""
        args, kwargs, _embed = message.decode()
        assert kwargs == {}
        task = task or self.app.tasks[message.headers["task"]]
        headers = {name: value for name, value in message.headers.items() if name != "task"}
        return deliver(task, *args, **{**headers, "id": "the-id"})


@pytest.fixture
def books(app: Any, redlock: FakeRedlock, box: Box) -> Books:
    return Books(app, redlock)


@pytest.mark.parametrize("way", WAYS)
def test_error_callback_whose_key_is_free_is_called_where_the_task_failed(
    books: Books, box: Box, way: str
) -> None:
    books.fail(books.compensate(way).s(1))
    ((request, exc, traceback, order),) = books.calls
    assert (request.id, request.task, exc.args, order) == ("the-id", "charge", ("no money", 7), 1)
    assert "ValueError" in traceback
    assert books.locked == [True]
    assert books.redlock.free(KEY)
    assert box.messages() == []


@pytest.mark.parametrize("way", WAYS)
def test_error_callback_whose_key_is_held_is_sent_as_a_task(
    books: Books, box: Box, caplog: Log, way: str
) -> None:
    caplog.set_level("INFO")
    lease = books.redlock.acquire(KEY)
    books.fail(books.compensate(way).s(1), args=(5,), tenant="acme", root_id="the-root")
    assert books.calls == []
    message = box.message()
    assert message.headers["task"] == "compensate"
    assert message.headers["parent_id"] == "the-id"
    assert message.headers["root_id"] == "the-root"
    assert (
        f"compensate, the error callback of charge[the-id], waits, as task {message.headers['id']}:"
        f" {KEY} is held"
    ) in caplog.text
    # It is a task as any other: while the key is held, it waits.
    assert isinstance(books.deliver(message)[0], Retry)
    books.redlock.release(lease)
    assert books.deliver(message)[0] == "compensated"
    ((request, exc, traceback, order),) = books.calls
    assert isinstance(request, Context)
    assert (request.id, request.task, request.args) == ("the-id", "charge", [5])
    assert request.get("tenant") == "acme"
    assert (type(exc), exc.args, order) == (ValueError, ("no money", 7), 1)
    assert "ValueError" in traceback
    assert books.locked == [True]


def test_error_callback_of_several_failed_tasks_is_sent_for_each(books: Books, box: Box) -> None:
    """Even if its signature has an id: messages of one id count as one."""
    books.redlock.acquire(KEY)
    callback = books.compensate().s(1).set(task_id="mine")
    books.fail(callback)
    books.fail(callback)
    first, second = (message.headers["id"] for message in box.messages())
    assert first != second


def test_error_callback_without_a_quorum_is_sent_as_a_task(books: Books, box: Box) -> None:
    callback = books.compensate().s(1)
    dead: Any = books.redlock.driver
    dead.dead |= {0, 1, 2}
    books.fail(callback)
    assert box.message().headers["task"] == "compensate"


def test_error_callback_whose_key_is_paused_is_sent_as_a_task(
    books: Books, box: Box, monkeypatch: Patch
) -> None:
    pause = Pause("name", "token", "ledger:*", "me", "the audit", 0, 0.0, 60.0, 0.0)
    monkeypatch.setattr("celery_redlock.messages.run.paused", lambda *_: pause)
    books.fail(books.compensate().s(1))
    assert books.calls == []
    assert box.message().headers["task"] == "compensate"


def test_error_callback_does_not_wait_where_the_task_failed(
    books: Books, box: Box, monkeypatch: Patch
) -> None:
    asked: list[float] = []
    acquire = books.redlock.client.acquire

    def spy(request: Any, *args: Any) -> Any:
        asked.append(request.wait)
        return acquire(request, *args)

    monkeypatch.setattr(books.redlock.client, "acquire", spy)
    books.redlock.acquire(KEY, wait=1.0)
    books.fail(books.compensate(wait=5.0).s(1))
    assert asked[1:] == [0.0]
    assert len(box.messages()) == 1


@pytest.mark.parametrize("policy", ["skip", "raise", "reject", lambda *_: "skip"])
@pytest.mark.parametrize("way", WAYS)
def test_error_callback_sent_as_a_task_ends_as_its_policy_says(
    books: Books, box: Box, caplog: Log, policy: Any, way: str
) -> None:
    caplog.set_level("INFO")
    books.redlock.acquire(KEY)
    late = {"acks_late": True} if policy == "reject" else {}
    callback = books.compensate(way, on_conflict=policy, **late)
    books.fail(callback.s(1))
    result, info = books.deliver(box.message(), callback)
    assert books.calls == []
    if policy == "raise":
        assert isinstance(result, ResourceHeld)
        assert info.state == states.FAILURE
    elif policy == "reject":
        assert isinstance(result, Reject)
        assert "compensate[the-id] is rejected" in caplog.text
    else:
        assert Skipped.of(result) is not None
        assert "compensate[the-id] is skipped" in caplog.text


@pytest.mark.parametrize(
    "scope", ["until_executed", "until_succeeded", "until_and_while_executing"]
)
def test_error_callback_with_a_scope_reserves_its_key_if_it_is_sent(
    books: Books, box: Box, caplog: Log, scope: Any
) -> None:
    """If another task has reserved the key, it is sent all the same and skipped with a log line."""
    caplog.set_level("INFO")
    callback = books.compensate(scope=scope)
    books.fail(callback.s(1))
    assert len(books.calls) == 1
    lease = books.redlock.acquire(KEY)
    books.fail(callback.s(1))
    books.fail(callback.s(1))
    first, second = box.messages()
    assert first.headers["redlock_reservation"]["token"]
    assert not second.headers["redlock_reservation"].get("token")
    books.redlock.release(lease)
    assert Skipped.of(books.deliver(second, callback)[0]) is not None
    assert f"compensate[the-id] is skipped: {KEY} is reserved" in caplog.text
    assert len(books.calls) == 1


def test_error_callback_that_frees_its_key_when_it_begins_is_called_at_once(
    books: Books, box: Box
) -> None:
    books.redlock.acquire(KEY)
    books.fail(books.compensate(scope="until_executing").s(1))
    assert len(books.calls) == 1
    assert box.messages() == []


def test_error_callback_with_arguments_of_its_own_alone_is_sent_with_these(
    books: Books, box: Box
) -> None:
    """Celery calls an `.si()` without arguments of the failed task."""
    ran: list[Any] = []

    @books.app.task(name="clean", shared=False)
    @locked("ledger:<order>")
    def clean(order: Any, why: Any) -> None:
        ran.append((order, why))

    lease = books.redlock.acquire(KEY)
    books.fail(clean.si(1, "failed"))
    message = box.message()
    assert message.decode()[0] == [1, "failed"]
    books.redlock.release(lease)
    books.deliver(message)
    assert ran == [(1, "failed")]


def test_error_callback_with_the_key_of_the_failed_task_runs_under_its_lock(
    books: Books, box: Box
) -> None:
    @books.app.task(name="pay", base=SingletonTask, lock_key="ledger:{order}", shared=False)
    def pay(order: Any) -> None:
        raise ValueError

    callback = books.compensate()
    deliver(pay, 1, errbacks=[callback.s(1)])
    assert len(books.calls) == 1
    assert books.locked == [True]
    assert books.redlock.free(KEY)


@pytest.mark.parametrize("base", [Task, Running])
@pytest.mark.parametrize("args", [(None, None, None, 1), ()], ids=["refused", "without a key"])
def test_error_callback_made_of_the_failed_task_s_function_is_no_delivery_of_that(
    books: Books, box: Box, base: Any, args: Any
) -> None:
    """The delivery has failed before its body, so nothing else reports that it is over."""

    @locked("ledger:<order>", on_conflict="raise")
    def body(request: Any, exc: Any, traceback: Any, order: Any) -> None: ...

    declare: Any = functools.partial(books.app.task, shared=False, base=base)
    pay, callback = declare(name="pay")(body), declare(name="compensate")(body)
    books.redlock.acquire(KEY)
    deliver(pay, *args, errbacks=[callback.s(1)])
    assert box.message().headers["task"] == "compensate"


def test_error_callback_of_a_task_that_has_lost_their_common_lock_is_sent(
    books: Books, box: Box
) -> None:
    @books.app.task(name="pay", base=SingletonTask, lock_key="ledger:{order}", shared=False)
    def pay(order: Any) -> None:
        books.redlock.clock.now += 1000.0
        raise ValueError

    deliver(pay, 1, errbacks=[books.compensate().s(1)])
    assert books.calls == []
    assert box.message().headers["task"] == "compensate"


def test_error_callback_keeps_the_options_of_its_signature(books: Books, box: Box) -> None:
    books.redlock.acquire(KEY)
    books.fail(books.compensate().s(1).set(priority=3, headers={"trace": "abc"}, expires=60))
    message = box.message()
    assert message.properties["priority"] == 3
    assert message.headers["trace"] == "abc"
    assert message.headers["expires"] is not None


def test_message_of_an_error_callback_shows_no_arguments_of_the_failed_task(
    books: Books, box: Box
) -> None:
    books.redlock.acquire(KEY)
    books.fail(books.compensate().s(1), args=("4111-secret",), redlock_receipt={"at": 1.0})
    message = box.message()
    assert message.headers["argsrepr"] == "(charge[the-id], ValueError, ..., 1)"
    assert "4111" not in str(message.headers)
    assert "redlock_receipt" not in json.dumps(message.decode()[0])


def test_unserializable_part_of_an_error_callback_is_sent_as_repr_or_left_out() -> None:
    thing = object()
    request = Context(
        {"id": "i", "task": "t", "args": [1, thing], "kwargs": {"a": thing, "b": 2}, "more": thing,
         "chord": {"task": "body"}, "headers": {"trace": "abc", "redlock_attempts": {}}}
    )  # fmt: skip
    failed, exc, traceback = pack(request, KeyError(thing, "x"), None, json.dumps)
    json.dumps([failed, exc])
    assert failed[FAILED] == {
        "id": "i", "task": "t", "args": [1, repr(thing)], "kwargs": {"a": repr(thing), "b": 2},
        "headers": {"trace": "abc"},
    }  # fmt: skip
    assert exc["exc_message"] == [repr(thing), "x"]
    assert traceback is None


@pytest.mark.parametrize(
    "exc", [None, 7, "x", {}, {"exc_type": "system", "exc_module": "os", "exc_message": "true"},
            {"exc_type": "SystemExit", "exc_module": "builtins"}],
)  # fmt: skip
def test_forged_failure_of_an_error_callback_becomes_a_plain_exception(
    books: Books, exc: Any
) -> None:
    request, made, *_rest = unpack(books.charge, [{FAILED: {"id": "x"}}, exc, None, 1])
    assert request.id == "x"
    assert type(made) is Exception


@pytest.mark.parametrize("first", [{}, {FAILED: 1}, {FAILED: {1: 2}}, {"id": 1}, "x", None])
def test_arguments_without_a_packed_failure_are_left_as_they_are(books: Books, first: Any) -> None:
    args = [first, {"exc_type": "ValueError"}, None, 1]
    assert unpack(books.charge, args) is args


@pytest.mark.parametrize("way", ["under", "under, own base", "class"])
def test_error_callback_with_a_key_of_all_arguments_is_locked_by_the_failed_tasks_id(
    books: Books, box: Box, way: str
) -> None:
    ran: list[Any] = []

    def body(request: Any, exc: Any, traceback: Any, order: Any) -> None:
        ran.append(order)

    if way != "class":
        given = {"base": Running} if way == "under, own base" else {}
        callback = books.app.task(name="all", shared=False, **given)(locked()(body))
    else:
        callback = books.app.task(name="all", shared=False, base=SingletonTask)(body)
    books.fail(callback.s(1))
    assert ran == [1]
    (own,) = names_of(callback)
    lease = books.redlock.acquire(own)
    books.fail(callback.s(1))
    message = box.message()
    assert isinstance(books.deliver(message)[0], Retry)
    books.redlock.release(lease)
    books.deliver(message)
    assert ran == [1, 1]


def names_of(callback: Any) -> tuple[str, ...]:
    """Return what a call locks, which is what its message locks."""
    request = Context({"id": "the-id", "task": "charge"})
    direct = resources_of(callback, (request, ValueError("a"), "text", 1), {})
    failed = pack(request, ValueError("b"), None, json.dumps)
    assert resources_of(callback, (*failed, 1), {}) == direct
    return direct


def test_key_function_of_an_error_callback_gets_the_same_from_call_and_message(
    books: Books,
) -> None:
    def key(request: Any, exc: Any, traceback: Any, order: Any) -> str:
        return f"{request.id}-{type(exc).__name__}-{order}"

    def body(request: Any, exc: Any, traceback: Any, order: Any) -> None: ...

    callback = books.app.task(name="by_function", shared=False)(locked(key=key)(body))
    assert names_of(callback) == ("the-id-ValueError-1",)


def test_error_callback_that_cannot_be_sent_is_logged_as_lost(
    books: Books, box: Box, caplog: Log, monkeypatch: Patch
) -> None:
    """The other callbacks of the task are called."""

    def fails(*_args: Any, **_options: Any) -> None:
        raise OperationalError("away")

    books.redlock.acquire(KEY)
    monkeypatch.setattr(conflict, "SEND_PATIENCE_S", 0.05)
    callback = books.compensate()
    ran: list[Any] = []

    @books.app.task(name="other", shared=False)
    @locked("else:<order>")
    def other(request: Any, exc: Any, traceback: Any, order: Any) -> None:
        ran.append(order)

    monkeypatch.setattr("celery.canvas.Signature.apply_async", fails)
    books.fail(callback.s(1), other.s(2))
    (record,) = [record for record in caplog.records if "LOST" in record.getMessage()]
    assert record.levelname == "ERROR"
    assert "compensate, the error callback of charge[the-id], is LOST" in record.getMessage()
    assert "away" in record.getMessage()
    assert ran == [2]


def test_error_callbacks_of_a_chord_are_sent_as_tasks(books: Books, box: Box) -> None:
    """Celery calls them with a request made from the chord's body."""

    @books.app.task(name="total", shared=False)
    def total(results: Any) -> None: ...

    lease = books.redlock.acquire(KEY)
    body = total.s().on_error(books.compensate().s(1))
    body.set(task_id="the-body")
    try:
        raise ValueError("member")
    except ValueError as error:
        books.app.backend.chord_error_from_stack(body, error)
    message = box.message()
    books.redlock.release(lease)
    assert books.deliver(message)[0] == "compensated"
    ((request, exc, _traceback, _order),) = books.calls
    assert (request.id, exc.args) == ("the-body", ("member",))


def test_error_callback_of_an_eager_call_is_a_plain_call(
    books: Books, box: Box, caplog: Log
) -> None:
    callback = books.compensate()
    books.charge.apply(link_error=callback.s(1))
    assert len(books.calls) == 1
    assert box.messages() == []


def test_call_inside_an_error_callback_is_a_plain_call(books: Books, box: Box) -> None:
    """A refusal inside is an error of the callback's body."""
    refused: list[Callable[..., Any] | str] = []
    inner = books.compensate()

    @books.app.task(name="outer", shared=False)
    @locked("outer:<order>")
    def outer(request: Any, exc: Any, traceback: Any, order: Any) -> None:
        try:
            inner(request, exc, traceback, order)
        except ResourceHeld as error:
            refused.append(str(error.resource))

    books.redlock.acquire(KEY)
    books.app.conf.redlock_wait = 0
    books.fail(outer.s(1))
    assert refused == [KEY]
    assert box.messages() == []
