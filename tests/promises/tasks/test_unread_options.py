"""Options of a locked task that nothing of it would read, or that contradict each other."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_redlock import ConfigurationError, RedlockError, SingletonTask, current_lease, locked
from celery_redlock.config.settings import read_settings
from celery_redlock.doctor.tasks import examine_tasks
from celery_redlock.protocol.values import Owner
from celery_redlock.worker.startup import check
from tests.support.delivering import deliver
from tests.support.fake_lock import FakeRedlock

UNLOCKED = "until_executing"
DEADLINE = {"on_deadline": "skip"}
NEVER_AGAIN = {"on_conflict": "skip", "on_unavailable": "raise"}
TIMES = ("retry_backoff", "retry_backoff_max", "retry_deadline")


def body() -> int | None:
    return current_lease().fencing_token


def singleton(app: Any, **options: Any) -> Any:
    given = {f"lock_{name}": value for name, value in options.items()}
    return app.task(name="shop.task", base=SingletonTask, lazy=False, shared=False, **given)(body)


def decorated(app: Any, **options: Any) -> Any:
    return app.task(name="shop.task", shared=False)(locked("k", **options)(body))


@pytest.fixture(params=[singleton, decorated])
def declare(app: Any, request: Any) -> Callable[..., Any]:
    return lambda **options: request.param(app, **options)


def starts(app: Any) -> bool:
    """Return True if a worker starts; then the doctor must find nothing to change."""
    wrong = [found.what for found in examine_tasks(app) if found.check == "configuration"]
    try:
        check(SimpleNamespace(app=app, hostname="here"))
    except SystemExit:
        assert len(wrong) == 1
        return False
    assert wrong == []
    return True


@pytest.fixture(autouse=True)
def nothing_is_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "celery_redlock.messages.policy._parking", [False]
    )  # as the worker leaves it


# -- when declared --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scope": UNLOCKED, "on_conflict": "skip"}, ("on_conflict is 'skip'", "under no lock")),
        ({"scope": UNLOCKED, "on_conflict": print}, ("on_conflict is", "under no lock")),
        ({"scope": UNLOCKED, "fencing": True}, ("fencing is True", "until_and_while_executing")),
        ({"scope": UNLOCKED, "hold_for": 5}, ("hold_for is 5", "under no lock")),
        ({"scope": UNLOCKED, "on_lost": "log"}, ("on_lost is 'log'", "under no lock")),
        ({"scope": UNLOCKED, **DEADLINE}, ("on_deadline is 'skip'", "under no lock")),
        *[
            ({"scope": UNLOCKED, name: 7.5}, (f"{name} is 7.5", "under no lock"))
            for name in ("wait", "max_lifetime", "progress_timeout", *TIMES)
        ],
        *[
            ({**NEVER_AGAIN, name: 7.5}, (f"{name} is 7.5", "never sent again", "'retry'"))
            for name in TIMES
        ],
        ({**NEVER_AGAIN, **DEADLINE}, ("on_deadline is 'skip'", "on_unavailable 'raise'")),
        ({"limit": 2, "on_conflict": "replace"}, ("'replace'", "limit", "2", "'wait'")),
        ({"rate": "2/m", "limit": 2}, ("nothing reads", "limit", "in the body")),
        ({"rate": "2/m", "hold_for": 5}, ("nothing reads", "hold_for")),
        ({"rate": "2/m", "max_lifetime": 5}, ("nothing reads", "max_lifetime")),
        ({"rate": "2/m", "on_lost": "log"}, ("nothing reads", "on_lost")),
        ({"rate": "2/m", "progress_timeout": 5}, ("nothing reads", "progress_timeout")),
        ({"progress_timeout": 60, "max_lifetime": 60}, ("progress_timeout is 60", "a shorter one")),
        ({"progress_timeout": 0}, ("progress_timeout must be", ">= 0.1, or None")),
        ({"rate": "2/m", "fencing": True}, ("bodies overlap", "fencing=False")),
        ({"rate": "2/m", "on_conflict": "replace"}, ("'replace'", "'retry'")),
        ({"rate": "2/m", "scope": UNLOCKED}, ("'until_and_while_executing' is the same",)),
        (
            {"rate": "2/m", "scope": "until_executed", "on_duplicate": "replace"},
            ("on_duplicate 'replace'", "until_and_while_executing"),
        ),
        ({"rate": "2/x"}, ("such as '10/m'", "'2/x'")),
        ({"rate": "0/m"}, ("such as '10/m'",)),
        ({"rate": 10}, ("such as '10/m'",)),
        ({"rate": "2/2d"}, ("from a second to a day: give a shorter one",)),
        ({"rate": "600/m"}, ("more than 100 starts", "a burst of at most 100")),
        ({"rate": "10/s", "burst": 3}, ("windows of 0.3 s", "a larger burst")),
        ({"rate": "3/m", "burst": 3}, ("burst 3 must be less than the 3 starts",)),
        ({"burst": 3}, ("there is no", "rate", "leave", "burst out")),
        ({"hold_for": 1e9}, ("at most 86400 seconds (a day; not milliseconds)", "until_expired")),
    ],
    ids=str,
)
def test_option_that_nothing_would_read_is_refused(
    declare: Callable[..., Any], options: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        declare(**options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"scope": UNLOCKED},
        {"scope": UNLOCKED, "on_conflict": "retry", "fencing": False, "hold_for": 0},
        {"scope": UNLOCKED, "on_unavailable": "raise"},  # an option of the publisher
        {"scope": "until_and_while_executing", "on_conflict": "skip", "fencing": True},
        {"limit": 1, "on_conflict": "replace"},
        *[{"rate": rate} for rate in ("1/s", "100/m", "5/10m", "1/d")],
        {"rate": "600/m", "burst": 10},
        {"rate": "2/m", "scope": "until_executed", "on_conflict": "skip"},
        {"limit": 2, "on_conflict": "wait"},
        {"hold_for": 86_400},
        *[{**NEVER_AGAIN, option: "retry", name: 7.5} for option in NEVER_AGAIN for name in TIMES],
        {**NEVER_AGAIN, "on_conflict": "wait", **DEADLINE},
        {"max_lifetime": 5, "ttl": 30},  # its body is interrupted after 5 s
        *[{"progress_timeout": 60, "max_lifetime": most} for most in (61, None)],
        {"on_deadline": "raise"},
        *[{**DEADLINE, "on_conflict": policy} for policy in ("wait", "replace", print)],
        *[
            {**DEADLINE, "on_conflict": policy, "retry_deadline": 60}
            for policy in ("retry", "skip")
        ],
    ],
    ids=str,
)
def test_option_that_something_reads_is_accepted(
    app: Any, declare: Callable[..., Any], options: dict[str, Any]
) -> None:
    declare(**options)
    assert starts(app)


@pytest.mark.parametrize(
    ("option", "function", "takes"),
    [
        ("on_lost", lambda: 1, "the lease"),
        ("on_lost", lambda one, two: 1, "the lease"),
        ("on_conflict", lambda holder: "skip", "the holder and the request"),
    ],
    ids=["on_lost-0", "on_lost-2", "on_conflict-1"],
)
def test_callable_option_with_wrong_parameters_is_refused(
    declare: Callable[..., Any], option: str, function: Any, takes: str
) -> None:
    with pytest.raises(
        ConfigurationError, match=f"{option} must be a callable that takes {takes};"
    ):
        declare(**{option: function})


# -- when an app is known -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["retry", "skip", "raise"])
def test_on_deadline_without_a_deadline_stops_the_worker(
    app: Any, declare: Callable[..., Any], policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    declare(**DEADLINE, on_conflict=policy)
    assert not starts(app)
    for words in ("shop.task: ", "on_deadline is 'skip'", "retry_deadline"):
        assert words in caplog.text
    app.conf.redlock_retry_deadline = 60  # an app may set it
    assert starts(app)


def test_setting_for_all_tasks_need_not_be_read_by_each(
    app: Any, redlock: FakeRedlock, declare: Callable[..., Any]
) -> None:
    app.conf.redlock_fencing = True
    app.conf.redlock_max_lifetime = 1
    app.conf.redlock_retry_deadline = 5
    task = declare(scope=UNLOCKED, ttl=30)
    assert starts(app)
    assert deliver(app.tasks[task.name])[0] is None


@pytest.mark.parametrize(
    "for_all", [{"lock_on_deadline": "skip"}, {"lock_on_conflict": "skip"}, {"lock_fencing": True}]
)
@pytest.mark.parametrize("scope", [UNLOCKED, "while_executing"])
def test_annotation_of_all_tasks_need_not_be_read_by_each(
    app: Any, for_all: dict[str, Any], scope: str
) -> None:
    app.conf.task_annotations = {"*": for_all}
    singleton(app, scope=scope)
    assert starts(app)


def test_annotation_of_one_task_that_nothing_reads_is_refused(app: Any) -> None:
    app.conf.task_annotations = {"*": {}, "shop.task": {"lock_on_conflict": "skip"}}
    with pytest.raises(ConfigurationError, match=r"shop\.task: lock_on_conflict is 'skip'"):
        bool(singleton(app, scope=UNLOCKED))


def test_policy_function_may_not_answer_replace_with_a_limit(
    app: Any, redlock: FakeRedlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If two hold the lock, both might be revoked, because each look shows one of them."""
    revoked: list[str] = []
    monkeypatch.setattr(app.control, "revoke", lambda task_id, **_: revoked.append(task_id))
    for name in ("one", "other"):
        redlock.acquire("k", owner=Owner("there", 1, task_id=name), limit=2)
    task = singleton(
        app, key="k", limit=2, wait=0.1, on_conflict=lambda _holder, _request: "replace"
    )
    result, _info = deliver(task)
    assert isinstance(result, RedlockError)
    assert "limit" in str(result)
    assert revoked == []


@pytest.mark.parametrize(
    ("namespace", "name", "right"),
    [
        (None, "REDLOCK_TTL", "redlock_ttl"),
        (None, "CELERY_REDLOCK_NODES", "redlock_nodes"),
        ("CELERY", "REDLOCK_NODES", "CELERY_REDLOCK_NODES"),
        ("CELERY", "CELERY_REDLOK_NODES", "CELERY_REDLOCK_NODES"),
        ("CELERY", "CELERY_REDLCOK_ENABLD", "CELERY_REDLOCK_ENABLED"),
        ("CELERY", "CELERY_RED_LOCK_NODES", "CELERY_REDLOCK_NODES"),
        ("CELERY", "CELERY_READLOCK_TTL", "CELERY_REDLOCK_TTL"),
        ("CELERY", "CELERY_REDLOCK_ENABLE", "redlock_enabled"),
        ("SHOP", "SHOP_REDLOK_NODES", "SHOP_REDLOCK_NODES"),
        (None, "redlok_nodes", "redlock_nodes"),
        (None, "redlock_node", "redlock_nodes"),
    ],
)
def test_misspelt_setting_is_refused_with_the_name_to_write(
    namespace: str | None, name: str, right: str
) -> None:
    app = Celery("other", broker="redis://127.0.0.1:1/0", set_as_current=False)
    app.config_from_object({name: 5}, namespace=namespace)
    with pytest.raises(ConfigurationError, match=f"(write|did you mean) {right}"):
        read_settings(app)


@pytest.mark.parametrize(
    "name",
    ["redis_socket_timeout", "redbeat_lock_timeout", "redlog_file", "rehlock", "result_expires"],
)
def test_setting_of_another_library_is_accepted(app: Any, name: str) -> None:
    app.config_from_object({name: 5})
    assert read_settings(app).ttl == 30.0
