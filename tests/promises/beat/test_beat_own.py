"""Schedulers and schedules of users' own: they send in ways of theirs, and each tick once."""

from __future__ import annotations

import logging
from collections import Counter
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery.beat import ScheduleEntry, SchedulingError
from celery.schedules import BaseSchedule, schedstate

from celery_redlock import DuplicateTask
from celery_redlock.beat.scheduler import WRAPPED, SchedulerAdapter
from tests.promises.beat.beat_moments import minutely
from tests.promises.beat.beat_world import Beat, Plain, Shared, World
from tests.support.names import Log, Patch


def notes(calls: Counter[str], name: str, method: Any) -> Any:
    """A method of a class, as a tool such as Sentry's puts one in its place."""

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return method(self, *args, **kwargs)

    return patched


@pytest.mark.parametrize("kind", [Plain, Shared])
def test_a_scheduler_class_that_is_patched_after_the_guard_runs_patched(
    monkeypatch: Patch, kind: type[Plain]
) -> None:
    world = World(monkeypatch, minutely, kind=kind, beats=[0.0, 0.3])
    calls: Counter[str] = Counter()
    for name in WRAPPED:
        monkeypatch.setattr(kind, name, notes(calls, name, getattr(kind, name)))
    world.run(130.0)
    assert len(world.times("cron")) == 2
    alone = {"tick", "apply_async", "should_sync"}  # what celery-redbeat goes through
    assert set(calls) == (set(WRAPPED) if kind is Plain else alone)
    if kind is Plain:
        assert calls["apply_entry"] == calls["apply_async"] == len(world.sent)


def test_a_scheduler_that_was_patched_itself_before_the_guard_runs_patched(
    monkeypatch: Patch,
) -> None:
    world = World(monkeypatch, minutely, beats=[])
    scheduler = world.start().scheduler
    for name in WRAPPED:
        delattr(scheduler, name)
    calls: Counter[str] = Counter()
    own = scheduler.apply_entry

    def patched(entry: Any, producer: Any = None) -> Any:
        calls["apply_entry"] += 1
        return own(entry, producer=producer)

    scheduler.apply_entry = patched
    world.beats[0].guard = SchedulerAdapter(scheduler, world.beats[0].redlock, "hold")
    world.run(70.0)
    assert calls["apply_entry"] == len(world.sent) > 0


def copy_of(entry: Any, **fields: Any) -> Any:
    return type(entry)(**{**dict(entry), **fields})


class Copying(Plain):
    """Passes a copy on, with more in it."""

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        super().apply_entry(copy_of(entry, kwargs={"trace": 1}), producer=producer)


class Tenants(Plain):
    """Sends each entry once for each tenant."""

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        for tenant in ("a", "b", "c"):
            one = copy_of(entry, options={**entry.options, "headers": {"tenant": tenant}})
            self.apply_async(one, producer=producer, advance=False)


class Sending(Plain):
    """Sends by other means than Celery's beat."""

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        self.app.send_task(entry.task, entry.args, entry.kwargs)


class Advancing(Plain):
    """A scheduler that lets `apply_async` advance the schedule, which is its default."""

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        self.apply_async(entry, producer=producer)


class Queued(Plain):
    """A scheduler whose task is queued already and raises an error (`on_duplicate="raise"`)."""

    tried: list[float] = []  # noqa: RUF012  # of all beats

    def apply_async(
        self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any
    ) -> Any:
        self.reserve(entry)
        self.tried.append(self.app.now().timestamp())
        try:
            raise DuplicateTask("it is queued", "first", resource="r")
        except DuplicateTask as error:
            raise SchedulingError(f"Couldn't apply scheduled task: {error}")  # noqa: B904  # as there


def test_tick_refused_as_a_duplicate_is_no_failure_to_send(monkeypatch: Patch, caplog: Log) -> None:
    """If it were, each beat would try, and the log would ask for help."""
    Queued.tried.clear()
    World(monkeypatch, minutely, kind=Queued).run(301.0)
    assert len(Queued.tried) == 5
    assert "could not be sent" not in caplog.text
    assert "Message Error" not in caplog.text


def test_entry_excluded_from_claims_stays_so_in_the_schedule(monkeypatch: Patch) -> None:
    options = {"options": {"redlock": False, "queue": "slow"}}
    world = World(monkeypatch, lambda: {"cron": {**minutely()["cron"], **options}}, kind=Advancing)
    world.run(301.0)
    assert len(world.sent) == 3 * 5
    assert all("redlock" not in message.options for message in world.sent)
    assert all(beat.entry("cron").options["redlock"] is False for beat in world.beats)


@pytest.mark.parametrize(("kind", "each"), [(Copying, 1), (Tenants, 3), (Sending, 1)])
def test_all_messages_of_a_tick_are_sent_by_one_beat(
    monkeypatch: Patch, kind: type[Plain], each: int
) -> None:
    world = World(monkeypatch, minutely, kind=kind)
    world.run(301.0)
    sent = Counter((round(message.at / 60), message.beat) for message in world.sent)
    assert [minute for minute, _beat in sent] == [1, 2, 3, 4, 5]
    assert set(sent.values()) == {each}
    if kind is Tenants:
        tenants = [message.options["headers"]["tenant"] for message in world.sent]
        assert tenants == ["a", "b", "c"] * 5


def test_tick_sent_in_part_is_not_sent_again(monkeypatch: Patch) -> None:
    """The broker is away for the second of three tenants: an error of Celery, as before."""
    world = World(monkeypatch, minutely, kind=Tenants, beats=[0.0, 0.3])
    tried: list[int] = []

    def refuse_the_second(beat: Beat, _name: str) -> None:
        tried.append(beat.number)
        if len(tried) == 2:
            raise OSError("broker away")

    world.before_sending = refuse_the_second
    with pytest.raises(Exception, match="broker away"):
        world.run(62.0)
    world.run(62.0 - world.time)
    assert len(tried) == 2
    assert len(world.sent) == 1


class OnlyDue(BaseSchedule):
    """All that Celery's beat asks of a schedule is whether it is due: every three seconds."""

    def is_due(self, last_run_at: datetime) -> schedstate:
        left = (last_run_at + timedelta(seconds=3) - self.now()).total_seconds()
        return schedstate(left <= 0, left if left > 0 else 3)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnlyDue)

    __hash__ = None  # type: ignore[assignment]


def test_schedule_that_implements_only_is_due_keeps_its_pace(monkeypatch: Patch) -> None:
    world = World(
        monkeypatch, lambda: {"own": {"task": "job", "schedule": OnlyDue(), "args": ("own",)}}
    )
    world.run(301.0)
    assert len(world.times("own")) == pytest.approx(100, abs=2)


class Writing(Plain):
    """A scheduler that writes its schedule down when asked to, after each message."""

    broken = False

    def sync(self) -> None:
        sent = sum(message.beat == self.beat.number for message in self.world.sent)
        self.written.append((sent, self.beat.driver.asked[-1][1]))
        if self.broken:
            raise OSError("disk full")


def test_nothing_slow_is_done_between_a_message_and_its_claim(monkeypatch: Patch) -> None:
    """The tick of a beat that dies in between is sent twice."""
    monkeypatch.setattr(Writing, "written", [], raising=False)
    world = World(monkeypatch, minutely, kind=Writing, beats=[0.0])
    world.run(301.0)
    # Once for each message, when the claim has been made long.
    assert Writing.written == [(count, "extend") for count in range(1, 6)]


def test_unwritable_schedule_does_not_undo_a_sent_tick(monkeypatch: Patch, caplog: Log) -> None:
    monkeypatch.setattr(Writing, "written", [], raising=False)
    monkeypatch.setattr(Writing, "broken", True)
    world = World(monkeypatch, minutely, kind=Writing)
    with caplog.at_level(logging.ERROR, "celery_redlock.beat"):
        world.run(301.0)
    assert [round(at / 60, 2) for at in world.times("cron")] == [1, 2, 3, 4, 5]
    assert [r.getMessage() for r in caplog.records if r.name == "celery_redlock.beat"] == [
        "the schedule could not be written"
    ] * 5


class RowEntry(ScheduleEntry):
    """An entry of django-celery-beat, which keeps its last run in a row of a database."""

    def __init__(self, model: Any = None, **fields: Any) -> None:
        super().__init__(**fields)
        self.model = model or SimpleNamespace(
            last_run_at=self.last_run_at, total_run_count=self.total_run_count
        )

    def __next__(self) -> RowEntry:
        self.model.last_run_at = self.default_now()
        self.model.total_run_count += 1
        return copy_of(self, **vars(self.model))


class Rows(Plain):
    Entry = RowEntry


def test_held_back_tick_stays_due_in_a_database_scheduler(monkeypatch: Patch) -> None:
    world = World(monkeypatch, minutely, kind=Rows, beats=[0.0])
    begin = world.now()
    world.beats[0].driver.dead = {0, 1, 2}
    world.run(90.0)
    row = world.beats[0].entry("cron").model
    assert (row.last_run_at, row.total_run_count) == (begin, 0)
    world.beats[0].driver.dead = set()
    world.run(2.0)
    assert len(world.sent) == 1
    assert row.total_run_count == 1
    assert (world.now() - row.last_run_at).total_seconds() < 2.0
