"""Beats without faults: each tick of each entry is sent once, at its time, by any of them.

What happens to beats, brokers and nodes is in `test_beat_faults.py`.
"""

from __future__ import annotations

import logging
import re
from datetime import timedelta
from typing import Any

import pytest
from celery.schedules import crontab, schedule

from tests.promises.beat.beat_moments import entry, gaps, minutely
from tests.promises.beat.beat_world import Beat, Shared, World, Worlds
from tests.support.names import Log, Patch


def suppressed(log: Log, *, level: int = logging.INFO) -> list[str]:
    """Return the log lines of beats about ticks that others sent."""
    return [
        record.getMessage()
        for record in log.records
        if record.name == "celery_redlock.beat"
        and record.levelno == level
        and " sent by " in record.getMessage()
    ]


# -- Due times ------------------------------------------------------------------------------------


def test_a_crontab_tick_is_sent_once_and_in_time(any_kind: Worlds) -> None:
    world = any_kind(minutely, beats=[0.0, 0.3, 0.7, 11.0])
    world.run(600.0)
    times = world.times("cron")
    assert [round(at / 60) for at in times] == list(range(1, 11))
    assert all(0 <= at % 60 < 0.1 for at in times)
    if world.kind is Shared:
        assert world.store["cron"][1] == 10  # the store counts each


def test_an_overdue_crontab_is_sent_once_when_beats_start(any_kind: Worlds) -> None:
    """Their schedules are of yesterday, and they start one after the other."""
    world = any_kind(minutely, beats=[], begin="2026-11-21 10:00:20")
    yesterday = world.now() - timedelta(days=1)
    for _ in range(3):
        beat = world.start()
        if world.kind is Shared:
            world.store.setdefault("cron", (yesterday, 5))
        else:
            beat.entry("cron").last_run_at = yesterday
        world.run(5.0)
    assert len(world.times("cron")) == 1
    assert world.times("cron")[0] < 0.1
    world.run(60.0)
    assert [round(at) for at in world.times("cron")] == [0, 40]


def test_beats_on_hosts_with_different_clocks_send_each_tick_once(monkeypatch: Patch) -> None:
    world = World(monkeypatch, minutely, beats=[], begin="2026-11-21 10:00:30")
    for skew in (0.0, 20.0, -20.0):
        world.start(skew=skew)
    world.run(600.0)
    # Sent when it is due by the foremost clock.
    assert [round(at) for at in world.times("cron")] == [10 + 60 * n for n in range(10)]


def test_beat_started_in_the_repeated_hour_sends_no_crontab_tick_twice(any_flow: Worlds) -> None:
    """Such a beat counts the entry as overdue, and does not ask the nodes for ever."""
    world = any_flow(
        lambda: entry("cron", crontab(minute="*/7")),
        beats=[0.0],
        begin="2026-10-24 23:57:00",  # in UTC: three minutes before two o'clock
        zone="Europe/Berlin",
    )
    world.run(65 * 60.0)
    before = [3 + 7 * n for n in range(9)]
    assert [round(at / 60) for at in world.times("cron")] == before
    world.run(45 * 60.0)
    late = world.start()
    world.run(12 * 60.0)
    assert [round(at / 60) for at in world.times("cron")] == before
    assert len(late.driver.asked) < 12 * 60 * 2.5  # a lone beat would send as fast as it can
    world.run(5 * 60.0)
    assert [round(at / 60) for at in world.times("cron")] == [*before, 123]


# -- Intervals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [0.5, 2.0, 10.0])
def test_beats_keep_the_period_of_an_interval(any_kind: Worlds, period: float) -> None:
    world = any_kind(
        lambda: entry("every", period),
        beats=[0.0, 0.15 * period, 0.4 * period, 0.93 * period, 3.35 * period],
    )
    world.run(100 * period)
    times = world.times("every")
    ideal = world.time / period
    assert abs(len(times) - ideal) <= 0.02 * ideal
    assert max(gaps(times)) < 1.1 * period
    assert min(gaps(times)) >= 0.9 * period


@pytest.mark.parametrize(("period", "ticks"), [(60, 10), (3600, 3)])
def test_a_relative_interval_is_sent_when_the_clock_is_round(
    any_kind: Worlds, period: int, ticks: int
) -> None:
    world = any_kind(
        lambda: entry("round", schedule(period, relative=True)),
        beats=[0.0, 3.3, 17.1],
        begin="2026-11-21 10:00:05",
    )
    world.run(period * ticks + 10.0)
    assert [round((at + 5) / period, 2) for at in world.times("round")] == list(range(1, ticks + 1))


def test_interval_made_shorter_begins_at_once(any_flow: Worlds) -> None:
    """An old beat has claimed an hour; the new configuration says every ten seconds."""
    world = any_flow(lambda: entry("every", 3600.0), beats=[0.0])
    world.run(3610.0)
    assert len(world.times("every")) == 1
    world.beats[0].die()
    for _ in range(2):
        world.start(lambda: entry("every", 10.0))
        world.run(1.0)
    world.run(100.0)
    assert len(world.times("every")) == pytest.approx(11, abs=1)


# -- The claim ------------------------------------------------------------------------------------


def test_beat_claim_is_kept_and_never_released(any_kind: Worlds) -> None:
    world = any_kind(lambda: {**minutely(), **entry("every", 50.0)}, beats=[0.0])
    world.run(61.0)
    left = {
        re.sub("~[0-9a-f]{12}", "", resource): held[1] - world.clock()
        for node in world.nodes
        for resource, held in node.held.items()
    }
    assert left == {
        "beat:shop:cron:job:2026-11-21T10:01:00Z": pytest.approx(119.0, abs=0.2),
        "beat:shop:every:job:every-50s": pytest.approx(38.5, abs=0.2),
    }
    assert "release" not in {verb for _when, verb in world.beats[0].driver.asked}
    assert not world.beats[0].watchdog.due.watched  # nor extended any more


def test_suppressed_tick_is_logged_once_with_its_sender(monkeypatch: Patch, caplog: Log) -> None:
    world = World(monkeypatch, minutely, beats=[0.0, 0.1, 0.2])
    with caplog.at_level(logging.INFO, "celery_redlock.beat"):
        world.run(61.0)
    sender = world.sent[0].beat
    assert (
        suppressed(caplog)
        == [f"cron (due 2026-11-21T10:01:00Z) was sent by pid {100 + sender} on host{sender}"] * 2
    )
    caplog.clear()
    with caplog.at_level(logging.INFO, "celery_redlock.beat"):
        world.run(60.0)
    assert len(suppressed(caplog)) == 2


# -- Options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 1), ({"redlock": True}, 1), ({"redlock": False}, 3),
     ({"headers": {"redlock": False}}, 3), ({"headers": {"redlock": True}}, 1)],
)  # fmt: skip
def test_entry_can_be_excluded_from_beat_claims(
    any_kind: Worlds, options: dict[str, Any], count: int
) -> None:
    given = {**options, "queue": "slow"}
    world = any_kind(lambda: entry("cron", crontab(), options=given))
    world.run(60.5)
    # Kept in one place, it is sent by the first beat, or by all beats that looked meanwhile.
    assert len(world.sent) == count if world.kind is not Shared else 1
    for message in world.sent:
        assert "redlock" not in message.options
        assert message.options["queue"] == "slow"
    world.run(60.0)  # the entry has not lost its option by that
    assert len(world.sent) == 2 * count if world.kind is not Shared else 2


# -- One does not stand in another's way ----------------------------------------------------------


class Broken(crontab):
    """A schedule that raises when it is asked for its tick."""

    def remaining_delta(self, *args: Any, **kwargs: Any) -> Any:
        if self.broken:
            raise ZeroDivisionError("of the user's own")
        return super().remaining_delta(*args, **kwargs)

    broken = False


class BrokenWhenTaken(Broken):
    """A schedule that is due, and raises after that."""

    def is_due(self, last_run_at: Any) -> Any:
        self.broken = False
        try:
            return super().is_due(last_run_at)
        finally:
            self.broken = True


def test_schedule_that_raises_stops_no_other_entry(any_kind: Worlds, caplog: Log) -> None:
    world = any_kind(
        lambda: {**entry("broken", BrokenWhenTaken()), **entry("every", 10.0), **minutely()},
        beats=[0.0, 0.5],
    )
    with caplog.at_level(logging.ERROR, "celery_redlock.beat"):
        world.run(241.0)
    assert len(world.times("cron")) == 4
    assert len(world.times("every")) == pytest.approx(24, abs=1)
    assert not world.times("broken")
    told = [record for record in caplog.records if record.name == "celery_redlock.beat"]
    assert {record.getMessage() for record in told} == {
        "broken is not sent: its schedule raised an error, so the due tick is unknown"
    }
    assert all(record.exc_info for record in told)
    if world.kind is not Shared:
        assert 2 * 3 <= len(told) <= 2 * 5  # each beat, once a minute


def test_entry_that_is_put_off_delays_no_other_entry(any_flow: Worlds) -> None:
    """One beat sends "slow" for twelve seconds.

    The other asks for it each second and sends the rest.
    """
    world = any_flow(
        lambda: {**entry("slow", crontab()), **entry("every", 2.0)}, beats=[0.0, 0.7], ttl=15.0
    )
    busy: list[Beat] = []

    def slowly(beat: Beat, name: str) -> None:
        if name == "slow":
            busy.append(beat)
            world.run_meanwhile(beat, 12.0)

    world.before_sending = slowly
    world.run(90.0)
    assert [round(at) for at in world.times("slow")] == [72]
    (other,) = set(world.beats) - set(busy)
    assert {m.beat for m in world.sent if m.entry == "every" and 60.1 < m.at < 72} == {other.number}
    assert max(gaps(world.times("every"))) < 2.2
    # Once a second for "slow", twice in two seconds for "every"; and for 10 ms before each of its
    # turns Celery goes over the schedule without a pause.
    asked = [when - 1000 for when, verb in other.driver.asked if verb == "acquire"]
    assert 10 <= len([when for when in asked if 60.1 < when < 72]) <= 12 + 6 + 3
    assert len([when for when in other.passes if 61 < when < 72]) < 11 * 100
