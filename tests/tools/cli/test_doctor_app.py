"""`doctor`, of an app: its settings, its tasks, its workers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from celery.schedules import crontab, schedule, solar
from kombu import Exchange, Queue

from celery_redlock import SingletonTask, locked
from celery_redlock.cli.context import Site
from celery_redlock.doctor.report import Finding, merged
from celery_redlock.doctor.tasks import examine_tasks
from celery_redlock.doctor.workers import ask, examine_workers
from celery_redlock.worker.remote_control import digest_of, settings_of, tasks_of
from tests.tools.cli.clinic import examined, shop

NODES = ["redis://user:SECRET@10.0.0.1:6379/0", "redis://10.0.0.2/1", "redis://10.0.0.3/0"]


def site(**conf: Any) -> Celery:
    """Return an app whose broker is a Redis that no test asks."""
    return shop(NODES, **{"broker_url": "redis://10.0.0.9:6379/0", **conf})


def declare(app: Celery, **options: Any) -> None:
    def body(order_id: int) -> None: ...

    app.task(base=SingletonTask, name="shop.slow", shared=False, **options)(body)


def visible(seconds: float) -> dict[str, Any]:
    return {"broker_transport_options": {"visibility_timeout": seconds}}


AMQP, LONG, LATE = {"broker_url": "amqp://127.0.0.1:1//"}, {"time_limit": 4000}, {"acks_late": True}
MEMORY = {"broker_url": "memory://"}


@pytest.mark.parametrize(
    ("options", "conf", "expected"),
    [
        ({}, {}, None),
        ({"time_limit": 100, "lock_max_lifetime": 60}, {}, "wrong lifetime"),
        ({"soft_time_limit": 100, "lock_max_lifetime": 60}, {}, "wrong lifetime"),
        ({"lock_max_lifetime": 60}, {"task_time_limit": 100}, "wrong lifetime"),
        ({"time_limit": 50, "lock_max_lifetime": 60}, {}, None),
        ({"time_limit": 100, "lock_max_lifetime": None}, {}, None),
        (LONG, {}, "warning visibility"),
        (LONG | LATE, {}, "wrong visibility"),
        (LONG | LATE, visible(5000), None),
        (LATE | {"lock_ttl": 20}, visible(10), "warning visibility"),
        (LONG | LATE, MEMORY, None),
        (LONG, AMQP, None),  # it is acknowledged when its body begins
        (LONG | LATE, AMQP, "wrong visibility"),  # RabbitMQ ends the worker
        (LONG | LATE, AMQP | visible(5000), None),
        ({"lock_ttl": 3000}, {}, "warning ttl"),  # milliseconds, most likely
        ({}, {"redlock_ttl": 30_000}, "warning ttl"),
        ({"lock_on_conflict": "reject"}, {}, "wrong acks"),
        ({"lock_on_conflict": "reject"} | LATE, {}, None),
        ({"lock_on_deadline": "reject"}, {"redlock_retry_deadline": 9}, "wrong acks"),
        ({"lock_on_deadline": "reject"}, {}, "wrong configuration"),
        ({"lock_limit": 2}, {"redlock_fencing": True}, "wrong configuration"),
    ],
    ids=str,
)
def test_doctor_finds_task_options_that_do_not_go_together(
    options: dict[str, Any], conf: dict[str, Any], expected: str | None
) -> None:
    app = site(**conf)
    declare(app, **options)
    found = [f"{one.level} {one.check}" for one in examine_tasks(app) if one.where == "shop.slow"]
    assert found == ([expected] if expected else [])


@pytest.mark.parametrize(("limit", "name"), [(2, "other"), (1, None), (5, "other")])
def test_doctor_finds_tasks_that_share_a_key_and_not_its_limit(
    limit: int, name: str | None
) -> None:
    app = site()
    for task, options in {"one": {}, "other": {"lock_limit": limit}, "third": {}}.items():

        def body(order_id: int) -> None: ...

        app.task(base=SingletonTask, name=task, lock_key="o:{order_id}", **options)(body)
    found = [one for one in examine_tasks(app) if one.check == "limits"]
    assert [one.where for one in found] == (["one, other"] if name else [])
    assert not found or f"1 (one), {limit} (other)" in found[0].what


def test_doctor_compares_limits_key_by_key_and_skips_functions() -> None:
    app = site()

    def made(name: str, *keys: Any, limit: Any) -> None:
        @app.task(name=name, shared=False)
        @locked(*keys, limit=limit)
        def body(t: int, u: int = 0) -> None: ...

    def nine(**_: object) -> int:
        return 9

    made("one", "tenant:<t>", "all", limit=(2, 3))
    made("two", "all", limit=7)
    made("three", "all", "region:<t>", limit=(7, 5))
    made("four", "region:{u}", limit=5)
    made("five", ["t", "u"], limit=4)  # names of arguments: keys of its own
    made("six", "sup:<t>", limit=nine)
    made("seven", "sup:<t>", limit=nine)
    assert [one.where for one in examine_tasks(app) if one.check == "limits"] == ["one, three"]
    made("eight", "sup:<u>", limit=3)
    sup, all_ = (one for one in examine_tasks(app) if one.check == "limits")
    assert (all_.level, all_.where) == ("warning", "one, three")
    assert "the key all has several limits: 3 (one), 7 (three). As many" in all_.what
    assert (sup.level, sup.where) == ("unchecked", "eight, seven")
    assert sup.what.endswith("not known here: 3 (eight), a function (seven)")


def test_doctor_advises_against_a_limit_beside_readers() -> None:
    app = site()
    for task, options in {"r": {"shared": True}, "w": {}, "l": {"limit": 3}}.items():

        def body(t: int) -> None: ...

        app.task(name=task, shared=False)(locked("db:<t>", **options)(body))  # type: ignore[arg-type]
    (found,) = [one for one in examine_tasks(app) if one.check == "limits"]
    assert (found.level, found.fix[:19]) == ("warning", "leave the limit out")
    assert "has readers (shared), and several limits: 1 (r), 3 (l)" in found.what


def test_doctor_finds_errors_of_an_app_that_concern_no_task() -> None:
    kinds = {"fast": "topic", "slow": "direct"}
    queues = [
        Queue(name, Exchange(name, kind), name, queue_arguments={"x-queue-type": "quorum"})
        for name, kind in kinds.items()
    ]
    for conf, expected in (
        (AMQP | {"task_queues": queues}, ("warning", "queues", "slow")),
        ({"redlock_tll": 5}, ("wrong", "configuration", "settings")),
    ):
        (found,) = examine_tasks(site(**conf))
        assert (found.level, found.check, found.where) == expected


@pytest.mark.parametrize(
    ("conf", "is_found"),
    [
        (visible(7200), True),
        (visible(3600), False),
        ({}, False),
        (visible(7200) | {"redlock_parking": False}, False),
        (MEMORY | visible(7200), False),
    ],
    ids=str,
)
def test_doctor_warns_of_parking_with_a_long_visibility_timeout(
    conf: dict[str, Any], is_found: bool
) -> None:
    found = [one for one in examine_tasks(site(**conf)) if one.where == "broker"]
    assert len(found) == is_found
    for one in found:
        assert (one.level, one.check) == ("warning", "visibility") and "7200 s" in one.what


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"redlock_ttl": 9, "base": SingletonTask}, "shop.odd: on a SingletonTask it is lock_ttl"),
        ({"base": SingletonTask, "lock_tll": 9}, "shop.odd: there is no option lock_tll; did you"),
    ],
)
def test_doctor_finds_an_option_that_nothing_reads(options: dict[str, Any], words: str) -> None:
    app = shop(["redis://127.0.0.1:1/0"])

    def body(order_id: int) -> None: ...

    app.task(name="shop.odd", shared=False, **options)(body)
    code, report = examined(Site(app=app))
    wrong = [one for one in report["findings"] if one["check"] == "configuration"]
    assert code == 1 and wrong[0]["what"].startswith(words)
    assert "reachable" in {one["check"] for one in report["findings"]}  # it looks on


@pytest.mark.parametrize(
    ("due", "reserve_ttl", "is_found"),
    [
        (86_400.0, 86_400.0, True),
        (timedelta(days=1), 80_000.0, True),
        (86_400.0, 72_000.0, False),
        (crontab(hour=2, minute=0), 86_400.0, True),
        (crontab(hour=2, minute=0), 72_000.0, False),
        (crontab(hour="2,4", minute=30), 7_000.0, False),  # tried again in the same night
        (crontab(hour="2,4", minute=30), 80_000.0, True),
        (schedule(86_400.0), 86_400.0, True),
        (crontab(), 30.0, False),
        (crontab(), 60.0, True),
        (1800.0, None, True),  # an hour
    ],
    ids=str,
)
def test_doctor_finds_a_tick_that_the_success_before_it_still_reserves(
    due: Any, reserve_ttl: float | None, is_found: bool
) -> None:
    app = shop(["redis://127.0.0.1:1/0"])
    app.conf.beat_schedule = {
        "nightly": {"task": "shop.nightly", "schedule": due},
        "plain": {"task": "shop.none", "schedule": 1.0},
    }

    @app.task(name="shop.nightly", shared=False)
    @locked("nightly", scope="until_succeeded", reserve_ttl=reserve_ttl)
    def nightly() -> None: ...

    found = [one for one in examine_tasks(app) if one.check == "schedule"]
    assert [(one.level, one.where) for one in found] == [("warning", "nightly")] * is_found


class Own(schedule):
    """A schedule that is due at any time it likes."""


@pytest.mark.parametrize(
    ("due", "given", "level"),
    [
        (120.0, {"scope": "until_succeeded", "reserve_ttl": 3600.0}, "warning"),
        (120.0, {"scope": "until_executed", "reserve_ttl": 3600.0}, ""),
        (7200.0, {"scope": "until_succeeded"}, ""),
        (Own(120.0), {"scope": "until_succeeded"}, "unchecked"),
        (solar("sunset", 52.5, 13.4), {"scope": "until_expired"}, "unchecked"),
        (crontab(hour=2, minute=0, day_of_week=1), {"scope": "until_succeeded"}, "unchecked"),
    ],
    ids=str,
)
def test_doctor_checks_the_options_of_an_entry_and_skips_unknown_schedules(
    due: Any, given: dict[str, Any], level: str
) -> None:
    app = shop(["redis://127.0.0.1:1/0"])
    app.conf.beat_schedule = {"e": {"task": "shop.e", "schedule": due, "options": {"lock": given}}}

    @app.task(name="shop.e", shared=False)
    @locked("e")
    def body() -> None: ...

    found = [one.level for one in examine_tasks(app) if one.check == "schedule"]
    assert found == [level] * bool(level)


def answer(app: Celery, **changed: Any) -> dict[str, Any]:
    """Return the answer of a worker with this app."""
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


def test_doctor_finds_nothing_if_workers_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    app = site()
    turned = answer(app, nodes=settings_of(app)["nodes"][::-1])
    assert compared(monkeypatch, app, {"a": answer(app), "b": turned}) == []
    assert turned["settings_digest"] == answer(app)["settings_digest"]


def test_doctor_finds_workers_whose_settings_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    app, other = site(), shop([NODES[0].replace("/0", "/7"), *NODES[1:]], redlock_ttl=5)
    replies = {"worker1": answer(other), "worker2": answer(app), "old": {"error": "no redlock"}}
    found = compared(monkeypatch, app, replies)
    by_level = {(one.level, one.where): one.what for one in found}
    assert "10.0.0.1:6379/7" in by_level["wrong", "worker1"]  # other locks: another database
    assert "redlock_ttl is 5.0 there, and 30.0" in by_level["warning", "worker1"]
    assert "no redlock" in by_level["warning", "old"]
    assert not any("SECRET" in one.what for one in found)
    assert not any(one.where == "worker2" for one in found)


def test_doctor_finds_a_task_locked_otherwise_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    app, other = site(), site()
    declare(app, lock_key="order:{order_id}")
    declare(other, lock_key="invoice:{order_id}")
    (one,) = compared(monkeypatch, app, {"worker1": answer(other)})
    assert one.what.startswith("shop.slow is locked differently")


def test_doctor_finds_nodes_that_a_worker_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passwords are not compared: a worker with wrong ones has the settings that it should have."""
    app = site()
    names = settings_of(app)["nodes"]
    refused = {name: "AUTH failed: WRONGPASS" for name in names}
    some = {**answer(app), "unusable": {names[0]: refused[names[0]]}}
    one, other = compared(monkeypatch, app, {"a": some, "b": {**some, "unusable": refused}})
    assert (one.level, other.level) == ("warning", "wrong")
    assert one.what == f"it can use 2 of 3 nodes, not {names[0]} (AUTH failed: WRONGPASS)"
    assert other.what.startswith("it can use 0 of 3 nodes and lock nothing, not ")
    assert "password" in one.fix
    assert compared(monkeypatch, app, {"a": {**some, "unusable": "none"}}) == []


@pytest.mark.parametrize("unasked", ["", "no worker was asked: no answer from the broker"])
def test_doctor_does_not_call_silent_workers_fine(
    monkeypatch: pytest.MonkeyPatch, unasked: str
) -> None:
    (one,) = compared(monkeypatch, site(), {}, unasked)
    assert one.level == "unchecked" and (unasked or "none answered") in one.what


def test_doctor_names_invalid_settings_once() -> None:
    code, report = examined(Site(app=shop([])))
    (one,) = [one for one in report["findings"] if one["check"] == "configuration"]
    assert code == 1 and one["where"] == "settings" and "redlock_nodes is empty" in one["what"]


def test_doctor_merges_one_finding_at_many_places() -> None:
    many = [Finding("warning", "it is so", "change it", f"task{n}", "acks") for n in range(7)]
    said = {
        "task0, task1, task2, task3, task4 and 2 more": many,
        "task0, task1": [*many[:2], many[0]],
    }
    for where, found in said.items():
        assert [one.where for one in merged(found)] == [where]


@pytest.mark.parametrize("broker", ["redis://:SECRET@127.0.0.1:1/0", "nonsense://u:SECRET@x"])
def test_doctor_names_an_unreachable_broker_without_its_password(broker: str) -> None:
    replies, unasked = ask(Celery("shop", broker=broker, set_as_current=False), 0.5)
    assert replies == {} and "no worker was asked" in unasked and "SECRET" not in unasked
