"""Options of other libraries: their translation, and which are refused. No server."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_redlock import ConfigurationError, SingletonTask
from celery_redlock.compat.base import NEVER_EXPIRES
from celery_redlock.compat.once import QueueOnce
from celery_redlock.compat.singleton import Singleton
from celery_redlock.config.default_node import leftover_warning
from celery_redlock.config.settings import read_settings
from celery_redlock.config.task_lock import lock_of

URL = "redis://10.0.0.9:6379/2"


def make(**conf: Any) -> Celery:
    app = Celery("moved", broker="redis://10.0.0.1:6379/0", set_as_current=False)
    app.conf.update(conf)
    return app


def job() -> None: ...


def options(base: Any, conf: Any = {}, **given: Any) -> Any:  # noqa: B006
    """Return the lock options of a task that is declared with these."""
    app = make(**conf)

    @app.task(base=base, shared=False, name="moved.task<1>", **given)
    def task(a: int, b: int = 2) -> None: ...

    lock = lock_of(app.tasks[task.name])
    assert lock is not None
    return lock.options(app)


# -- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("once", "expected"),
    [
        ({}, {"scope": "until_executed", "key": None, "reserve_ttl": None}),
        ({"graceful": True}, {"scope": "until_executed"}),
        ({"unlock_before_run": True}, {"scope": "until_executing"}),
        ({"unlock_before_run": False}, {"scope": "until_executed"}),
        ({"timeout": 36000}, {"reserve_ttl": 36000.0}),
        ({"timeout": None}, {"reserve_ttl": NEVER_EXPIRES}),
        ({"keys": None}, {"key": None}),
        ({"keys": ["a"]}, {"key": ("a",)}),
        ({"keys": []}, {"key": "moved.task<<1>>"}),
    ],
)
def test_options_of_celery_once_are_translated(
    once: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = options(QueueOnce, once=once)
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.on_duplicate == "existing"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"scope": "until_executed", "key": None, "reserve_ttl": None}),
        ({"lock_expiry": 10}, {"reserve_ttl": 10.0}),
        ({"raise_on_duplicate": True}, {"on_duplicate": "existing"}),
        ({"unique_on": []}, {"key": None}),
        ({"unique_on": "a"}, {"key": ("a",)}),
        ({"unique_on": ["b", "a"]}, {"key": ("b", "a")}),
    ],
)
def test_options_of_celery_singleton_are_translated(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = options(Singleton, **given)
    assert {name: getattr(found, name) for name in expected} == expected


def test_own_options_override_those_of_the_other_library() -> None:
    found = options(QueueOnce, once={"timeout": 60}, lock_reserve_ttl=90, lock_ttl=10)
    assert (found.reserve_ttl, found.ttl) == (90.0, 10.0)
    found = options(Singleton, lock_expiry=60, lock_scope="until_executing")
    assert (found.reserve_ttl, found.scope) == (60.0, "until_executing")
    annotated = {"task_annotations": {"moved.task<1>": {"once": {"timeout": 60}}}}
    assert options(QueueOnce, annotated).reserve_ttl == 60.0


@pytest.mark.parametrize(
    ("base", "given", "words"),
    [
        (QueueOnce, {"once": {"kyes": ["a"]}}, "knows no 'kyes'; there are: keys, graceful"),
        (QueueOnce, {"once": ["a"]}, "once must be a mapping; it is"),
        (QueueOnce, {"once": {"keys": "a"}}, r"such as \['order_id'\]; it is 'a'"),
        (QueueOnce, {"once": {"keys": ["c"]}}, "unknown argument 'c'; the names are: a, b"),
        (QueueOnce, {"once": {"timeout": 0}}, "lock_reserve_ttl must be"),
        (Singleton, {"unique_on": ["user_id"]}, "unknown argument 'user_id'; the names are: a, b"),
        (Singleton, {"unique_on": 1}, "unique_on must be the name of an argument or a list"),
        (Singleton, {"lock_expiry": -1}, "lock_reserve_ttl must be"),
        (Singleton, {"lock_expriy": 1}, "there is no option lock_expriy"),
    ],
)
def test_invalid_option_of_a_shim_is_refused_when_the_task_is_made(
    base: Any, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        options(base, **given)


@pytest.mark.parametrize("name", ["keys", "unlock_before_run"])
def test_once_option_that_celery_once_ignored_in_a_call_is_refused(name: str) -> None:
    app = make()

    @app.task(base=QueueOnce, shared=False)
    def task() -> None: ...

    with pytest.raises(ConfigurationError, match=f"once=.* knows no '{name}'.*graceful, timeout"):
        task.apply_async(once={name: True})


@pytest.mark.parametrize("base", [QueueOnce, Singleton])
def test_eager_tasks_of_a_shim_are_no_duplicates(base: Any) -> None:
    app = make(task_always_eager=True, redlock_enabled=False, singleton_raise_on_duplicate=True)

    @app.task(base=base, shared=False)
    def task(n: int) -> Any:
        return task.delay(n - 1).get(disable_sync_subtasks=False) if n else "done"

    assert task.delay(3).get() == task.apply_async((0,), lock={"reserve_ttl": 5}).get() == "done"


# -- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conf", "node"),
    [
        ({"ONCE": {"settings": {"url": URL}}}, URL),
        ({"ONCE": {"settings": {"url": "redis+socket:///tmp/r.sock?db=1"}}}, "redis+socket:///tmp/r.sock?db=1"),
        ({"singleton_backend_url": URL}, URL),
        ({"ONCE": {"backend": "celery_once.backends.File", "settings": {}}}, "redis://10.0.0.1:6379/0"),
        ({"ONCE": {"settings": {"url": URL}}, "redlock_nodes": ["redis://10.0.0.7:1/0"]}, "redis://10.0.0.7:1/0"),
        ({}, "redis://10.0.0.1:6379/0"),
    ],
)  # fmt: skip
def test_shim_uses_the_node_of_the_other_library_unless_nodes_are_named(
    conf: dict[str, Any], node: str
) -> None:
    assert read_settings(make(**conf)).nodes == [node]


OTHERS = {"ONCE": {"settings": {"url": URL}}}


@pytest.mark.parametrize(
    ("conf", "base", "setting"),
    [
        (
            OTHERS,
            SingletonTask,
            r"ONCE\['settings'\]\['url'\] \(10.0.0.9:6379\), not on the broker's",
        ),
        (
            {"singleton_backend_url": URL},
            SingletonTask,
            "singleton_backend_url .*, not on the broker",
        ),
        ({"singleton_backend_url": URL}, QueueOnce, "singleton_backend_url .*, not on the broker"),
        ({**OTHERS, "broker_url": "amqp://"}, SingletonTask, "and no task here is of the library"),
        (OTHERS, QueueOnce, ""),
        ({"singleton_backend_url": URL}, Singleton, ""),
        ({**OTHERS, "broker_url": URL}, SingletonTask, ""),
        ({**OTHERS, "redlock_nodes": ["redis://10.0.0.1"]}, SingletonTask, ""),
        ({}, SingletonTask, ""),
    ],
)
def test_locks_on_the_redis_of_a_library_that_no_task_uses_are_reported(
    conf: dict[str, Any], base: Any, setting: str
) -> None:
    app = make(**conf)
    app.task(base=base, name="moved.task", shared=False)(job)
    warning = leftover_warning(app)
    assert re.search(setting, warning) if setting else not warning


def test_settings_of_a_shim_are_read_through_a_namespace() -> None:
    app = Celery("moved", set_as_current=False)
    names = SimpleNamespace(CELERY_ONCE={"settings": {"url": URL}})
    app.config_from_object(names, namespace="CELERY")
    assert read_settings(app).nodes == [URL]
    app = Celery("moved", set_as_current=False)
    app.config_from_object(SimpleNamespace(CELERY_SINGLETON_BACKEND_URL=URL), namespace="CELERY")
    assert read_settings(app).nodes == [URL]


@pytest.mark.parametrize(
    ("base", "conf", "words"),
    [
        (QueueOnce, {"ONCE": {"settings": {"blocking": True}}}, "'blocking'.* is not carried over"),
        (Singleton, {"singleton_backend_class": "shop.Backend"}, "singleton_backend_class is not"),
        (Singleton, {"singleton_backend_kwargs": {"db": 1}}, "singleton_backend_kwargs is not"),
    ],
)
def test_untranslatable_settings_of_a_shim_are_refused_at_the_start(
    base: Any, conf: dict[str, Any], words: str
) -> None:
    make(**conf).finalize()  # where no task is theirs, nothing is refused
    for nodes, ok in (([URL], base is Singleton), (None, False)):
        app = make(**conf, redlock_nodes=nodes)
        app.task(base=base, name="moved.task", shared=False)(job)
        if ok:  # named nodes need no backend of theirs
            app.finalize()
            continue
        with pytest.raises(ConfigurationError, match=words):
            app.finalize()
