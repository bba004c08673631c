"""Beats that die, stop or cannot send, and nodes that do not answer: what is sent, when, by which.

When a beat dies, the others go on undisturbed. A tick that was claimed and not sent is sent by
another beat a little later. Without a quorum nothing is sent, and nothing is forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from celery.schedules import crontab

from tests.promises.beat.beat_moments import entry, gaps, minutely
from tests.promises.beat.beat_world import Beat, Killed, Shared, World, Worlds
from tests.support.names import Log, Patch

TTL = 5.0
MANY = 3
"""Entries of each kind that are due together."""


def every_10_s() -> Mapping[str, Any]:
    return entry("every", 10.0)


def both() -> Mapping[str, Any]:
    return {**minutely(), **every_10_s()}


def lines(log: Log, level: int, name: str = "celery_redlock.beat") -> list[str]:
    return [r.getMessage() for r in log.records if r.name == name and r.levelno == level]


def kill_the_first(beat: Beat, _entry: str) -> None:
    if all(other.alive for other in beat.world.beats):
        beat.die()
        raise Killed


# -- A beat dies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [2.0, 10.0])
def test_ticks_go_on_in_time_when_beats_die(any_kind: Worlds, period: float) -> None:
    """The sender dies right after it has sent, and another beat starts: four times."""
    world = any_kind(lambda: {**entry("every", period), **minutely()}, ttl=TTL)
    for _ in range(4):
        world.run(5 * period)
        count = len(world.sent)
        while len(world.sent) == count:
            world.run(0.01)
        world.beats[world.sent[-1].beat].die()
        world.run(0.7 * period)
        world.start()
    world.run(130.0)
    assert max(gaps(world.times("every"))) < period + 0.1
    assert min(gaps(world.times("every"))) >= 0.9 * period
    minutes = range(1, 1 + int(world.time / 60))
    assert [round(at / 60, 2) for at in world.times("cron")] == list(minutes)


@pytest.mark.parametrize("period", [0.5, 2.0, 10.0])
def test_interval_tick_claimed_by_a_dead_beat_is_sent_by_another(
    any_kind: Worlds, period: float
) -> None:
    world = any_kind(lambda: entry("every", period), ttl=TTL)
    world.run(5.5 * period)
    world.before_sending = kill_the_first
    world.run(10 * period)
    assert period < max(gaps(world.times("every"))) < 2 * period + 0.02
    assert sum(beat.alive for beat in world.beats) == 2


# -- A message cannot be sent ---------------------------------------------------------------------


def test_tick_refused_by_the_broker_is_sent_by_another_beat(any_kind: Worlds, caplog: Log) -> None:
    world = any_kind(minutely, ttl=30.0)
    failed: list[Beat] = []

    def refuse_the_first(beat: Beat, name: str) -> None:
        if not failed:
            failed.append(beat)
            raise OSError("broker away")

    world.before_sending = refuse_the_first
    with caplog.at_level(logging.ERROR, "celery.beat"):
        world.run(61.5)
    (message,) = world.sent
    assert message.beat != failed[0].number
    assert 60.0 <= message.at < 61.2
    # As before: the scheduler gets the error, and logs it.
    (said,) = lines(caplog, logging.ERROR, "celery.beat")
    assert "Message Error: Couldn't apply scheduled task cron: broker away" in said
    world.before_sending = None
    world.run(60.0)
    assert [round(at) for at in world.times("cron")][1:] == [120]


def test_beats_go_on_in_time_if_the_broker_refuses_all_of_them(
    any_kind: Worlds, caplog: Log
) -> None:
    """Celery's own schedule moves on after an error, and so does a shared one; no beat spins."""
    world = any_kind(minutely)
    tried: list[float] = []

    def refuse(beat: Beat, name: str) -> None:
        tried.append(world.time)
        raise OSError("broker away")

    world.before_sending = refuse
    world.run(119.0)
    assert not world.sent
    assert "could not be sent from here" in caplog.text
    assert "may have been sent" not in caplog.text
    assert 2 <= len(tried) <= 6
    assert tried[-1] < 64.0
    world.before_sending = None
    world.run(2.0)
    assert [round(at) for at in world.times("cron")] == [120]


def test_beat_ended_while_it_sends_frees_the_tick(any_kind: Worlds, caplog: Log) -> None:
    world = any_kind(minutely, ttl=30.0)

    def end_the_first(beat: Beat, name: str) -> None:
        if all(other.alive for other in world.beats):
            beat.alive = False
            raise SystemExit(0)

    world.before_sending = end_the_first
    with pytest.raises(SystemExit):
        world.run(61.5)
    assert all(not node.held for node in world.nodes)
    assert "may have been sent when this beat was stopped" in caplog.text
    world.run(61.5 - world.time)
    (message,) = world.sent
    assert world.beats[message.beat].alive
    assert message.at < 61.2


def test_slow_sender_of_a_tick_is_waited_for(any_kind: Worlds, caplog: Log) -> None:
    """The claim of the sender is extended while it sends.

    The others see that the tick is not yet sent.
    """
    world = any_kind(
        lambda: {**minutely(), **entry("fast", 0.25)}, ttl=TTL, begin="2026-11-21 10:00:50"
    )

    def slowly(beat: Beat, name: str) -> None:
        if name == "cron":
            world.run_meanwhile(beat, TTL - 0.5)

    world.before_sending = slowly
    with caplog.at_level(logging.INFO, "celery_redlock.beat"):
        world.run(30.0)
    (message,) = [message for message in world.sent if message.entry == "cron"]
    assert round(message.at, 1) == 10.0 + TTL - 0.5
    pid = f"pid {100 + message.beat} on host{message.beat}"
    told = [line for line in lines(caplog, logging.INFO) if line.startswith("cron")]
    assert told == [f"cron (due 2026-11-21T10:01:00Z) is being sent by {pid}"] * 2
    for beat in world.beats:  # once a second, whatever else they have to do
        names = [name for name in beat.driver.tried if name.startswith("beat:shop:cron:job~")]
        (name,) = [name for name in names if name.endswith(":2026-11-21T10:01:00Z")]
        assert 0 < beat.driver.tried[name] <= TTL + 2


def test_hanging_sender_of_a_tick_is_waited_for_one_ttl_at_most(
    any_kind: Worlds, caplog: Log
) -> None:
    """With a half-open connection it neither sends nor fails. Its claim is extended for one ttl."""
    world = any_kind(both, ttl=TTL)
    hung: list[Beat] = []

    def hang_the_first(beat: Beat, name: str) -> None:
        if not hung and world.time > 55.0 and name == "cron":
            hung.append(beat)
            world.run_meanwhile(beat, 90.0)
            beat.die()
            raise Killed

    world.before_sending = hang_the_first
    world.run(160.0)
    times = world.times("cron")
    assert 60.0 + TTL < times[0] < 60.0 + 2 * TTL + 1.1
    assert round(times[1]) == 120
    assert max(gaps(world.times("every"))) < 20.0


# -- A beat is stopped ----------------------------------------------------------------------------


def test_stopped_beat_repeats_no_tick_when_it_wakes(any_kind: Worlds) -> None:
    world = any_kind(both)
    for turn in range(9):
        world.run(33.0)
        world.beats[turn % 3].stop(47.0)
    world.run(100.0)
    assert [round(at / 60, 2) for at in world.times("cron")] == list(range(1, 7))
    assert max(gaps(world.times("every"))) < 10.2
    assert min(gaps(world.times("every"))) >= 9.0


@pytest.mark.parametrize("seconds", [TTL + 2.0, 45.0, 200.0])
def test_beat_stopped_after_its_claim_does_not_send_a_tick_that_another_has_sent(
    any_flow: Worlds, seconds: float
) -> None:
    """It is stopped after its claim and before it sends, so it asks again."""
    world = any_flow(both, ttl=TTL)
    stopped: list[Beat] = []

    def stop_the_first(beat: Beat, name: str) -> None:
        if not stopped and world.time > 55.0 and name == "cron":
            stopped.append(beat)
            world.run(seconds)  # and nobody extends its claim

    world.before_applying = stop_the_first
    world.run(400.0)
    times = world.times("cron")
    assert times[0] < 60.0 + TTL + 1.1
    assert [round(at / 60) for at in times] == list(range(1, len(times) + 1))
    assert len(times) == int(world.time / 60)
    assert max(gaps(world.times("every"))) < 20.0
    assert min(gaps(world.times("every"))) >= 9.0
    assert not stopped[0].watchdog.due.watched


# -- No quorum ------------------------------------------------------------------------------------


def cut(world: World, *nodes: int) -> None:
    """Cut all beats off from some nodes."""
    for beat in world.beats:
        beat.driver.dead = set(nodes)


def many() -> Mapping[str, Any]:
    return {
        name: fields
        for number in range(MANY)
        for name, fields in (
            *entry(f"cron{number}", crontab()).items(),
            *entry(f"every{number}", 5.0 + number).items(),
        )
    }


def test_beats_without_a_quorum_send_nothing_and_forget_nothing(
    any_kind: Worlds, caplog: Log
) -> None:
    world = any_kind(many)
    world.run(30.0)
    before = len(world.sent)
    remembered = {
        (beat.number, name): (beat.entry(name).last_run_at, beat.entry(name).total_run_count)
        for beat in world.beats
        for name in many()
    }
    cut(world, 0, 2, 4)
    for beat in world.beats:
        beat.driver.asked.clear()
    begin = world.time
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        world.run(129.0)
    assert len(world.sent) == before
    for beat in world.beats:
        asked = [when for when, verb in beat.driver.asked if verb == "acquire"]
        assert 90 < len(asked) < 129  # the nodes are asked once a second, however much is due
        assert min(gaps(asked)) >= 1.0
    for (number, name), memory in remembered.items():
        kept = world.beats[number].entry(name)
        if name.startswith("cron"):  # an interval may have been refused before
            assert (kept.last_run_at, kept.total_run_count) == memory
        assert (world.now() - kept.last_run_at).total_seconds() > 120
    errors = lines(caplog, logging.ERROR)
    assert len(errors) == 3 * 3  # each beat, once a minute
    assert all("held back until there is one" in error for error in errors)
    assert "cron0, " in errors[-1] or "every0" in errors[-1]
    assert "3 of 5 nodes did not vote" in errors[-1]

    cut(world)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        world.run(2.2)
    after = [message.entry for message in world.sent[before:]]
    assert sorted(after) == sorted(many())  # each missed tick once
    back = [line for line in lines(caplog, logging.WARNING) if "answers again" in line]
    assert len(back) == 3 if world.kind is not Shared else back  # beats with a due entry log it
    world.run(begin + 129.0 + 58.0 - world.time)
    crons = [m for m in world.sent[before:] if m.entry == "cron0"]
    assert [round(message.at) for message in crons][1:] == [180]


def test_policy_send_without_a_quorum_sends_every_tick_from_every_beat(
    any_kind: Worlds, caplog: Log
) -> None:
    world = any_kind(many, on_unavailable="send")
    cut(world, 0, 2, 4)
    with caplog.at_level(logging.ERROR):
        world.run(119.0)
    count = 1 if world.kind is Shared else 3  # one store: the first beat alone
    for number in range(MANY):
        assert len(world.times(f"cron{number}")) == count
        assert len(world.times(f"every{number}")) == pytest.approx(
            count * 119 / (5 + number), abs=count
        )
    errors = lines(caplog, logging.ERROR)
    assert len(errors) in range(3, 7)
    assert all("sent without a claim, by every beat" in error for error in errors)
    cut(world)
    world.run(8.0)  # at most a second without asking
    before = len(world.times("cron0"))
    world.run(60.0)
    assert len(world.times("cron0")) == before + 1


def test_tick_is_not_sent_again_if_only_part_of_its_quorum_remembers_the_claim(
    any_flow: Worlds,
) -> None:
    """Nodes are restarted one after the other: two of the three that are up remember the claim."""
    world = any_flow(minutely, beats=[0.0])
    cut(world, 3, 4)
    world.run(61.0)
    late = world.start()
    late.entry("cron").last_run_at -= timedelta(hours=1)
    cut(world, 2, 4)
    world.run(50.0)
    assert [round(at) for at in world.times("cron")] == [60]
    assert len(late.driver.asked) < 10  # not taken for a split vote, which is tried again soon


def test_split_votes_of_beats_end_by_chance(
    monkeypatch: Patch, any_kind: Worlds, caplog: Log
) -> None:
    """Five beats wake up within milliseconds, and keep each other from a quorum."""
    monkeypatch.setattr(
        "tests.promises.beat.beat_world.LATE", 0.0
    )  # nothing else comes between them
    world = any_kind(minutely, beats=[0.0, 0.0, 0.0, 0.0, 0.0])
    world.split()
    world.run(610.0)
    tried = sum(verb == "acquire" for beat in world.beats for _when, verb in beat.driver.asked)
    assert tried > 60 if world.kind is not Shared else tried > 11  # it does happen
    times = world.times("cron")
    assert [int(at / 60) for at in times] == list(range(1, 11))
    assert all(at % 60 < 1.0 for at in times)
