"""Calls in a thread, where Celery's current app is not that of the main thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, _state, shared_task

from celery_redlock import ConfigurationError, Redlock, SingletonTask, locked
from tests.support.fake_lock import FakeRedlock

state: Any = _state


@pytest.fixture
def asked(redlock: FakeRedlock, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The apps whose locks were asked for."""
    apps: list[Any] = []
    monkeypatch.setattr(Redlock, "from_app", staticmethod(lambda one: apps.append(one) or redlock))
    return apps


@pytest.fixture
def in_thread(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Calls a function in a thread, while `app` is current in this one, as after its import."""
    monkeypatch.setattr(state, "default_app", None)
    monkeypatch.setattr(state._tls, "current_app", app)

    def call(function: Callable[[], Any]) -> Any:
        results: list[Any] = []

        def run() -> None:
            try:
                results.append(function())
            except Exception as error:
                results.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(30.0)
        return results[0]

    yield call
    if state.default_app is not None:
        state.default_app.close()


def body() -> str:
    return "charged"


def another(name: str = "other") -> Any:
    return Celery(name, broker="memory://", set_as_current=False)


@pytest.mark.parametrize("how", ["helper", "run", "run of a shared task", "task", "late"])
def test_call_in_a_thread_reads_the_settings_of_the_app_that_it_belongs_to(
    app: Any, asked: list[Any], in_thread: Any, how: str
) -> None:
    lock = locked("order:<order_id>")

    def charge(order_id: int) -> str:
        return "charged"

    call: Any
    if how == "helper":
        call = lock(charge)
    elif how == "run of a shared task":
        call = shared_task(name="shop.charge")(lock(charge)).run
    else:
        task = app.task(name="shop.charge", shared=False)
        task = lock(task(charge)) if how == "late" else task(lock(charge))
        call = task if how == "task" else task.run
        other = another()  # to which it does not belong
    app.finalize()
    assert in_thread(lambda: call(7)) == "charged"
    assert asked and set(asked) == {app}
    if how not in ("helper", "run of a shared task"):
        other.close()


def test_run_of_a_task_reads_the_settings_of_its_app_where_another_is_current(
    app: Any, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = another()
    monkeypatch.setattr(state._tls, "current_app", other)
    task = app.task(name="shop.charge", shared=False, lazy=False)(locked("k")(body))
    assert task.run() == "charged"
    assert set(asked) == {app}
    other.close()


@pytest.mark.parametrize("base", [None, SingletonTask])
def test_shared_task_called_in_a_thread_reads_the_settings_of_its_only_app(
    app: Any, asked: list[Any], in_thread: Any, base: Any
) -> None:
    task: Any = shared_task(name="shop.charge", **({"base": base} if base else {}))(
        body if base else locked("k")(body)
    )
    app.finalize()
    assert in_thread(lambda: task()) == "charged"
    assert set(asked) == {app}


def test_shared_task_named_differently_in_a_thread_reports_no_current_app(
    app: Any, asked: list[Any], in_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery names the tasks of a script (`__main__`) by the app, so the key would differ."""
    monkeypatch.setattr(body, "__module__", "__main__")
    task = shared_task(base=SingletonTask)(body)
    app.finalize()
    assert "unit.body" in app.tasks
    assert "this thread has no current Celery app" in str(in_thread(lambda: task()))
    assert asked == []


@pytest.mark.parametrize("how", ["helper", "shared task", "reservation"])
def test_call_in_a_thread_that_may_belong_to_several_apps_says_that_none_is_current(
    app: Any, asked: list[Any], in_thread: Any, how: str
) -> None:
    other = another()
    lock = locked("k", scope="until_executed" if how == "reservation" else "while_executing")
    function = lock(body)
    task: Any = shared_task(name="shop.charge")(function)
    calls = {"helper": function, "shared task": task, "reservation": lambda: task.delay()}
    call = calls[how]
    for one in (app, other):
        one.finalize()
    error = in_thread(call)
    assert isinstance(error, ConfigurationError)
    assert "this thread has no current Celery app" in str(error)
    assert "app.set_default()" in str(error)
    assert asked == []
    other.conf.redlock_nodes = app.conf.redlock_nodes
    other.set_default()
    assert not isinstance(in_thread(call), Exception)
    assert set(asked) == {other}
    other.close()
