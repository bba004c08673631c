"""Task classes with a `__call__` of their own: their bodies run under the lock, and in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Task

from celery_redlock import ResourceHeld, SingletonTask
from celery_redlock.compat.once import QueueOnce
from celery_redlock.compat.singleton import Singleton
from tests.support.delivering import deliver
from tests.support.fake_lock import FakeRedlock

entered: list[str] = []


class Plain(Task):  # type: ignore[type-arg]
    """A task class as in Flask's documentation: it calls `run` alone."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entered.append("plain")
        return self.run(*args, **kwargs)


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
    "plain before": (mixed(Plain, SingletonTask), ["plain"]),
    "plain behind": (mixed(SingletonTask, Plain), ["plain"]),
    "leading before": (mixed(Leading, SingletonTask), ["leading"]),
    "leading behind": (mixed(SingletonTask, Leading), ["leading"]),
    "below, plain behind": (leading(mixed(SingletonTask, Plain)), ["below", "plain"]),
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
