"""Installation of the guard in a beat: `beat_init`, and settings that prevent or change it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from celery import Celery, _state
from celery.beat import Scheduler
from celery.signals import beat_init

from celery_redlock import ConfigurationError, install
from celery_redlock.beat.scheduler import SchedulerAdapter, guard
from celery_redlock.locking.redlock import Redlock
from tests.support.fake_lock import FakeRedlock

Log = pytest.LogCaptureFixture
RABBITMQ = "amqp://127.0.0.1:1//"
NODES = [f"redis://127.0.0.1:{port}/0" for port in (1, 2, 3)]
OWN = ["tick", "is_due", "apply_entry", "apply_async", "_when"]


@pytest.fixture(autouse=True)
def redlock(monkeypatch: pytest.MonkeyPatch) -> FakeRedlock:
    """Whatever the settings say: fake nodes; and no tasks that other tests share with every app."""
    monkeypatch.setattr(_state, "_on_app_finalizers", set())
    made = FakeRedlock(monkeypatch)
    monkeypatch.setattr(Redlock, "from_app", lambda app: made)
    return made


class Service:
    """A sender of `beat_init`, with the one attribute that a handler reads."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler


def beat(broker: str = "redis://127.0.0.1:1/0", **conf: Any) -> Service:
    app = Celery("shop", set_as_current=False, broker=broker)
    app.conf.update(result_expires=None, **conf)
    # Lazy: what an entry is made from is not looked at before the signal in this test.
    return Service(Scheduler(app, lazy=True))


def is_guarded(service: Service) -> bool:
    scheduler = service.scheduler
    guards = {id(getattr(getattr(scheduler, name), "__self__", None)) for name in OWN}
    guarded = isinstance(scheduler.tick.__self__, SchedulerAdapter)
    assert guarded == (id(scheduler) not in guards)  # all of them, or none
    return guarded


@pytest.mark.parametrize(
    "conf",
    [
        {"redlock_nodes": NODES},
        {"redlock_nodes": NODES, "redlock_beat": True},
        {"redlock_nodes": NODES, "redlock_beat": None, "redlock_beat_on_unavailable": "send"},
        {},  # then the broker is the node
        {"redlock_ttl": 10.0},
        {"redlock_beat": True},
        {"broker": RABBITMQ, "redlock_nodes": NODES},
    ],
)
def test_beat_is_guarded_and_logs_its_settings(conf: dict[str, Any], caplog: Log) -> None:
    service = beat(**conf)
    with caplog.at_level(logging.INFO, "celery_redlock.beat"):
        guard(service)
    assert is_guarded(service)
    (said,) = [record.getMessage() for record in caplog.records]
    on_unavailable = conf.get("redlock_beat_on_unavailable", "hold")
    assert said.startswith("each tick is sent by one beat: claims redlock:beat:shop:* on 127.0.0.1")
    assert said.endswith(f", quorum 3, ttl 10 s, without a quorum: {on_unavailable}")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("hold", "no quorum yet, nothing is sent until there is one: "),
        ("send", "no quorum yet, every tick is, by every beat, sent until there is one: "),
    ],
)
def test_beat_started_without_a_quorum_logs_it_at_once(
    redlock: FakeRedlock, caplog: Log, policy: str, words: str
) -> None:
    """It does not wait until an entry is due, which may be at night."""
    redlock.driver.dead = {0, 1, 2}
    service = beat(redlock_nodes=NODES, redlock_beat_on_unavailable=policy)
    guard(service)
    assert is_guarded(service)
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert said.startswith(words)
    assert said.count("silent (dead)") == 3


@pytest.mark.parametrize("broker", [RABBITMQ, "memory://", "sqs://"])
@pytest.mark.parametrize("conf", [{}, {"redlock_ttl": 10.0}])
def test_a_beat_without_any_node_is_not_guarded_and_warns_once(
    broker: str, conf: dict[str, Any], caplog: Log
) -> None:
    service = beat(broker, **conf)
    guard(service)
    assert not is_guarded(service)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("this beat sends every tick, and so does every other: ")
    assert "set redlock_nodes" in record.getMessage()


def test_beat_with_redlock_beat_true_does_not_start_without_any_node(caplog: Log) -> None:
    service = beat(RABBITMQ, redlock_beat=True)
    with pytest.raises(SystemExit):
        guard(service)
    assert "redlock_nodes is not set and the broker is no Redis" in caplog.text


def test_beat_guard_warns_of_an_app_without_a_name(caplog: Log) -> None:
    service = beat(redlock_nodes=NODES)
    service.scheduler.app.main = None
    guard(service)
    assert "the app has no name" in caplog.text


@pytest.mark.parametrize(
    "conf",
    [
        {"redlock_beat": False},
        {"redlock_nodes": NODES, "redlock_beat": False},
        {"broker": RABBITMQ, "redlock_beat": False},
    ],
)
def test_beat_is_not_guarded_if_redlock_beat_is_false(conf: dict[str, Any], caplog: Log) -> None:
    service = beat(**conf)
    with caplog.at_level(logging.DEBUG, "celery_redlock"):
        guard(service)
    assert not is_guarded(service)
    assert not caplog.records


def test_beat_is_not_guarded_where_all_locks_are_off(caplog: Log) -> None:
    service = beat(redlock_nodes=NODES, redlock_enabled=False)
    guard(service)
    assert not is_guarded(service)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "every beat sends every tick" in record.getMessage()


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ({"redlock_beat": "yes"}, "redlock_beat must be True or False, or None; it is 'yes'"),
        ({"redlock_beat_on_unavailable": "wait"}, "redlock_beat_on_unavailable must be one of"),
        ({"redlock_bat": True}, "there is no option redlock_bat; did you mean redlock_beat?"),
        ({"redlock_ttl": 0}, "redlock_ttl must be"),
        ({"redlock_nodes": [*NODES, NODES[0]]}, "redlock_nodes"),
    ],
)
def test_invalid_beat_setting_ends_the_beat(conf: dict[str, Any], said: str, caplog: Log) -> None:
    """By SystemExit: Celery logs any other exception of a signal handler, and goes on."""
    service = beat(**{"redlock_nodes": NODES, **conf})
    with pytest.raises(SystemExit) as raised:
        guard(service)
    assert raised.value.code == 1
    assert not is_guarded(service)
    (record,) = [r for r in caplog.records if r.levelno == logging.CRITICAL]
    assert said in record.getMessage()


def test_beat_init_signal_installs_the_beat_guard() -> None:
    install()
    service = beat(redlock_nodes=NODES)
    beat_init.send(sender=service)
    assert is_guarded(service)
    install()  # again is once
    tick = service.scheduler.tick
    beat_init.send(sender=service)
    assert service.scheduler.tick == tick


def test_beat_ended_by_unusable_nodes_logs_how_to_start_unguarded(
    redlock: FakeRedlock, monkeypatch: pytest.MonkeyPatch, caplog: Log
) -> None:
    def check() -> list[str]:
        raise ConfigurationError("node a:1 is not usable: it is a replica")

    monkeypatch.setattr(redlock, "check", check)
    with pytest.raises(SystemExit):
        guard(beat())
    assert caplog.messages == [
        "celery_redlock: node a:1 is not usable: it is a replica (if this is the only beat,"
        " redlock_beat = False starts it without claims)"
    ]


def test_beat_guard_logs_warnings_about_nodes(
    redlock: FakeRedlock, monkeypatch: pytest.MonkeyPatch, caplog: Log
) -> None:
    monkeypatch.setattr(redlock, "check", lambda: ["node a:1 started 3 s ago, 100 %"])
    guard(beat(redlock_nodes=NODES))
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert record.getMessage() == "node a:1 started 3 s ago, 100 %"
