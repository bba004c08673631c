"""`doctor`, of an app: its settings, its tasks, its workers."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue

from celery_redlock import SingletonTask
from celery_redlock.cli.context import Site
from celery_redlock.doctor.report import Finding, merged
from celery_redlock.doctor.tasks import examine_tasks
from celery_redlock.doctor.workers import ask, examine_workers
from celery_redlock.worker.remote_control import digest_of, settings_of, tasks_of
from tests.cli.clinic import examined, shop

NODES = ["redis://user:SECRET@10.0.0.1:6379/0", "redis://10.0.0.2/1", "redis://10.0.0.3/0"]


def site(**conf: Any) -> Celery:
    """Its broker is a Redis; nobody asks it anything."""
    app = shop(NODES, **conf)
    app.conf.broker_url = "redis://10.0.0.9:6379/0"
    return app


def declare(app: Celery, **options: Any) -> None:
    def body(order_id: int) -> None: ...

    app.task(base=SingletonTask, name="shop.slow", shared=False, **options)(body)


def findings(app: Celery) -> list[tuple[str, str, str]]:
    return [(one.level, one.check, one.where) for one in examine_tasks(app)]


@pytest.mark.parametrize(
    ("options", "conf", "level", "check"),
    [
        ({"time_limit": 100, "lock_max_lifetime": 60}, {}, "wrong", "lifetime"),
        ({"soft_time_limit": 100, "lock_max_lifetime": 60}, {}, "wrong", "lifetime"),
        ({"lock_max_lifetime": 60}, {"task_time_limit": 100}, "wrong", "lifetime"),
        ({"time_limit": 4000}, {}, "warning", "visibility"),
        ({"time_limit": 4000, "acks_late": True}, {}, "wrong", "visibility"),
        (
            {"acks_late": True, "lock_ttl": 20},
            {"broker_transport_options": {"visibility_timeout": 10}},
            "warning",
            "visibility",
        ),
        ({"lock_on_conflict": "reject"}, {}, "wrong", "acks"),
        ({"lock_on_deadline": "reject"}, {"redlock_retry_deadline": 9}, "wrong", "acks"),
        ({"lock_on_deadline": "reject"}, {}, "wrong", "configuration"),
        ({"lock_limit": 2}, {"redlock_fencing": True}, "wrong", "configuration"),
    ],
    ids=str,
)
def test_what_cannot_go_together_is_found(
    options: dict[str, Any], conf: dict[str, Any], level: str, check: str
) -> None:
    app = site(**conf)
    declare(app, **options)
    assert (level, check, "shop.slow") in findings(app)


@pytest.mark.parametrize(
    ("options", "conf"),
    [
        ({}, {}),
        ({"time_limit": 50, "lock_max_lifetime": 60}, {}),
        ({"time_limit": 100, "lock_max_lifetime": None}, {}),
        ({"time_limit": 4000}, {"broker_transport_options": {"visibility_timeout": 5000}}),
        ({"lock_on_conflict": "reject", "acks_late": True}, {}),
    ],
    ids=str,
)
def test_what_goes_together_is_not(options: dict[str, Any], conf: dict[str, Any]) -> None:
    app = site(**conf)
    declare(app, **options)
    assert findings(app) == []


def test_a_broker_that_is_no_redis_has_no_visibility_timeout() -> None:
    app = shop(NODES)
    declare(app, time_limit=4000)
    assert findings(app) == []


def test_rabbitmq_ends_a_worker_that_keeps_a_message_for_too_long() -> None:
    app = site()
    app.conf.broker_url = "amqp://127.0.0.1:1//"
    declare(app, time_limit=4000)
    assert findings(app) == []  # it is acknowledged when its body begins
    app.tasks["shop.slow"].acks_late = True
    assert findings(app) == [("wrong", "visibility", "shop.slow")]
    app.conf.broker_transport_options = {"visibility_timeout": 5000}
    assert findings(app) == []


def test_a_quorum_queue_behind_a_direct_exchange_is_slow() -> None:
    app = site()
    app.conf.broker_url = "amqp://127.0.0.1:1//"
    kinds = {"fast": "topic", "slow": "direct"}
    app.conf.task_queues = [
        Queue(name, Exchange(name, kind), name, queue_arguments={"x-queue-type": "quorum"})
        for name, kind in kinds.items()
    ]
    assert findings(app) == [("warning", "queues", "slow")]


def test_a_setting_that_cannot_work() -> None:
    ((level, check, _where),) = findings(site(redlock_tll=5))
    assert (level, check) == ("wrong", "configuration")


def answer(app: Celery, **changed: Any) -> dict[str, Any]:
    """What a worker with this app would answer."""
    settings = {**settings_of(app), **changed}
    return {
        "nodes": settings["nodes"],
        "settings": settings,
        "settings_digest": digest_of(settings),
        "tasks": tasks_of(app),
        "holds": [],
        "waits": [],
    }


def compared(
    monkeypatch: pytest.MonkeyPatch, app: Celery, replies: dict[str, Any], unasked: str = ""
) -> list[Finding]:
    monkeypatch.setattr("celery_redlock.doctor.workers.ask", lambda *_: (replies, unasked))
    return list(examine_workers(app, 1.0))


def test_workers_that_are_alike_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    app = site()
    turned = answer(app, nodes=settings_of(app)["nodes"][::-1])
    assert compared(monkeypatch, app, {"a": answer(app), "b": turned}) == []
    assert turned["settings_digest"] == answer(app)["settings_digest"]


def test_workers_that_differ_are(monkeypatch: pytest.MonkeyPatch) -> None:
    app, other = site(), shop([NODES[0].replace("/0", "/7"), *NODES[1:]], redlock_ttl=5)
    replies = {"worker1": answer(other), "worker2": answer(app), "old": {"error": "no redlock"}}
    found = compared(monkeypatch, app, replies)
    by_level = {(one.level, one.where): one.what for one in found}
    assert "10.0.0.1:6379/7" in by_level["wrong", "worker1"]  # other locks: another database
    assert "redlock_ttl is 5.0 there, and 30.0" in by_level["warning", "worker1"]
    assert "no redlock" in by_level["warning", "old"]
    assert not any("SECRET" in one.what for one in found)
    assert not any(one.where == "worker2" for one in found)


def test_a_task_that_is_locked_otherwise_there(monkeypatch: pytest.MonkeyPatch) -> None:
    app, other = site(), site()
    declare(app, lock_key="order:{order_id}")
    declare(other, lock_key="invoice:{order_id}")
    (one,) = compared(monkeypatch, app, {"worker1": answer(other)})
    assert one.what.startswith("shop.slow is locked otherwise")


@pytest.mark.parametrize("unasked", ["", "no worker was asked: no answer from the broker"])
def test_workers_that_do_not_answer_are_not_called_fine(
    monkeypatch: pytest.MonkeyPatch, unasked: str
) -> None:
    (one,) = compared(monkeypatch, site(), {}, unasked)
    assert one.level == "unchecked" and (unasked or "none answered") in one.what


def test_settings_that_cannot_work_are_named_once() -> None:
    code, report = examined(Site(app=shop([])))
    (one,) = [one for one in report["findings"] if one["check"] == "configuration"]
    assert code == 1 and one["where"] == "settings" and "redlock_nodes is empty" in one["what"]


def test_what_is_found_at_many_places_is_said_once() -> None:
    many = [Finding("warning", "acks", f"task{n}", "it is so", "change it") for n in range(7)]
    said = {
        "task0, task1, task2, task3, task4 and 2 more": many,
        "task0, task1": [*many[:2], many[0]],
    }
    for where, found in said.items():
        assert [one.where for one in merged(found)] == [where]


@pytest.mark.parametrize("broker", ["redis://:SECRET@127.0.0.1:1/0", "nonsense://u:SECRET@x"])
def test_a_broker_that_is_away_is_said_without_its_password(broker: str) -> None:
    replies, unasked = ask(Celery("shop", broker=broker, set_as_current=False), 0.5)
    assert replies == {} and "no worker was asked" in unasked and "SECRET" not in unasked
