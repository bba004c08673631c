"""Readers as tasks declare them, and what a worker makes of them before it asks the nodes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_redlock import ConfigurationError, locked
from celery_redlock.config.task_lock import lock_of
from celery_redlock.protocol.values import Owner, is_shared
from celery_redlock.worker.parking.admission import AdmissionQueue

numbers = itertools.count()


def made(app: Celery, *keys: Any, **options: Any) -> Any:
    @app.task(name=f"shop.read{next(numbers)}")
    @locked(*(keys or ("db:<name>",)), **options)
    def read(name: str) -> None: ...

    return read


def options_of(task: Any) -> Any:
    lock: Any = lock_of(task)
    return lock.options(task.app)


def test_task_is_a_writer_unless_it_declares_shared(app: Celery) -> None:
    assert options_of(made(app, shared=True)).shared is True
    assert options_of(made(app)).shared is False


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"limit": 2}, "not available with limit"),
        ({"rate": "10/m"}, "not available with rate"),
        ({"fencing": True}, "not available with fencing"),
        ({"scope": "until_executed"}, "which keeps other copies out"),
        ({"scope": "until_executing"}, "which keeps other copies out"),
        ({"on_conflict": "replace"}, "not available with on_conflict 'replace'"),
        ({"shared": 1}, "shared"),
    ],
)
def test_shared_with_incompatible_options_is_refused_at_declaration(
    app: Celery, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        options_of(made(app, **{"shared": True, **options}))


def test_fencing_for_all_tasks_is_refused_with_the_option_for_a_reader(app: Celery) -> None:
    app.conf.redlock_fencing = True
    with pytest.raises(ConfigurationError, match=r"give fencing=False \(redlock_fencing sets it"):
        options_of(made(app, shared=True))
    assert options_of(made(app, shared=True, fencing=False)).shared


def test_shared_with_several_keys_is_refused(app: Celery) -> None:
    with pytest.raises(ConfigurationError, match="not available with several keys"):
        made(app, "a:<name>", "b:<name>", shared=True)


@pytest.mark.parametrize("node", ["postgresql://127.0.0.1/locks", "etcd://127.0.0.1:2379"])
def test_shared_over_another_store_than_redis_is_refused(app: Celery, node: str) -> None:
    app.conf.redlock_nodes = [node]
    with pytest.raises(ConfigurationError, match="shared=True needs Redis nodes"):
        options_of(made(app, shared=True))
    assert not options_of(made(app)).shared


def test_token_of_a_reader_is_marked_as_shared() -> None:
    owner = Owner("h", 1, "id|x", 2, "s", "t")
    reader, writer = owner.token("n~shared"), owner.token("n")
    assert (is_shared(reader), is_shared(writer)) == (True, False)
    parsed = Owner.of(reader)
    assert parsed == owner and parsed.shared
    assert str(parsed).endswith(", a reader")
    assert "reader" not in str(Owner.of(writer))


# -- Admission: readers of one key side by side in one worker


class Row:
    """An admission queue for one key."""

    def __init__(self) -> None:
        self.queue = AdmissionQueue()
        self.known: dict[str, Any] = {}

    def arrive(self, name: str, **how: Any) -> bool:
        request = self.known.setdefault(name, SimpleNamespace(name=name, time_start=None))
        shared = not name.startswith("w")
        how = {"since": 0.0, "until": 60.0, "shared": shared, **how}
        return self.queue.arrive(request, ("r",), 0.0, **how)

    def take(self, *, free: bool = False) -> str:
        parked = self.queue.take(("r",), 0.0, free=free)
        return parked.request.name if parked is not None else ""

    def ended(self, name: str) -> None:
        self.queue.ended(self.known[name], ("r",))


def test_readers_go_to_the_pool_together_and_a_writer_is_parked_behind_them() -> None:
    row = Row()
    assert [row.arrive(name) for name in ("r1", "r2", "w1", "r3")] == [True, True, False, False]
    assert not row.queue.is_shared(("r",))
    row.queue.notified(("r",))
    assert row.take() == ""  # readers are at work
    row.ended("r1")
    row.ended("r2")
    assert row.take() == "w1"
    assert row.queue.is_shared(("r",))
    assert row.take(free=True) == ""  # the writer is
    row.ended("w1")
    assert row.take(free=True) == "r3"


@pytest.mark.parametrize(
    ("waiting", "called"),
    [(["r1", "r2", "w1", "r3"], ["r1", "r2", "", ""]), (["w1", "w2"], ["w1", ""])],
)
def test_notification_is_for_a_writer_or_all_readers_up_to_the_next_writer(
    waiting: list[str], called: list[str]
) -> None:
    row = Row()
    assert row.arrive("w0")
    for name in waiting:
        assert not row.arrive(name)
    row.ended("w0")
    row.queue.notified(("r",))
    assert [row.take() for _ in waiting] == called
