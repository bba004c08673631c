"""Options live once, are checked at their birth, and errors name what the user wrote."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
from celery import Celery

import celery_redlock.task
from celery_redlock import CallOptions, ConfigurationError, LockOptions, SingletonTask, locked
from celery_redlock.config.options import (
    GLOBAL,
    TASK,
    Settings,
    TaskOptions,
    check_option,
)
from celery_redlock.config.settings import enabled, read_settings
from celery_redlock.config.task_lock import PER_CALL, TaskLock

NODES = ["redis://127.0.0.1:1/0", "redis://127.0.0.1:2/0", "redis://127.0.0.1:3/0"]


def app_with(**conf: Any) -> Celery:
    app = Celery("settings", broker="memory://", set_as_current=False)
    app.conf.update({"redlock_nodes": NODES, **conf})
    return app


def test_every_option_is_declared_once() -> None:
    assert GLOBAL.keys() == get_type_hints(Settings).keys()
    assert {*TASK, "waits"} == get_type_hints(TaskOptions).keys()
    for name in set(GLOBAL) & set(TASK):
        assert GLOBAL[name] is TASK[name]


def test_type_hints_of_options_are_those_of_the_table() -> None:
    table = get_type_hints(TaskOptions)
    del table["waits"]
    assert get_type_hints(LockOptions) == table
    assert get_type_hints(CallOptions) == {name: table[name] for name in PER_CALL}
    declared = inspect.get_annotations(
        SingletonTask, globals=vars(celery_redlock.task), eval_str=True
    )
    del declared["redlock"]
    assert declared == {f"lock_{name}": kind for name, kind in table.items()}


@pytest.mark.parametrize(("name", "option"), {**GLOBAL, **TASK}.items())
def test_every_default_passes_its_own_check_and_is_explained(name: str, option: Any) -> None:
    assert option.check(option.default) == option.default
    assert option.about.endswith(".") and option.change.endswith(".")


@pytest.mark.defaults
def test_defaults_of_the_settings_are_as_documented() -> None:
    app = app_with()
    settings = read_settings(app)
    assert vars(settings) == vars(Settings(nodes=NODES))
    assert (settings.prefix, settings.node_timeout, settings.restart_guard) == (
        *("redlock:", 0.25, "auto"),
    )
    options = TaskLock({}).options(app)
    assert vars(options) == vars(TaskOptions(waits=options.waits))
    assert (options.ttl, options.wait, options.retry_backoff, options.max_lifetime) == (
        *(30.0, 0.5, 1.0, 86400.0),
    )
    assert (options.on_conflict, options.on_unavailable, options.on_lost) == (
        *("retry", "retry", "raise"),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, bad) for name in ("ttl", "wait", "retry_backoff", "node_timeout")
          for bad in ("1", True, None, -1, math.nan, math.inf, [1])],
        *[(name, bad) for name in ("retry_deadline", "max_lifetime")
          for bad in ("1", False, 0, -0.5, math.nan)],
        ("ttl", 0), ("ttl", 0.001), ("ttl", 86_401),
        ("retry_backoff", 0), ("node_timeout", 0),
        ("prefix", ""), ("prefix", b"redlock:"), ("prefix", None),
        ("enabled", 1), ("enabled", "yes"), ("enabled", None),
        ("key", ""), ("key", 3),
        ("on_conflict", "wate"), ("on_conflict", None), ("on_conflict", "run"),
        ("on_unavailable", "skip"), ("on_unavailable", True),
        ("on_lost", "skip"), ("on_lost", None),
        ("nodes", ""), ("nodes", []), ("nodes", 5), ("nodes", [5]),
        ("nodes", [*NODES, NODES[0]]),
        ("nodes", ["redis://127.0.0.1:7/0", "redis://localhost:7/1"]),
        ("nodes", ["127.0.0.1:6379"]), ("nodes", ["redis://127.0.0.1:70000"]),
        ("parking_memory", 64), ("parking_memory", 1e8), ("parking_memory", True),
        ("parking_memory", "64MB"),
    ],
)  # fmt: skip
def test_invalid_option_value_is_refused_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as raised:
        check_option(name, value, f"redlock_{name}")
    assert f"redlock_{name}" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("ttl", 10, 10.0), ("ttl", 0.02, 0.02), ("wait", 0, 0.0), ("wait", 1e6, 1e6),
        ("retry_deadline", None, None), ("max_lifetime", None, None), ("on_lost", print, print),
        ("nodes", NODES[:1], NODES[:1]), ("key", None, None),
        ("nodes", ",".join(NODES), NODES), ("nodes", "\n, ".join(NODES) + "\n", NODES),
        ("nodes", [f" {NODES[0]}\n"], NODES[:1]),
        ("nodes", "etcd://a:1,b:2", ["etcd://a:1,b:2"]),
        ("nodes", "sentinel://a:1,b:2/s,sentinel://c:1/s", ["sentinel://a:1,b:2/s", "sentinel://c:1/s"]),
        ("nodes", "redis://:a,b@h,redis://:c,@i", ["redis://:a,b@h", "redis://:c,@i"]),
    ],
)  # fmt: skip
def test_valid_option_value_is_kept_with_its_type(name: str, value: Any, kept: Any) -> None:
    checked = check_option(name, value)
    assert checked == kept
    assert type(checked) is type(kept)


def test_memory_for_parked_tasks_is_refused_where_none_are_parked() -> None:
    assert read_settings(app_with(redlock_parking=False)).parking_memory == 64 * 2**20
    with pytest.raises(ConfigurationError, match=r"^redlock_parking_memory is 100000"):
        read_settings(app_with(redlock_parking=False, redlock_parking_memory=100_000))


def test_misspelt_option_is_answered_with_the_likely_one() -> None:
    with pytest.raises(ConfigurationError, match=r"did you mean redlock_retry_backoff\?"):
        read_settings(app_with(redlock_retry_backof=1))
    with pytest.raises(ConfigurationError, match=r"did you mean lock_on_conflict\?"):
        TaskLock({"on_conflit": "skip"}, "lock_")
    for theirs, ours in (("timeout", "ttl"), ("expires", "ttl"), ("blocking_timeout", "wait")):
        with pytest.raises(ConfigurationError, match=rf"no option {theirs}; did you mean {ours}\?"):
            locked("k", **{theirs: 1})  # type: ignore[arg-type]
    for name in ("lock_ttl", "redlock_ttl"):  # as it is written elsewhere
        with pytest.raises(ConfigurationError, match=f"no option {name}; did you mean ttl"):
            TaskLock({name: 1})
    with pytest.raises(ConfigurationError, match="there are: ttl, wait"):
        TaskLock({"zzz": 1})


@pytest.mark.parametrize("namespace", ["CELERY", "APP"])
def test_settings_are_read_through_a_namespace(namespace: str) -> None:
    def read(**given: Any) -> Any:
        app = Celery("settings", set_as_current=False)
        names = {f"{namespace}_REDLOCK_{name}": value for name, value in given.items()}
        app.config_from_object(names, namespace=namespace)
        return read_settings(app)

    settings = read(NODES=NODES, TTL=7)
    assert (settings.nodes, settings.ttl) == (NODES, 7.0)
    with pytest.raises(ConfigurationError, match="no option redlock_til"):
        read(NODES=NODES, TIL=7)


def test_reading_settings_does_not_hide_the_config_object() -> None:
    """`app.add_defaults()` would do that."""
    app = Celery("settings", set_as_current=False)
    app.config_from_object({"redlock_nodes": NODES, "task_acks_late": True})
    assert read_settings(app).nodes == NODES
    assert app.conf.task_acks_late is True


@pytest.mark.parametrize(
    ("broker", "node"),
    [
        ("redis://:secret@10.0.0.1:6379/3", "redis://:secret@10.0.0.1:6379/3"),
        ("redis://a:1/0;redis://b:1/0", "redis://a:1/0"),
        (" redis://a:1/0", "redis://a:1/0"),
        ("redis+socket:///tmp/r.sock", "redis+socket:///tmp/r.sock"),
    ],
)
def test_broker_is_the_node_if_no_nodes_are_set(broker: str, node: str) -> None:
    app = Celery("settings", broker=broker, set_as_current=False)
    assert read_settings(app).nodes == [node]


@pytest.mark.parametrize("broker", ["amqp://", "memory://", None])
def test_missing_nodes_without_a_redis_broker_is_an_error_with_advice(broker: str | None) -> None:
    app = Celery("settings", broker=broker, set_as_current=False)
    with pytest.raises(ConfigurationError, match=r"redlock_nodes is not set .*: set redlock_nodes"):
        read_settings(app)


def test_disabled_locks_need_no_nodes() -> None:
    app = Celery("settings", broker="memory://", set_as_current=False)
    app.conf.redlock_enabled = False
    assert read_settings(app).nodes == []


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("value", [None, True, False])
@pytest.mark.parametrize("way", ["dict", "object", "namespace", "update", "set later"])
def test_redlock_enabled_is_found_wherever_it_is_set(
    way: str, value: bool | None, loaded: bool
) -> None:
    app = Celery("switched", broker="memory://", set_as_current=False)
    given = {} if value is None else {"redlock_enabled": value}
    if way == "dict":
        app.config_from_object(given)
    elif way == "object":
        app.config_from_object(SimpleNamespace(**given))
    elif way == "namespace":
        named = {f"CELERY_{name.upper()}": value for name, value in given.items()}
        app.config_from_object(named, namespace="CELERY")
    elif way == "update":
        app.conf.update(given)
    if loaded:
        assert app.conf.timezone is None
        assert enabled(app.conf) is (value is not False or way == "set later")
    if way == "set later" and value is not None:
        app.conf.redlock_enabled = value
    assert enabled(app.conf) is (value is not False)


# -- of a task -----------------------------------------------------------------------------------


def test_options_of_a_task_override_those_of_the_app() -> None:
    app = app_with(redlock_ttl=7, redlock_wait=1)
    options = TaskLock({"ttl": 3, "on_unavailable": "run"}).options(app)
    assert (options.ttl, options.wait, options.on_unavailable) == (3.0, 1.0, "run")


@pytest.mark.parametrize(
    ("policy", "wait", "with_ttl"),
    [("wait", 9.0, 7.0), ("replace", 9.0, 7.0), ("retry", 1.0, 1.0)]
    + [(policy, 0.0, 0.0) for policy in ("skip", "raise", "reject")],
)
def test_default_wait_of_a_task_depends_on_its_policy(
    policy: str, wait: float, with_ttl: float
) -> None:
    app = app_with(redlock_wait=1, redlock_ttl=9)
    own = {"on_conflict": policy}
    waits = [{}, {"ttl": 7}, {"wait": 2}]
    assert [TaskLock({**own, **given}).options(app).wait for given in waits] == [wait, with_ttl, 2]
    asked = TaskLock({"on_conflict": print}).options(app)  # which may say any of them
    assert (asked.wait, asked.waits[policy]) == (0.0, wait)


def test_contradictory_options_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="lock_retry_backoff_max must be at least"):
        TaskLock({"retry_backoff": 5, "retry_backoff_max": 4}, "lock_")
    with pytest.raises(ConfigurationError, match="redlock_retry_backoff_max must be at least"):
        read_settings(app_with(redlock_retry_backoff=61))
    lock = TaskLock({"retry_backoff": 61}, "lock_")  # fine by itself
    with pytest.raises(ConfigurationError, match="retry_backoff_max must be at least"):
        lock.options(app_with())
    assert TaskLock({"ttl": 1, "wait": 100}).own == {"ttl": 1.0, "wait": 100.0}
