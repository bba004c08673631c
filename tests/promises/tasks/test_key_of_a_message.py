"""Keys where a function's signature is not what calls give: decorators, task classes, headers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from celery import Task

from celery_redlock import ConfigurationError, SingletonTask, current_lease, locked
from celery_redlock.config.task_lock import lock_of, resources_of
from celery_redlock.messages.headers import header_of
from celery_redlock.worker.remote_control import _wanted
from tests.support.delivering import Box, Received, _parking, deliver
from tests.support.fake_lock import FakeRedlock

KEY = "order:<order>"


def in_front(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function("session", *args, **kwargs)

    return wrapper


def by_name(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, session="session", **kwargs)

    return wrapper


def with_signature(function: Any) -> Any:
    wrapper = in_front(function)
    signature = inspect.signature(function)
    rest = [p for name, p in signature.parameters.items() if name not in ("self", "session")]
    wrapper.__signature__ = signature.replace(parameters=rest)
    return wrapper


def session_first(session: str, order: int) -> Any:
    return session, order, current_lease().resource


def session_last(order: int, session: str) -> Any:
    return session, order, current_lease().resource


def session_by_name(order: int, amount: int = 1, *, session: str) -> Any:
    return session, order, current_lease().resource


def optional(session: str, order: int, amount: int = 1) -> Any:
    return session, order, current_lease().resource


def two_in_front(function: Any) -> Any:
    return in_front(in_front(function))


def after_two(other: str, session: str, order: int) -> Any:
    return session, order, current_lease().resource


def above(app: Any, decorator: Any, function: Any, key: Any = KEY) -> Any:
    return app.task(name="charge", shared=False, lazy=False)(locked(key)(decorator(function)))


def below(app: Any, decorator: Any, function: Any, key: Any = KEY) -> Any:
    return app.task(name="charge", shared=False, lazy=False)(decorator(locked(key)(function)))


def based(app: Any, decorator: Any, function: Any, key: Any = KEY) -> Any:
    return app.task(name="charge", shared=False, lazy=False, base=SingletonTask, lock_key=key)(
        decorator(function)
    )


@pytest.mark.parametrize("way", [above, below, based])
@pytest.mark.parametrize(
    ("decorator", "function"),
    [
        (in_front, session_first),
        (two_in_front, after_two),
        (by_name, session_first),
        (by_name, session_last),
        (by_name, session_by_name),
        (with_signature, session_first),
        (with_signature, optional),
    ],
)
def test_task_with_a_decorator_that_gives_an_argument_is_locked_by_those_of_the_call(
    app: Any, redlock: FakeRedlock, box: Box, way: Any, decorator: Any, function: Any
) -> None:
    task = way(app, decorator, function)
    by_place = decorator is not by_name or function is not session_first
    calls: list[tuple[Any, dict[str, Any]]] = [
        ((), {"order": 7}),
        *([((7,), {})] if by_place else []),
    ]
    for args, kwargs in calls:
        assert resources_of(task, args, kwargs) == ("order:7",)
        task.apply_async(args, kwargs)
        if args:
            assert deliver(task, *args)[0] == ("session", 7, "order:7")
    assert len(box.messages()) == len(calls)


@pytest.mark.parametrize("way", [above, below, based])
def test_optional_arguments_behind_one_given_by_a_decorator_need_names(
    app: Any, redlock: FakeRedlock, way: Any
) -> None:
    task = way(app, in_front, optional)
    assert resources_of(task, (), {"order": 7, "amount": 3}) == ("order:7",)
    with pytest.raises(ConfigurationError, match=r"charge: .*a decorator gives.*__signature__"):
        resources_of(task, (7,), {})


@pytest.mark.parametrize("way", [above, based])
def test_key_of_all_arguments_with_a_decorator_that_gives_one_is_a_clear_error(
    app: Any, way: Any
) -> None:
    task = way(app, in_front, session_first, None)
    with pytest.raises(ConfigurationError, match="Let the key name arguments of the call"):
        resources_of(task, (7,), {})


def test_key_of_all_arguments_follows_the_signature_that_a_decorator_declares(app: Any) -> None:
    task = above(app, with_signature, optional, None)
    assert resources_of(task, (7, 3), {}) == ("charge(order=7,amount=3)",)


@pytest.mark.parametrize("way", [above, below, based])
def test_key_function_with_a_decorator_that_gives_an_argument_gets_those_of_the_call(
    app: Any, redlock: FakeRedlock, way: Any
) -> None:
    def key(order: int) -> str:
        return f"order:{order}"

    if way is based:
        task = based(app, in_front, optional, key)
    elif way is above:
        task = app.task(name="charge", shared=False, lazy=False)(
            locked(key=key)(in_front(optional))
        )
    else:
        return  # there the function is called with all arguments: the lock is inside
    assert resources_of(task, (7,), {}) == ("order:7",)
    assert deliver(task, 7)[0] == ("session", 7, "order:7")


def test_arguments_that_fit_no_signature_are_still_a_type_error(app: Any) -> None:
    task = above(app, in_front, session_first)
    with pytest.raises(TypeError, match="too many"):
        resources_of(task, (1, 2, 3, 4), {})


@pytest.mark.parametrize("base", [None, SingletonTask])
def test_missing_argument_of_a_task_with_autoretry_is_a_type_error(app: Any, base: Any) -> None:
    options = {"base": base, "lock_key": KEY} if base else {}
    body = session_first if base else locked(KEY)(session_first)
    task = app.task(name="charge", shared=False, lazy=False, autoretry_for=(OSError,), **options)(
        body
    )
    with pytest.raises(TypeError, match="missing a required argument"):
        resources_of(task, (7,), {})


def test_celery_checks_a_call_with_a_lock_as_without(app: Any) -> None:
    task = app.task(name="plain", shared=False, lazy=False)(locked(KEY)(session_first))
    with pytest.raises(TypeError, match="missing 1 required"):
        task.delay(7)


# -- A keyword that a class puts into the message and takes out again ------------------------------


class TenantTask(Task):  # type: ignore[type-arg]
    abstract = True
    typing = False

    def apply_async(self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        kwargs = {**(kwargs or {}), "_tenant": "acme"}
        return super().apply_async(args, kwargs, *rest, **options)

    def __call__(self, *args: Any, _tenant: str | None = None, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def charge(order: int, amount: int = 1) -> Any:
    return order, current_lease().resource


class Both(SingletonTask, TenantTask):
    abstract = True


class Before(TenantTask, SingletonTask):
    abstract = True


@pytest.mark.parametrize("base", [Both, Before, TenantTask])
@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (KEY, "order:7"),
        (None, "charge(order=7,amount=1,keywords={_tenant:acme})"),
        (["order"], "charge(order=7)"),
        (lambda order, _tenant="", **_: f"{_tenant}:{order}", "acme:7"),
    ],
    ids=["template", "all", "names", "function"],
)
def test_keyword_taken_out_by_a_task_class_counts_as_argument_of_a_singleton_task(
    app: Any, redlock: FakeRedlock, box: Box, base: Any, key: Any, expected: str
) -> None:
    scope = "until_and_while_executing"
    if base is TenantTask:  # the lock of @locked is inside of that class's `__call__`
        expected = expected.replace(",keywords={_tenant:acme}", "").replace("acme:7", ":7")
        given = {"key": key} if callable(key) or key is None else {}
        lock = locked(*([] if given else [key]), scope=scope, **given)
        task = app.task(name="charge", shared=False, lazy=False, base=base)(lock(charge))
    else:
        task = app.task(
            name="charge", shared=False, lazy=False, base=base, lock_key=key, lock_scope=scope
        )(charge)
    task.delay(7)
    message = box.message()
    assert message.headers["redlock_reservation"]["resources"] == [expected]
    args, kwargs, _ = message.payload
    assert kwargs == {"_tenant": "acme"}
    assert resources_of(task, args, kwargs) == (expected,)
    request = {**message.headers, "kwargs": kwargs}
    result, _info = deliver_with(task, args, kwargs, request)
    assert result == (7, expected)


def deliver_with(task: Any, args: Any, kwargs: Any, headers: Any) -> tuple[Any, Any]:
    from celery.app.trace import build_tracer

    given = {
        **headers,
        "args": args,
        "kwargs": kwargs,
        "is_eager": False,
        "called_directly": False,
        "delivery_info": {},
        "hostname": "here",
    }
    traced = build_tracer(task.name, task, app=task.app)(given["id"], args, kwargs, given)
    return traced.info.retval if traced.info else traced.retval, traced.info


def test_keyword_that_no_task_class_removes_is_a_type_error(app: Any) -> None:
    task = based(app, lambda function: function, charge)
    with pytest.raises(TypeError, match="unexpected keyword argument '_tenant'"):
        resources_of(task, (7,), {"_tenant": "acme"})


# -- Headers --------------------------------------------------------------------------------------


@pytest.fixture(params=["locked", "based"])
def tenants(app: Any, redlock: FakeRedlock, request: Any) -> Callable[..., Any]:
    def declare(key: Any = "<headers.tenant>:<order>", **options: Any) -> Any:
        make = functools.partial(app.task, name="charge", shared=False, lazy=False)
        if request.param == "locked":
            return make()(locked(key, **options)(charge))
        given = {f"lock_{name}": value for name, value in options.items()}
        return make(base=SingletonTask, lock_key=key, **given)(charge)

    return declare


def test_key_with_a_header_is_read_from_the_call_and_from_its_message(
    tenants: Any, redlock: FakeRedlock, box: Box
) -> None:
    task = tenants(scope="until_and_while_executing")
    for tenant in ("acme", "other"):
        task.apply_async((7,), headers={"tenant": tenant})
    messages = box.messages()
    reserved = [one.headers["redlock_reservation"]["resources"] for one in messages]
    assert reserved == [["acme:7"], ["other:7"]]
    for message, tenant in zip(messages, ("acme", "other"), strict=True):
        args, kwargs, _ = message.payload
        given = {**message.headers, "args": args, "kwargs": kwargs}
        headers = functools.partial(header_of, given)
        assert resources_of(task, args, kwargs, headers) == (f"{tenant}:7",)
        assert deliver_with(task, args, kwargs, message.headers)[0] == (7, f"{tenant}:7")


def test_delivery_waits_in_a_worker_for_the_key_with_its_header(app: Any, tenants: Any) -> None:
    task = tenants()
    parking = _parking(app)
    first, other, second = (Received(task, None) for _ in range(3))
    for request, tenant in ((first, "acme"), (other, "other"), (second, "acme")):
        request.args, request.kwargs = (7,), {}
        request.request_dict["tenant"] = tenant
    assert [parking._park(request) for request in (first, other, second)] == [False, False, True]
    assert [one.resources for one in parking.admission.parked()] == [("acme:7",)]
    assert _wanted(other) == ("other:7",)


def test_eager_call_has_the_key_with_its_header(tenants: Any) -> None:
    task = tenants()
    assert task.apply((7,), headers={"tenant": "acme"}).get() == (7, "acme:7")


@pytest.mark.parametrize("way", ["published", "delivered", "called", "called inside"])
def test_call_without_the_header_of_its_key_is_a_clear_error(
    app: Any, tenants: Any, box: Box, way: str
) -> None:
    task = tenants(scope="until_and_while_executing")
    words = "the lock key of charge names the header 'tenant', and this call has none.*headers="
    if way == "delivered":
        result, _ = deliver(task, 7)
        assert isinstance(result, ConfigurationError)
        return
    with pytest.raises(ConfigurationError, match=words):
        if way == "published":
            task.delay(7)
        elif way == "called":
            task(7)
        else:

            @app.task(name="outer", shared=False)
            def outer() -> Any:
                return task(7)

            result, _ = deliver(outer, tenant="acme")
            raise result
    assert box.messages() == []


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("a:b", '"a:b":7'),
        ("7:1", '"7:1":7'),
        (7, "7:7"),
        ("7", '"7":7'),
        ({"a": [1]}, "{a:[1]}:7"),
        ("x\r\n", '"x%0D%0A":7'),
    ],
)
def test_header_value_in_a_key_is_written_as_an_argument_is(
    tenants: Any, value: Any, key: str
) -> None:
    assert resources_of(tenants(), (7,), {}, {"tenant": value}.get) == (key,)


def test_header_value_that_cannot_be_in_a_key_is_refused(tenants: Any) -> None:
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    task = tenants()
    for value in (object(), deep):
        with pytest.raises(ConfigurationError, match="header 'tenant' of charge"):
            resources_of(task, (7,), {}, {"tenant": value}.get)


@pytest.mark.parametrize(
    "name", ["id", "task", "root_id", "lang", "headers", "retries", "redlock_attempts"]
)
def test_key_that_names_a_header_of_celery_is_refused(tenants: Any, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"header '{name}', which Celery or"):
        tenants(f"<headers.{name}>:<order>")


def test_argument_named_headers_is_no_header(app: Any) -> None:
    def body(headers: dict[str, str]) -> None: ...

    with pytest.raises(ConfigurationError, match="without attribute"):
        locked("<headers.tenant>")(body)
    assert lock_of(locked("<headers>")(body)) is None
