"""Limits as tasks declare them: a number, one for each key, or a function of the arguments."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_redlock import ConfigurationError, locked
from celery_redlock.config.task_lock import lock_of, resources_of
from celery_redlock.protocol.names import Limits

numbers = itertools.count()
PLANS = {"acme": 5, "free": 1, "wrong": 0, "text": "3", "flag": True, "much": 101}


def plan(tenant: str, **_: object) -> Any:
    return PLANS[tenant]


def made(app: Celery, *keys: Any, limit: Any, **options: Any) -> Any:
    number = next(numbers)

    @app.task(shared=False, name=f"shop.fetch{number}")
    @locked(*keys, limit=limit, **options)
    def fetch(tenant: str, page: int = 1) -> None: ...

    return fetch


def limit_of(task: Any, *args: Any, **kwargs: Any) -> Any:
    lock: Any = lock_of(task)
    return lock.limit(lock.options(task.app), task, task.run, args, kwargs)


def test_declared_limits_are_in_the_order_of_the_keys(app: Celery) -> None:
    task = made(app, "t:<tenant>", "all", limit=(3, 20))
    assert resources_of(task, ("acme",), {}) == ("all", "t:acme")
    assert limit_of(task, "acme") == Limits((20, 3))
    task = made(app, "p:<page>", "t:<tenant>", limit=[2, 9])
    assert limit_of(task, "acme", 7) == Limits((2, 9))
    for keys in (("<tenant>", "<page>"), ("<tenant>", "<tenant>")):
        same = made(app, *keys, limit=[9, 2])
        assert resources_of(same, ("x", "x"), {}) == ("x",)
        assert limit_of(same, "x", "x") == 2  # one key, and the smaller of its limits
    made(app, "<tenant>", "<tenant>", limit=1, fencing=True)  # nor are these several


def test_limit_function_is_called_with_the_arguments_by_name(app: Celery) -> None:
    task = made(app, "t:<tenant>", limit=lambda tenant, page: len(tenant) + page)
    assert limit_of(task, "acme") == limit_of(task, tenant="acme") == 5
    assert limit_of(task, "acm", 2) == limit_of(task, "acm", page=2) == 5

    @app.task(shared=False, bind=True, name="shop.many")
    @locked("t:<tenant>", limit=lambda tenant, extra, **_: extra)
    def many(self: Any, tenant: str, *rest: int, **more: int) -> None: ...

    assert limit_of(many, "acme", 1, 2, extra=7) == 7


def test_limit_function_may_return_a_limit_for_each_key(app: Celery) -> None:
    task = made(app, "t:<tenant>", "all", limit=lambda tenant, **_: (PLANS[tenant], 20))
    assert limit_of(task, "acme") == Limits((20, 5))
    task = made(app, key=lambda tenant, **_: {tenant, "all"}, limit=lambda tenant, page: (20, page))
    assert limit_of(task, "acme", page=3) == Limits((20, 3))


@pytest.mark.parametrize("tenant", ["wrong", "text", "flag", "much"])
def test_invalid_result_of_a_limit_function_is_refused_with_task_and_value(
    app: Celery, tenant: str
) -> None:
    task = made(app, "t:<tenant>", limit=plan)
    said = (
        r"^the limit of shop.fetch\d+, which plan makes, must be a whole number from 1 to 100, or a"
        rf" list of such, one for each key; it is {PLANS[tenant]!r} for t:{tenant}: return 1 where"
    )
    with pytest.raises(ConfigurationError, match=said):
        limit_of(task, tenant)


def test_error_in_a_limit_function_is_raised_with_its_task(app: Celery) -> None:
    task = made(app, "t:<tenant>", limit=plan)
    with pytest.raises(
        ConfigurationError, match=r"the limit of shop.fetch\d+, .* raised KeyError"
    ) as no:
        limit_of(task, "nobody")
    assert isinstance(no.value.__cause__, KeyError)
    with pytest.raises(ConfigurationError, match="which leave makes, raised SystemExit"):
        limit_of(made(app, "t:<tenant>", limit=leave), "acme")
    too_many = made(app, "t:<tenant>", limit=lambda **_: (1, 2))
    with pytest.raises(ConfigurationError, match=r"the key t:acme has 2 limits, \[1, 2\]: give"):
        limit_of(too_many, "acme")


def leave(**_: object) -> int:
    sys.exit(3)


async def later(tenant: str, page: int) -> int:
    return 3


def yielding(tenant: str, page: int) -> Iterator[int]:
    yield 3


class Later:
    async def __call__(self, tenant: str, page: int) -> int:
        return 3


@pytest.mark.parametrize(
    ("keys", "options", "wrong"),
    [
        (
            ["t:<tenant>", "all"],
            {"limit": (3,)},
            r"limit is \[3\], 1 number, and the task has 2 keys",
        ),
        (["t:<tenant>"], {"limit": (3, 20)}, "2 numbers, and the task has 1 key: give"),
        (["t:<tenant>"], {"limit": ()}, "a list of such, one for each key"),
        (["t:<tenant>", "all"], {"limit": (3, 0)}, "whole number from 1 to 100"),
        (["t:<tenant>"], {"limit": lambda tenant: 3}, r"by their names \(tenant, page\): .*'page'"),
        (["t:<tenant>"], {"limit": lambda tenant, page, x: 3}, "missing a required argument: 'x'"),
        (["t:<tenant>"], {"limit": later}, "later, is async"),
        (["t:<tenant>"], {"limit": Later()}, "is async"),
        (["t:<tenant>"], {"limit": yielding}, "yielding, is async, or a generator"),
        ([f"t{n}:<tenant>" for n in range(101)], {"limit": 1}, "101 keys, and one lock holds"),
        (["t:<tenant>"], {"limit": plan, "fencing": True}, "a fencing token would refuse"),
        (["t:<tenant>"], {"limit": plan, "on_conflict": "replace"}, "limit=a function it could"),
        (
            ["t:<tenant>"],
            {"limit": plan, "scope": "until_executed"},
            "limit is a function, but with",
        ),
        (["t:<tenant>", "all"], {"limit": (1, 2), "on_conflict": "replace"}, "revoke all holders"),
        (["t:<tenant>"], {"limit": plan, "rate": "3/m"}, "nothing reads limit"),
    ],
)
def test_impossible_declared_limit_is_refused(
    app: Celery, keys: list[str], options: Any, wrong: str
) -> None:
    with pytest.raises(ConfigurationError, match=wrong):
        made(app, *keys, **options)
