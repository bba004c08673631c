"""Task classes with a `__call__` of their own: an app's (Flask, Django, a tenant's), a base's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from celery import Celery, Task, shared_task
from celery.app.builtins import add_map_task, add_unlock_chord_task

from celery_redlock import ConfigurationError, ResourceHeld, SingletonTask, locked
from celery_redlock.compat.once import QueueOnce
from celery_redlock.compat.singleton import Singleton
from celery_redlock.config.task_lock import lock_of, resources_of
from tests.support.delivering import deliver
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Log

entered: list[str] = []


class FlaskTask(Task):  # type: ignore[type-arg]
    """A task class as in Flask's documentation."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entered.append("context")
        return self.run(*args, **kwargs)


class TenantTask(SingletonTask):
    """A base of a project's own, which has a lock already."""

    abstract = True
    lock_ttl = 20.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entered.append("tenant")
        return super().__call__(*args, **kwargs)


def by_argument(app: Any, task_class: Any) -> None:
    app.task_cls = task_class


def by_attribute(app: Any, task_class: Any) -> None:
    app.Task = task_class


@pytest.fixture(params=[by_argument, by_attribute])
def set_class(app: Any, request: Any) -> Any:
    entered.clear()
    return lambda task_class: request.param(app, task_class)


def charge(order_id: int) -> str:
    entered.append("body")
    return f"charged {order_id}"


@pytest.mark.parametrize("how", ["task", "shared", "a late task"])
@pytest.mark.parametrize("base", [SingletonTask, TenantTask, QueueOnce])
def test_task_with_our_base_keeps_the_task_class_of_its_app(
    app: Any, redlock: FakeRedlock, set_class: Any, base: Any, how: str
) -> None:
    set_class(FlaskTask)
    if how == "a late task":
        app.finalize()
    declare: Any = shared_task if how == "shared" else app.task
    declare(base=base, name="shop.charge")(charge)
    app.finalize()
    task = app.tasks["shop.charge"]
    assert isinstance(task, FlaskTask) and isinstance(task, base)
    assert deliver(task, 7)[0] == "charged 7"
    assert entered == [*(["tenant"] if base is TenantTask else []), "context", "body"]
    assert redlock.holder(task.redlock.resources(task, task.run, (7,), {})[0]) is None


@pytest.mark.parametrize("base", [None, SingletonTask, TenantTask])
def test_app_with_our_class_as_its_task_class_locks_its_tasks_and_none_of_celery_s(
    app: Any, redlock: FakeRedlock, set_class: Any, caplog: Log, base: Any
) -> None:
    set_class(TenantTask)
    given = {"base": base} if base is not None else {}
    task = app.task(name="shop.charge", lock_key="order:<order_id>", **given)(charge)
    add_map_task(app)
    add_unlock_chord_task(app)
    app.finalize()
    assert deliver(task, 7)[0] == "charged 7"
    assert entered == ["tenant", "body"]
    assert "celery.chord_unlock" in app.tasks
    assert caplog.records == []
    assert [name for name, task in app.tasks.items() if lock_of(task)] == ["shop.charge"]
    entered.clear()
    result, _ = deliver(app.tasks["celery.map"], "shop.charge", [1, 2])
    assert result == ["charged 1", "charged 2"]
    assert entered == ["tenant", "tenant", "body", "tenant", "body"]


@pytest.mark.parametrize("bind", [False, True], ids=["", "bound"])
@pytest.mark.parametrize("over", [False, True], ids=["under", "over"])
def test_call_of_a_locked_task_whose_class_calls_run_has_the_key_of_its_message(
    app: Any, redlock: FakeRedlock, set_class: Any, over: bool, bind: bool
) -> None:
    """Celery's stack of tasks does not show the task then."""
    set_class(FlaskTask)
    declare = app.task(name="shop.charge", bind=bind, shared=False)

    def body(*args: Any) -> None: ...

    task: Any = locked()(declare(body)) if over else declare(locked()(body))
    (name,) = resources_of(task, (7,), {})
    redlock.acquire(name)
    task(8)
    with pytest.raises(ResourceHeld):
        task(7)

    @app.task(name="outer", shared=False)
    def outer() -> None:
        task(7)

    assert isinstance(deliver(outer)[0], ResourceHeld)


def test_base_that_cannot_be_combined_with_the_app_s_class_is_refused(
    app: Any, set_class: Any
) -> None:
    class Mixin:
        pass

    class One(SingletonTask, Mixin):
        abstract = True

    class Other(Mixin, SingletonTask):
        abstract = True

    set_class(Other)
    with pytest.raises(ConfigurationError, match=r"shop\.charge: .*One.*Other.*derives from both"):
        app.task(base=One, name="shop.charge", lazy=False, shared=False)(charge)


@pytest.mark.parametrize("own", [False, True], ids=["base=SingletonTask", "task_cls="])
def test_task_in_a_django_project_keeps_delay_on_commit(
    own: bool, app: Any, redlock: FakeRedlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("django")
    settings = ModuleType("settings_of_a_test")
    monkeypatch.setitem(sys.modules, settings.__name__, settings)
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", settings.__name__)
    options = {"task_cls": SingletonTask} if own else {}
    project = Celery("project", broker="memory://", set_as_current=False, **options)
    task = project.task(
        name="shop.charge", shared=False, **({} if own else {"base": SingletonTask})
    )(charge)
    assert task.delay_on_commit and lock_of(task) is not None
    project.close()


# -- a base's --------------------------------------------------------------------------------------


class Leading(Task):  # type: ignore[type-arg]
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entered.append("leading")
        return super().__call__(*args, **kwargs)


def own(base: Any) -> Any:
    class Own(base):  # type: ignore[misc]
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            entered.append("own")
            return self.run(*args, **kwargs)

    return Own


def leading(base: Any) -> Any:
    class Below(base):  # type: ignore[misc]
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            entered.append("below")
            return super().__call__(*args, **kwargs)

    return Below


def mixed(*bases: Any) -> Any:
    return type("Mixed", bases, {"abstract": True})


CLASSES = {
    "own": (own(SingletonTask), ["own"]),
    "own, once": (own(QueueOnce), ["own"]),
    "own, singleton": (own(Singleton), ["own"]),
    "leading": (leading(SingletonTask), ["below"]),
    "leading to own": (leading(own(SingletonTask)), ["below", "own"]),
    "leading twice": (leading(leading(SingletonTask)), ["below", "below"]),
    "the app's before": (mixed(FlaskTask, SingletonTask), ["context"]),
    "the app's behind": (mixed(SingletonTask, FlaskTask), ["context"]),
    "leading before": (mixed(Leading, SingletonTask), ["leading"]),
    "leading behind": (mixed(SingletonTask, Leading), ["leading"]),
    "below, the app's behind": (leading(mixed(SingletonTask, FlaskTask)), ["below", "context"]),
}


@pytest.fixture(params=CLASSES)
def declared(app: Any, redlock: FakeRedlock, request: pytest.FixtureRequest) -> Any:
    base, path = CLASSES[request.param]

    @app.task(base=base, bind=True, lock_key="order:{order_id}", lock_wait=0.01)
    def charge(self: Any, order_id: int, then: int = 0) -> list[Any]:
        held = redlock.holder(f"order:{order_id}")
        below = charge(then) if then else []
        return [self.request.id, held is not None and held.owner.task, *below]

    @app.task(base=Leading, bind=True)
    def plain(self: Any) -> Any:
        return self.request.id

    # Where Celery's own `__call__` is reached, as here, a body has no id before Celery 5.7.
    charge.of_request = deliver(plain)[0] if request.param == "leading behind" else "the-id"
    entered.clear()
    return charge, path


def test_delivery_of_a_class_with_its_own_call_is_locked_once_and_passes_through_it(
    declared: Any, redlock: FakeRedlock
) -> None:
    charge, path = declared
    result, _ = deliver(charge, 1)
    assert result == [charge.of_request, charge.name]
    assert entered == path
    assert redlock.holder("order:1") is None


@pytest.mark.parametrize("way", [lambda task: task(1), lambda task: task.apply((1,)).get()])
def test_plain_and_eager_calls_of_a_class_with_its_own_call_are_locked_once(
    declared: Any, redlock: FakeRedlock, way: Callable[[Any], Any]
) -> None:
    charge, path = declared
    assert way(charge)[1] == charge.name
    assert entered == path
    redlock.acquire("order:1")
    with pytest.raises(ResourceHeld):
        charge(1)


def test_nested_call_of_a_class_with_its_own_call_is_locked_once(
    declared: Any, redlock: FakeRedlock
) -> None:
    charge, path = declared
    result, _ = deliver(charge, 1, 2)
    assert [result[1], result[3]] == [charge.name] * 2
    assert entered == path * 2
    redlock.acquire("order:2")
    assert isinstance(deliver(charge, 1, 2)[0], ResourceHeld)
