"""Claims of ticks: what a refused beat concludes from a claim, when, and by which requests."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.beat import BeatLazyFunc, ScheduleEntry
from celery.schedules import crontab, schedule

from celery_redlock.beat.claims import AFTER_OTHER_S, RETRY_DELAY_S, TickClaims, refused
from celery_redlock.beat.ticks import Tick
from celery_redlock.protocol.round import Round
from celery_redlock.protocol.values import Holder, Owner
from tests.promises.beat import beat_world
from tests.promises.beat.beat_world import Killed, Shared, World, Worlds
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Log, Patch
from tests.support.schedules import LONG_AGO, due, entries

TIMEOUT = 0.25
"""The node timeout, in seconds."""


def overdue(when: Any, count: int = 1) -> Mapping[str, Any]:
    """Entries that were last sent long ago."""
    return entries(when, count, last_run_at=LONG_AGO)


def claims_of(fake: FakeRedlock, main: str | None = "proj", **conf: Any) -> TickClaims:
    app = Celery(main, set_as_current=False, broker="redis://127.0.0.1:1/0")
    app.conf.update(conf)
    return TickClaims(app, fake, "hold")


def sends(
    claims: TickClaims, task: str = "proj.clean", name: str = "clean up", **given: Any
) -> bool:
    """Return True if a beat sends an entry that is due each full hour and was due just now."""
    app = claims._app
    entry = ScheduleEntry(name, task, schedule=crontab(minute=0, app=app), app=app, **given)
    entry.last_run_at = LONG_AGO
    decision = claims.decide(entry, TIMEOUT)
    if decision.claim is not None:
        decision.claim.finish(sent=True)
    return decision.send


@pytest.mark.parametrize("main", ["proj", None])
def test_apps_of_one_name_share_only_ticks_of_identical_entries(
    monkeypatch: Patch, main: str | None
) -> None:
    fake = FakeRedlock(monkeypatch)
    assert sends(claims_of(fake, main))
    assert sends(claims_of(fake, main), task="other.clean")
    assert sends(claims_of(fake, main), name="clean_up")
    for given in (
        {"args": ("eu",)}, {"args": ("us",)}, {"kwargs": {"region": "eu"}},
        {"options": {"queue": "eu"}}, {"options": {"queue": "us"}},
        {"options": {"exchange": "eu", "routing_key": "eu"}},
    ):  # fmt: skip
        assert sends(claims_of(fake, main), **given), given
        assert not sends(claims_of(fake, main), **given), given
    for queue in ("orders", "mail"):
        for prefix in ("", "a:", "b:"):
            options = {"global_keyprefix": prefix}
            conf = {"task_default_queue": queue, "broker_transport_options": options}
            assert sends(claims_of(fake, main, **conf)), conf
            assert not sends(claims_of(fake, main, **conf)), conf


def test_name_of_a_beat_claim_has_app_queue_entry_task_and_tick(monkeypatch: Patch) -> None:
    fake = FakeRedlock(monkeypatch)
    sends(claims_of(fake))
    sends(claims_of(fake), args=[7])
    held = sorted(re.sub(r"\d{4}-.*", "DUE", name) for name in fake.fakes[0].held)
    assert held[0] == "beat:proj:clean%20up:proj.clean:DUE"
    assert re.fullmatch(r"beat:proj:clean%20up:proj\.clean~[0-9a-f]{12}:DUE", held[1])
    assert len(held) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"args": (7, {"a": (1, 2)})}, {"args": [7, {"a": [1, 2]}]}),  # as of a database's JSON
        ({"args": ()}, {"args": None}),
        ({"options": None}, {"options": {"queue": None, "priority": 5, "expires": 60}}),
        ({"kwargs": {"at": BeatLazyFunc(int)}}, {"kwargs": {"at": BeatLazyFunc(int)}}),
    ],
)
def test_entries_that_send_the_same_message_share_their_ticks(
    monkeypatch: Patch, one: dict[str, Any], other: dict[str, Any]
) -> None:
    fake = FakeRedlock(monkeypatch)
    assert sends(claims_of(fake), **one)
    assert not sends(claims_of(fake), **other)


# Crontab and relative: the nearer the next tick, the shorter would be a claim made now.
@pytest.mark.parametrize("when", [crontab(), schedule(60.0, relative=True)], ids=str)
def test_beat_claim_under_extension_is_not_taken_for_a_sent_tick(
    monkeypatch: Patch, when: Any
) -> None:
    """A claim is extended as long as its message has not left; a claim of a sent tick is kept."""
    world = World(monkeypatch, lambda: entries(when), beats=[0.0, 0.1], ttl=120.0)
    one, other = world.beats
    turn = one.guard._claims.decide(due(one), TIMEOUT)
    assert turn.send
    for beat in world.beats:
        beat.busy = True  # their schedules stand still
    world.run_meanwhile(one, 50.0)
    refused = other.guard._claims.decide(due(other), TIMEOUT)
    assert not refused.send and not refused.sent
    turn.claim.finish(sent=True)
    if turn.claim.kept - world.clock() > 60.0:  # a crontab's: kept until the next tick is near
        assert other.guard._claims.decide(due(other), TIMEOUT).sent


@pytest.mark.parametrize("period", [1.5, 2.0, 5.0, 60.0])
def test_refused_beat_learns_in_time_that_the_tick_was_sent(
    monkeypatch: Patch, period: float
) -> None:
    """The beat was refused while the other was sending.

    A tick counts as sent once it is no longer claimed.
    """
    world = World(monkeypatch, lambda: entries(period), beats=[])
    one, other = world.start(), world.start()
    turn = one.guard._claims.decide(due(one), TIMEOUT)
    refused = other.guard._claims.decide(due(other), TIMEOUT)
    turn.claim.finish(sent=True)
    assert refused.again is not None and not refused.sent
    world.clock.advance(refused.again)
    assert other.guard._claims.decide(due(other), TIMEOUT).sent


def test_a_shared_entry_does_not_stay_due_if_its_sender_died(monkeypatch: Patch) -> None:
    """It died after it had sent, before it could write that to the shared schedule."""
    world = World(monkeypatch, lambda: overdue(crontab(minute=0)), kind=Shared, beats=[])
    one, other = world.start(), world.start()

    def die(entry: Any) -> Any:
        one.die()
        raise Killed

    monkeypatch.setattr(one.scheduler, "reserve", die)
    world.run(60.0)
    assert len(world.sent) == 1
    assert world.store["job-0"][1] == 1
    assert len(other.driver.asked) < 12


def test_refused_shared_entry_is_looked_at_again_within_a_second(monkeypatch: Patch) -> None:
    """Its interval may have been changed since it was refused."""
    world = World(monkeypatch, lambda: overdue(3600.0), kind=Shared, beats=[])
    one, other = world.start(), world.start()
    other.busy = True
    world.run(0.0)
    world.store["job-0"] = (LONG_AGO, 0)  # the other has read it before the first could write it
    other.busy = False
    world.run(0.01)
    assert len(world.sent) == 1
    for beat in (one, other):
        beat.app.conf.beat_schedule = entries(10.0)
    world.run(1.2)
    assert len(world.sent) == 2


def test_nodes_are_asked_once_a_second_however_many_entries_wait_for_a_quorum(
    any_flow: Worlds,
) -> None:
    world = any_flow(lambda: overdue(crontab(), 100), beats=[])
    beat = world.start()
    beat.driver.dead = {0, 1, 2}
    world.run(11.0)
    asked = [when for when, verb in beat.driver.asked if verb == "acquire"]
    assert 9 <= len(asked) <= 11
    assert len(beat.passes) < 11 * 120, "each is looked at once a second"
    beat.driver.dead = set()
    world.run(1.5)
    assert len(world.sent) == 100


def test_entry_without_claims_is_sent_while_others_wait_for_a_quorum(any_flow: Worlds) -> None:
    alone = {"task": "job", "schedule": 2.0, "args": ("alone",), "options": {"redlock": False}}
    world = any_flow(lambda: {**entries(crontab(), 20), "alone": alone}, beats=[0.0])
    world.beats[0].driver.dead = {0, 1, 2}
    world.run(121.0)
    assert {message.entry for message in world.sent} == {"alone"}
    assert 58 <= len(world.sent) <= 60


def test_invalid_options_of_an_entry_do_not_end_a_beat(any_flow: Worlds) -> None:
    """Nor while it waits for a quorum; the other entries are sent."""
    # Due when the first has found that there is no quorum.
    odd = {"task": "job", "schedule": 60.5, "args": ("odd",), "options": ["slow"]}
    world = any_flow(lambda: {**entries(crontab()), "odd": odd}, beats=[0.0, 0.1])
    for dead in ({0, 1, 2}, set[int]()):
        for beat in world.beats:
            beat.driver.dead = dead
        world.run(85.0)
    late, *in_time = world.times("job-0")
    assert 85.0 <= late < 86.5
    assert [round(at) for at in in_time] == [120]
    assert world.times("odd") == []


@pytest.mark.parametrize("slow", [0.0005, 0.15, 0.24])
def test_both_requests_of_a_beat_claim_take_no_longer_than_the_node_timeout(
    monkeypatch: Patch, slow: float
) -> None:
    """The first request may take all of the node timeout, not only half of it."""
    monkeypatch.setattr(beat_world, "ROUND", slow)
    world = World(monkeypatch, lambda: entries(crontab()), beats=[0.0, 0.1])
    asked: list[tuple[str, float]] = []
    for beat in world.beats:
        beat.busy = True
        carry = beat.driver._carry

        def note(round_: Round, carry: Any = carry) -> None:
            asked.append((round_.verb.word, round_.until - round_.sent))
            carry(round_)

        monkeypatch.setattr(beat.driver, "_carry", note)
    one, other = world.beats
    turn = one.guard._claims.decide(due(one), TIMEOUT)
    assert not other.guard._claims.decide(due(other), TIMEOUT).send
    turn.claim.finish(sent=True)
    waits = {verb: pytest.approx(wait) for verb, wait in asked if wait}
    assert waits == {"acquire": TIMEOUT, "peek": TIMEOUT - slow, "extend": TIMEOUT - slow}


def test_foreign_key_in_the_place_of_a_claim_ends_no_beat(monkeypatch: Patch, caplog: Log) -> None:
    world = World(monkeypatch, lambda: entries(crontab()), beats=[0.0, 0.1])
    one, other = world.beats
    (name,) = one.guard._claims.decide(due(one), TIMEOUT).claim.claim.resources
    for node in world.nodes:
        node.occupy(name)
    with caplog.at_level(logging.INFO):
        assert not other.guard._claims.decide(due(other), TIMEOUT).send
    assert "sent by another program, which holds our key" in caplog.text


@pytest.mark.parametrize(("next_in", "again"), [(0.3, 0.3), (30.0, RETRY_DELAY_S), (None, 1.0)])
def test_beat_waiting_for_anothers_message_looks_again_before_the_next_tick(
    next_in: float | None, again: float
) -> None:
    tick = Tick("t", 40.0, due=datetime(2026, 11, 21, tzinfo=timezone.utc), next_in=next_in)
    holder = Holder("r", Owner("h", 1, stamp="10.0"), nodes=3, quorum=2, expires_in=9.0)
    entry = SimpleNamespace(last_run_at=LONG_AGO, total_run_count=0)
    decision = refused(entry, tick, holder, 10.0)
    assert decision is not None and not decision.sent
    assert decision.again == pytest.approx(again + AFTER_OTHER_S)


# -- What is said ----------------------------------------------------------------------------------


def said(caplog: Log) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


@pytest.mark.parametrize("sent", [True, False])
def test_hanging_sender_of_a_tick_is_logged_when_its_claim_ends(
    monkeypatch: Patch, caplog: Log, sent: bool
) -> None:
    """The beat logs it while the sender hangs, and does not blame the nodes afterwards."""
    world = World(monkeypatch, lambda: entries(10.0), beats=[0.0], ttl=2.0)
    (beat,) = world.beats
    turn = beat.guard._claims.decide(due(beat), TIMEOUT)
    beat.busy = True
    world.run_meanwhile(beat, 5.0)
    hangs = (
        "job-0 (every-10s) is still being sent after 2.0 s: its claim has ended (max_lifetime),"
        " and another beat sends it; does the broker hang?"
    )
    assert said(caplog) == [("ERROR", hangs)]
    caplog.clear()
    turn.claim.finish(sent=sent)
    late = "job-0 (every-10s) was sent after its claim had ended: another beat may have sent it too"
    assert said(caplog) == ([("WARNING", late)] if sent else [])


def test_tick_sent_without_a_confirmed_claim_is_logged_as_maybe_sent_again(
    monkeypatch: Patch, caplog: Log
) -> None:
    world = World(monkeypatch, lambda: entries(10.0), beats=[0.0])
    (beat,) = world.beats
    turn = beat.guard._claims.decide(due(beat), TIMEOUT)
    beat.driver.dead = {0, 1, 2}
    turn.claim.finish(sent=True)
    what = "job-0 (every-10s) was sent, but a quorum has not confirmed that"
    assert said(caplog) == [("WARNING", f"{what}: another beat may send it again")]


def test_outage_log_names_the_waiting_entries(monkeypatch: Patch, caplog: Log) -> None:
    caplog.set_level("INFO", "celery_redlock.beat")
    world = World(monkeypatch, lambda: overdue(crontab(), 7), beats=[])
    beat = world.start()
    beat.driver.dead = {0, 1, 2}
    world.run(5.0)
    (level, first), *rest = said(caplog)
    assert level == "ERROR"
    assert first.startswith("no quorum for 0 s: job-")
    assert len(rest) == 6
    assert all(text.endswith(" is held back as well") for _level, text in rest)
    caplog.clear()
    beat.driver.dead = set()
    world.run(2.0)
    again = [text for level, text in said(caplog) if level == "WARNING"]
    assert again[0].startswith("a quorum answers again, after 5.")
    assert again[0].endswith("due ticks are sent now: job-0, job-1, job-2, job-3, job-4 and 2 more")


def test_invalid_redlock_header_of_an_entry_is_logged_once(monkeypatch: Patch, caplog: Log) -> None:
    """Such a header may come from a form of Django, where nobody checks it."""
    odd = {"options": {"headers": {"redlock": "false"}}}
    world = World(monkeypatch, lambda: entries(crontab(), **odd), beats=[0.0, 0.0])
    world.run(181.0)
    assert len(world.sent) == 3
    words = "job-0 is claimed like others: its option 'redlock' must be True or False"
    words += ", but is 'false'"
    assert said(caplog).count(("WARNING", words)) == 2
