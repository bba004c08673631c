"""`SingletonTask` and `@locked`: declared, called, delivered, refused; over fake nodes.

Deliveries are made by Celery's own tracer in this process, over a broker in memory.
"""

from __future__ import annotations

import inspect
import json
import logging
import pickle
import time
from typing import Any

import celery
import pytest
from celery import Task, shared_task
from celery.exceptions import Retry

from celery_redlock import (
    ConfigurationError,
    RedlockError,
    ResourceHeld,
    SingletonTask,
    Skipped,
    current_lease,
    locked,
)
from celery_redlock.compat.once import QueueOnce
from celery_redlock.compat.singleton import Singleton
from celery_redlock.config.task_lock import lock_of, resource_of
from celery_redlock.messages.headers import ATTEMPTS
from celery_redlock.protocol.claim import Claim
from celery_redlock.protocol.round import Verb
from celery_redlock.protocol.values import Owner
from celery_redlock.runtime.complaints import Once
from tests.support.clock import FakeClock
from tests.support.delivering import Waits, deliver
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Log, Patch

# -- declared ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lock_tll": 1}, "no option lock_tll; did you mean lock_ttl"),
        ({"lock_ttl": 0}, "lock_ttl must be"),
        ({"lock_ttl": "10"}, "lock_ttl must be"),
        ({"lock_wait": -1}, "lock_wait must be"),
        ({"lock_on_conflict": "wate"}, "lock_on_conflict must be one of"),
        ({"lock_on_unavailable": "skip"}, "lock_on_unavailable must be one of"),
        ({"lock_on_lost": "die"}, "lock_on_lost must be"),
        ({"lock_retry_backoff": 5, "lock_retry_backoff_max": 1}, "lock_retry_backoff_max must be"),
        ({"lock_key": ""}, "lock_key must be"),
        ({"lock_key": "order:{nobody}"}, "nobody"),
        ({"lock_key": "order:{order_id"}, "order:{order_id"),
        ({"lock_key": "order:<nobody>"}, "nobody"),
    ],
)
def test_invalid_task_options_fail_at_declaration(
    app: Any, options: dict[str, Any], words: str
) -> None:
    def charge(order_id: int) -> None: ...

    with pytest.raises(ConfigurationError) as raised:
        app.task(base=SingletonTask, lazy=False, name="shop.charge", **options)(charge)
    assert words in str(raised.value)
    assert "shop.charge: " in str(raised.value) or "key template" in str(raised.value)
    with pytest.raises(ConfigurationError):
        type("Charge", (SingletonTask,), {"run": lambda self, order_id: None, **options})
    own = {name.removeprefix("lock_"): value for name, value in options.items()}
    with pytest.raises(ConfigurationError) as raised:
        locked(own.pop("key", None), **own)(charge)
    assert words.replace("lock_", "") in str(raised.value).replace("lock_", "")


@pytest.mark.parametrize("name", ["ttl", "key", "on_conflict", "redlock_ttl"])
def test_option_without_its_lock_prefix_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"some.task: .* lock_.*, not {name}"):
        type("some", (SingletonTask,), {"name": "some.task", name: 5, "run": lambda self: None})


def test_async_functions_are_refused_as_locked_tasks(app: Any) -> None:
    async def body() -> None: ...

    async def generator() -> Any:
        yield

    for function in (body, generator):
        with pytest.raises(ConfigurationError, match=r"async function.*asyncio\.run"):
            locked()(function)
        with pytest.raises(ConfigurationError, match="async function"):
            app.task(base=SingletonTask, lazy=False)(function)
        with pytest.raises(ConfigurationError, match="async function"):
            locked()(app.task(function))
        with pytest.raises(ConfigurationError, match="async function"):
            type("Async", (SingletonTask,), {"run": function})


def test_generator_functions_are_refused_as_locked_tasks(app: Any) -> None:
    """Their bodies would run after the release of the lock."""

    def body() -> Any:
        yield

    for declare in (locked(), lambda function: app.task(base=SingletonTask, lazy=False)(function)):
        with pytest.raises(ConfigurationError, match="is a generator function"):
            declare(body)


@pytest.mark.parametrize(
    ("base", "given"),
    [
        (SingletonTask, {"unique_on": ["x"]}),
        (SingletonTask, {"raise_on_duplicate": True}),
        (SingletonTask, {"once": {"keys": ["x"]}}),
        (QueueOnce, {"unique_on": ["x"]}),
        (Singleton, {"once": {"keys": ["x"]}}),
    ],
)
def test_options_of_other_libraries_are_refused_where_nothing_reads_them(
    app: Any, base: Any, given: dict[str, Any]
) -> None:
    (name,) = given

    def body(x: int) -> None: ...

    with pytest.raises(ConfigurationError, match=f"nothing reads {name}: .*compat"):
        app.task(base=base, lazy=False, **given)(body)


def test_locked_refuses_classes_other_objects_and_missing_parentheses() -> None:
    with pytest.raises(ConfigurationError, match=r"write @locked\(\)"):
        locked(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="use SingletonTask"):
        locked()(type("Class", (), {}))
    with pytest.raises(ConfigurationError, match=r"its key twice: 'a' and key=\.\.\."):
        locked("a", key="b")
    with pytest.raises(ConfigurationError, match="decorates a function or a task"):
        locked()(5)  # type: ignore[type-var]


# -- the ways to declare one ---------------------------------------------------------------------


def test_own_methods_of_a_task_class_are_no_options(app: Any) -> None:
    class Mine(SingletonTask):
        name = "mine"

        def lock_smith(self) -> str:
            return "mine"

        def wait(self) -> str:
            return "theirs"

    assert (Mine().lock_smith(), Mine().wait()) == ("mine", "theirs")


def test_task_options_are_inherited_and_overridden(app: Any) -> None:
    class Base(SingletonTask):
        abstract = True
        lock_ttl = 5
        lock_on_conflict = "skip"

    @app.task(base=Base, lock_ttl=7)
    def task(x: int) -> None: ...

    lock = lock_of(task)
    assert lock is not None
    assert (lock.options(app).ttl, lock.options(app).on_conflict) == (7.0, "skip")


def body(x: int, y: int = 2) -> str:
    """Return the resource of the current lease."""
    return current_lease().resource


def bound_body(self: Task, x: int, y: int = 2) -> str:
    assert isinstance(self, Task)
    return current_lease().resource


WAYS = {
    "under": lambda app: app.task(name="t")(locked("k:<x>")(body)),
    "under, bound": lambda app: app.task(name="t", bind=True)(locked("k:<x>")(bound_body)),
    "over": lambda app: locked("k:<x>")(app.task(name="t")(body)),
    "over, bound": lambda app: locked("k:<x>")(app.task(name="t", bind=True)(bound_body)),
    "over, not lazy": lambda app: locked("k:<x>")(app.task(name="t", lazy=False)(body)),
    "shared, under": lambda app: shared_task(name="t")(locked("k:<x>")(body)),
    "shared, over": lambda app: locked("k:<x>")(shared_task(name="t")(body)),
    "base": lambda app: app.task(name="t", base=SingletonTask, lock_key="k:{x}")(body),
    "base, bound": lambda app: app.task(name="t", base=SingletonTask, bind=True, lock_key="k:{x}")(
        bound_body
    ),
    "class": lambda app: app.register_task(
        type("T", (SingletonTask,), {"name": "t", "lock_key": "k:{x}", "run": bound_body})()
    ),
}


@pytest.fixture(params=WAYS)
def task(request: pytest.FixtureRequest, app: Any) -> Any:
    """Return a task, declared in each of the ways."""
    app.set_current()
    task = WAYS[request.param](app)
    app.finalize()
    assert task is not None
    return app.tasks["t"]


def test_plain_call_and_delivery_are_locked(task: Any, redlock: FakeRedlock) -> None:
    assert task(1) == "k:1"
    assert task(1, y=3) == "k:1"
    assert deliver(task, 1) == ("k:1", None)
    assert redlock.free("k:1")
    assert redlock.driver.rounds == ["acquire", "release"] * 3
    lease = redlock.acquire("k:1")
    with pytest.raises(ResourceHeld, match="k:1 is held by"):
        task(1)
    assert redlock.tokens("k:1") == {lease.token}
    assert task(2) == "k:2"


def test_eager_calls_are_locked(task: Any, redlock: FakeRedlock) -> None:
    assert task.apply((1,)).get() == "k:1"
    task.app.conf.task_always_eager = True
    assert task.delay(1).get() == "k:1"
    assert task.s(1).apply_async().get() == "k:1"
    assert redlock.free("k:1")
    lease = redlock.acquire("k:1")
    result = task.delay(1)
    assert result.state == "FAILURE"
    assert isinstance(result.result, ResourceHeld)
    assert redlock.tokens("k:1") == {lease.token}


def test_locked_task_stays_a_task_whose_arguments_are_checked_when_sent(task: Any) -> None:
    assert task.name == "t"
    assert lock_of(task) is not None
    assert resource_of(task, (1,), {}) == "k:1"
    assert [*inspect.signature(task.run).parameters][-2:] == ["x", "y"]
    if not hasattr(task, "__header__"):
        return  # Celery does not check those of a class-based task
    for args, kwargs in (((), {}), ((1, 2, 3), {}), ((1,), {"z": 1})):
        with pytest.raises(TypeError):
            task.apply_async(args, kwargs)


def test_redlock_enabled_false_runs_tasks_without_locks(task: Any, redlock: FakeRedlock) -> None:
    task.app.conf.redlock_enabled = False
    redlock.acquire("k:1")
    assert task(1) == "k:1"
    assert task.apply((1,)).get() == "k:1"
    assert deliver(task, 1) == ("k:1", None)
    assert redlock.driver.rounds == ["acquire"]
    with pytest.raises(RedlockError, match="no current lease"):  # outside of them
        current_lease()


def test_locked_function_outside_celery_has_its_own_name_as_key(
    redlock: FakeRedlock, app: Any
) -> None:
    """`@locked` on a function that is no task's locks each call."""
    app.set_current()
    assert locked("k:<x>")(body)(1) == "k:1"
    assert locked()(body)(1) == locked()(body)(x=1, y=2)


def test_locked_task_with_pydantic_receives_models(redlock: FakeRedlock, app: Any) -> None:
    pydantic = pytest.importorskip("pydantic")
    if celery.VERSION < (5, 5):
        pytest.skip("Celery has pydantic=True since 5.5")

    class Order(pydantic.BaseModel):
        id: int

    def charge(order: Any) -> str:
        assert isinstance(order, Order)
        return current_lease().resource

    charge.__annotations__ = {"order": Order, "return": str}
    declared = [
        app.task(name="a", base=SingletonTask, pydantic=True, lock_key="o:{order}")(charge),
        app.task(name="b", pydantic=True)(locked("o:<order>")(charge)),
        locked("o:<order>")(app.task(name="c", pydantic=True)(charge)),
    ]
    keys = {deliver(task, {"id": 5})[0] for task in declared}
    keys |= {resource_of(task, (Order(id=5),), {}) for task in declared}
    keys |= {resource_of(task, (), {"order": {"id": 5}}) for task in declared}
    assert len(keys) == 1
    assert str(keys.pop()).startswith("o:")


def test_body_has_the_request_of_its_delivery_or_eager_call(redlock: FakeRedlock, app: Any) -> None:
    """Changes that the body makes to it count when the body has ended."""
    written: list[object] = []

    class Writes(SingletonTask):
        name = "writes"

        def run(self) -> str | None:
            self.request.written = True
            return self.request.id

        def on_success(self, *_args: Any) -> None:
            written.append(getattr(self.request, "written", None))

    task = app.register_task(Writes())
    assert deliver(task)[0] == "the-id"
    assert task.apply(task_id="eager-id").get() == "eager-id"
    assert written == [True, True]


# -- endings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["success", "failure", "retry"])
def test_lock_is_held_while_on_success_on_failure_and_on_retry_run(
    redlock: FakeRedlock, app: Any, sent: list[Any], ending: str
) -> None:
    held = []

    class Hooked(SingletonTask):
        name = "hooked"
        lock_key = "h"

        def run(self) -> None:
            if ending == "failure":
                raise KeyError
            if ending == "retry":
                raise self.retry()

        def on_success(self, *args: Any) -> None:
            held.append(not redlock.free("h"))

        on_failure = on_retry = on_success

    deliver(app.register_task(Hooked()))
    assert held == [True]
    assert redlock.free("h")


def test_token_of_a_delivery_names_task_and_retries_and_is_unique(
    redlock: FakeRedlock, app: Any
) -> None:
    @app.task(base=SingletonTask, lock_key="w")
    def who() -> str:
        return current_lease().token

    owners = [Owner.of(deliver(who, retries=2)[0]) for _delivery in range(2)]
    first, second = owners
    assert first is not None and second is not None
    assert (first.task_id, first.retries) == (second.task_id, second.retries) == ("the-id", 2)
    # One id may be delivered twice at once.
    assert first.stamp and first.stamp != second.stamp


# -- the conflict policy -------------------------------------------------------------------------


def test_retry_pauses_are_jittered_up_to_a_ceiling_that_doubles(busy: Any, sent: list[Any]) -> None:
    task = busy(lock_retry_backoff=1.0, lock_retry_backoff_max=4.0, lock_retry_deadline=None)
    ceilings = {0: 1.0, 1: 2.0, 2: 4.0, 3: 4.0, 2000: 4.0}
    for count, ceiling in ceilings.items():
        sent.clear()
        for _ in range(60):
            deliver(task, headers={}, **{ATTEMPTS: {"held": count, "since": 0}})
        countdowns = [one.options["countdown"] for one in sent]
        assert len(countdowns) == 60
        assert min(countdowns) >= 0.1
        assert ceiling * 0.75 < max(countdowns) <= ceiling
        assert min(countdowns) < ceiling * 0.25


@pytest.mark.parametrize(
    "forged",
    [None, 5, "x", [], {"since": "x"}, {"held": "many"}, {"held": -5}, {"since": 1e99},
     {"since": float("nan")}, {"since": True}, {"held": 10**400}, {"stuck": "x", "pause": -1},
     {"stuck": 1e99, "pause": float("nan"), "holder": 7}, {"holder": "x" * 10**6}],
    ids=repr,
)  # fmt: skip
def test_forged_attempts_header_does_no_harm(busy: Any, sent: list[Any], forged: Any) -> None:
    result, _info = deliver(busy(), headers={}, **{ATTEMPTS: forged})
    assert isinstance(result, Retry)
    (again,) = sent
    attempts = again.options["headers"][ATTEMPTS]
    assert attempts["held"] >= 1
    assert 0.1 <= again.options["countdown"] <= 60.0
    # Counted from now where it was nonsense: or the deadline never came, or had come already.
    assert abs(attempts["since"] - time.time()) < 60


def sends_again(task: Any, sent: list[Any], attempts: Any = None, **more: Any) -> Any:
    """The attempts in the header of what a refused delivery sends again."""
    deliver(task, **({ATTEMPTS: {**attempts, **more}} if attempts else {}))
    return sent.pop().options["headers"][ATTEMPTS]


def test_task_fails_when_one_holder_is_in_its_way_for_too_long(
    busy: Any, sent: list[Any], caplog: Log
) -> None:
    task = busy(lock_retry_deadline=10.0)
    attempts = sends_again(task, sent)
    attempts = sends_again(task, sent, attempts, pause=4.9)
    attempts = sends_again(task, sent, attempts, pause=5.0)
    assert attempts["stuck"] == pytest.approx(9.9)
    result, info = deliver(task, **{ATTEMPTS: {**attempts, "pause": 0.1}})
    assert isinstance(result, ResourceHeld)
    assert info.state == "FAILURE"
    assert sent == []
    assert "gives up after 10.0 s" in caplog.text


def test_retry_deadline_does_not_count_time_in_which_the_key_changes_hands(
    busy: Any, sent: list[Any]
) -> None:
    task = busy(lock_retry_deadline=10.0)
    attempts = sends_again(task, sent)
    for turn in range(20):
        attempts = sends_again(task, sent, attempts, pause=9.0, holder=f"another {turn}")
        assert attempts["stuck"] == 0.0
        attempts = sends_again(task, sent, attempts, pause=9.0)
        assert attempts["stuck"] == 9.0


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_clock_of_another_host_fails_no_retried_task(
    busy: Any, sent: list[Any], ahead: float
) -> None:
    task = busy(lock_retry_deadline=10.0)
    attempts = sends_again(task, sent)
    attempts["since"] += ahead
    for _ in range(5):
        attempts = sends_again(task, sent, attempts, pause=0.1)
    assert attempts["stuck"] == pytest.approx(0.5)


def test_task_without_a_retry_deadline_is_retried_for_ever(busy: Any, sent: list[Any]) -> None:
    deliver(busy(lock_retry_deadline=None), **{ATTEMPTS: {"since": 0, "held": 10**6}})
    assert len(sent) == 1


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_policies_skip_and_raise_end_a_refused_task(
    redlock: FakeRedlock, busy: Any, sent: list[Any], caplog: Log, policy: str
) -> None:
    caplog.set_level(logging.INFO)
    task, before = busy(lock_on_conflict=policy), redlock.tokens("k")
    result, _info = deliver(task)
    assert (task.ran, sent) == ([], [])
    assert redlock.tokens("k") == redlock.client.claims.keys() == before  # it leaves nothing
    if policy == "raise":
        assert isinstance(result, ResourceHeld)
        return
    assert Skipped.of(result) == result
    assert result["resource"] == "k"
    assert "pid" in result["holder"]
    assert "is skipped: k is held by pid" in caplog.text


def test_skipped_marker_survives_json_and_pickle() -> None:
    marker = Skipped("k", "somebody")
    assert Skipped.of(json.loads(json.dumps(marker))) == marker
    assert type(pickle.loads(pickle.dumps(marker))) is Skipped
    for other in (None, {}, "skipped", {"celery_redlock": "x"}, []):
        assert Skipped.of(other) is None


def test_attempts_without_a_quorum_are_counted_apart(
    busy: Any, sent: list[Any], redlock: FakeRedlock, caplog: Log
) -> None:
    redlock.driver.dead = {0, 1, 2}
    task = busy(lock_on_conflict="raise")
    result, _info = deliver(task, **{ATTEMPTS: {"held": 4, "unavailable": 2}})
    assert isinstance(result, Retry)
    attempts = sent[0].options["headers"][ATTEMPTS]
    assert (attempts["held"], attempts["unavailable"]) == (4, 3)
    (record,) = [record for record in caplog.records if "waits (unavailable" in record.message]
    assert record.levelno == logging.WARNING
    assert record.message.count("silent (dead)") == 3
    assert task.ran == []


def test_missing_quorum_is_logged_once_a_task_and_once_a_minute(
    busy: Any, sent: list[Any], redlock: FakeRedlock, caplog: Log, monkeypatch: Patch
) -> None:
    """Celery logs for each attempt that it was received and that it is retried."""
    caplog.set_level(logging.INFO)
    clock, once = FakeClock(), Once()
    monkeypatch.setattr(
        "celery_redlock.messages.conflict.unavailable", lambda cause, _now: once(cause, clock())
    )

    def lines(task: Any, *counts: int, **more: Any) -> int:
        caplog.clear()
        for count in counts:
            deliver(task, **{ATTEMPTS: {"unavailable": count - 1, **more}})
        return caplog.text.count("waits (unavailable")

    redlock.driver.dead = {0, 1, 2}
    task = busy()
    assert lines(task, *range(1, 50)) == 1
    assert lines(task, 1, 1, 1) == 3, "each task"
    redlock.driver.dead = {0, 1, 2, 3}
    assert lines(task, *range(50, 60)) == 1, "another cause"
    clock.now += 60.0
    assert lines(task, *range(60, 70)) == 1
    redlock.driver.dead = set()
    assert caplog.text.count("attempt 60") == 1
    caplog.clear()
    for count in range(3):
        deliver(task, **{ATTEMPTS: {"held": count}})
    assert caplog.text.count("waits (held") == 3, "of a held lock there is a line each"


# -- the predecessor rule ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "request_", "predecessor"),
    [
        ({"task_id": "the-id", "retries": 0}, {"retries": 1}, True),
        ({"task_id": "the-id", "retries": 1}, {"retries": 1}, False),  # a copy of it
        ({"task_id": "the-id", "retries": 2}, {"retries": 1}, False),
        ({"task_id": "other", "retries": 0}, {"retries": 1}, False),
        ({"task_id": "the-id"}, {"replaced_task_nesting": 1}, True),
        ({"task_id": "other"}, {"replaced_task_nesting": 1}, False),
        ({"task_id": "parent"}, {"parent_id": "parent"}, True),
        ({"task_id": "parent"}, {"parent_id": "another"}, False),
        ({"task_id": ""}, {"parent_id": None}, False),
        ({"task_id": ""}, {"parent_id": ""}, False),
    ],
)
def test_retry_waits_only_for_the_lock_of_its_predecessor(
    app: Any,
    redlock: FakeRedlock,
    sent: Any,
    waits: Waits,
    owner: Any,
    request_: Any,
    predecessor: bool,
) -> None:
    lease = redlock.acquire("k", owner=Owner("here", 1, **owner))
    # It waits; the predecessor ends meanwhile.
    waits.then = lambda wait: wait and redlock.release(lease)  # type: ignore[method-assign]

    @app.task(base=SingletonTask, lock_key="k")
    def successor() -> str:
        return "ran"

    result, _info = deliver(successor, **request_)
    assert (result == "ran") is not isinstance(result, Retry)
    assert (waits, len(sent)) == (([0.0, 2.0], 0) if result == "ran" else ([0.0], 1))
    assert (result == "ran") is predecessor


@pytest.mark.parametrize("policy", ["skip", "raise", "retry"])
def test_split_vote_is_no_conflict(
    app: Any, redlock: FakeRedlock, sent: list[Any], waits: Waits, policy: str
) -> None:
    """Two others tried at the same moment: if all three gave up, the work would not be done."""
    others = [Claim("k", token, 10.0, 5) for token in ("one", "two")]
    for node, other in zip(redlock.fakes, (others * 2), strict=False):
        node.execute(Verb.ACQUIRE, [other], redlock.clock())

    def then(wait: float | None) -> None:
        for node in redlock.fakes if wait else ():  # they have undone it meanwhile
            node.held.clear()

    waits.then = then  # type: ignore[method-assign]

    @app.task(base=SingletonTask, lock_key="k", lock_on_conflict=policy, lock_wait=0.0)
    def work() -> str:
        return "ran"

    result, _info = deliver(work)
    assert (result, waits, sent) == ("ran", [0.0, 0.3], [])
