"""Celery signals of locks: which are sent, by whom, with what; over fake nodes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from celery.schedules import crontab

from celery_redlock import (
    DuplicateTask,
    LeaseLost,
    QuorumUnavailable,
    ResourceHeld,
    SingletonTask,
    Skipped,
    events,
)
from celery_redlock.locking.acquisition import Acquisition
from celery_redlock.messages import signals
from celery_redlock.messages.headers import ATTEMPTS
from celery_redlock.protocol.lease import Lease
from celery_redlock.protocol.values import Holder, Owner
from tests.promises.beat.beat_world import World
from tests.support.delivering import Box, deliver, rob, take
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Log, Patch
from tests.support.schedules import due, entries

OTHER = Owner("there", 1, task_id="other-id", task="other")


class Ears:
    """A receiver of all signals."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any, dict[str, Any]]] = []
        self._receivers: list[tuple[Any, Any]] = []

    def open(self) -> None:
        for name in signals.__all__:
            signal = getattr(signals, name)

            def receive(sender: Any = None, signal: Any = None, **more: Any) -> None:
                self.heard.append((signal.name, sender, more))

            signal.connect(receive, weak=False)
            self._receivers.append((signal, receive))

    def close(self) -> None:
        for signal, receive in self._receivers:
            signal.disconnect(receive)

    @property
    def names(self) -> list[str]:
        return [name for name, _sender, _more in self.heard]

    def of(self, name: str) -> tuple[Any, dict[str, Any]]:
        """The one signal of that name: its sender, and what it carries."""
        ((sender, more),) = [(sender, more) for known, sender, more in self.heard if known == name]
        assert more.keys() == getattr(signals, name).providing_args
        return sender, more


@pytest.fixture
def ears() -> Iterator[Ears]:
    ears = Ears()
    ears.open()
    yield ears
    ears.close()
    assert not events.has_listeners()


@pytest.fixture
def charge(app: Any) -> Any:
    @app.task(base=SingletonTask, name="charge", lock_key="k")
    def charge() -> str:
        return "ran"

    return charge


# -- a block ---------------------------------------------------------------------------------------


def test_signals_of_a_block_have_no_sender(redlock: FakeRedlock, ears: Ears) -> None:
    with redlock.lock("r"):
        redlock.clock.advance(4.0)
        redlock.watchdog.tend()
    assert ears.names == ["lock_acquired", "lock_extended", "lock_released"]
    sender, more = ears.of("lock_acquired")
    assert sender is None
    assert more["resource"] == "r"
    assert isinstance(more["lease"], Lease) and more["lease"].resource == "r"
    assert more["owner"].pid == os.getpid()
    assert more["waited"] == 0.0
    assert more["attempts"] == 1
    sender, more = ears.of("lock_extended")
    assert (sender, more["resource"]) == (None, "r")
    assert more["lease"].deadline == redlock.clock() + 10.0 - 0.102
    sender, more = ears.of("lock_released")
    assert (sender, more["resource"], more["held"]) == (None, "r", True)
    assert more["held_for"] == pytest.approx(4.0)


def test_refused_acquire_sends_one_signal_however_often_it_tried(
    redlock: FakeRedlock, ears: Ears
) -> None:
    redlock.acquire("r", owner=OTHER)
    ears.heard.clear()
    before = len(redlock.driver.rounds)
    with pytest.raises(ResourceHeld):
        redlock.acquire(["r", "s"], wait=0.05)
    assert redlock.driver.rounds[before:].count("acquire") > 1
    sender, more = ears.of("lock_contended")
    assert (sender, more["resource"]) == (None, "r + s")
    assert isinstance(more["holder"], Holder)
    assert more["holder"].owner == OTHER


def test_lock_acquired_signal_counts_the_attempts(
    redlock: FakeRedlock, ears: Ears, monkeypatch: Patch
) -> None:
    lease = redlock.acquire("r", owner=OTHER)
    ears.heard.clear()
    attempt = Acquisition._attempt

    async def once_more(*args: Any, **how: Any) -> Any:
        try:
            return await attempt(*args, **how)
        finally:
            redlock.clock.advance(0.25)
            redlock.release(lease)

    monkeypatch.setattr(Acquisition, "_attempt", once_more)
    redlock.acquire(["r", "s"], wait=5.0)
    _sender, more = ears.of("lock_acquired")
    assert more["attempts"] == 2
    assert more["waited"] == pytest.approx(0.5)


def test_lock_unavailable_signal_has_the_vote_of_every_node(
    redlock: FakeRedlock, ears: Ears
) -> None:
    redlock.driver.dead = {0, 1, 2}
    with pytest.raises(QuorumUnavailable):
        redlock.acquire("r")
    sender, more = ears.of("lock_unavailable")
    assert (sender, more["resource"], more["waited"]) == (None, "r", 0.0)
    assert ["dead" in str(vote) for vote in more["votes"]] == [True] * 3 + [False] * 2


def test_loss_sends_lock_lost_and_then_a_late_lock_released(
    redlock: FakeRedlock, ears: Ears
) -> None:
    with redlock.lock("r"):
        rob(redlock, "r")
        redlock.clock.advance(3.0)
        redlock.watchdog.tend()
    sender, more = ears.of("lock_lost")
    assert (sender, more["resource"]) == (None, "r")
    assert isinstance(more["loss"], LeaseLost)
    assert (more["loss"].reason, more["loss"].held_for) == ("refused", 3.0)
    _sender, more = ears.of("lock_released")
    assert more["held"] is False


def test_signal_receiver_that_raises_stops_nothing(redlock: FakeRedlock, caplog: Log) -> None:
    def broken(**_more: Any) -> None:
        raise RuntimeError("receiver is broken")

    names = [name for name in signals.__all__ if name.startswith("lock_")]
    for name in names:
        getattr(signals, name).connect(broken)
    try:
        with redlock.lock("r"):
            redlock.watchdog.tend()
            assert redlock.try_acquire("r") is None
        assert redlock.free("r")
    finally:
        for name in names:
            getattr(signals, name).disconnect(broken)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 4  # acquired, extended, contended, released


# -- a task ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["while_executing", "until_executed"])
def test_signals_of_a_delivery_have_its_task_as_sender(
    redlock: FakeRedlock, app: Any, ears: Ears, scope: str
) -> None:
    """Its reservation is no lock, though the same watchdog extends it."""

    @app.task(base=SingletonTask, name="charge", lock_key="k", lock_scope=scope)
    def charge() -> None:
        redlock.clock.advance(4.0)
        redlock.watchdog.tend()

    deliver(charge)
    assert ears.names == ["lock_acquired", "lock_extended", "lock_released"]
    assert {sender for _name, sender, _more in ears.heard} == {charge}
    assert {more["resource"] for _name, _sender, more in ears.heard} == {"k"}
    _sender, more = ears.of("lock_acquired")
    assert (more["owner"].task_id, more["owner"].task) == ("the-id", "charge")


def test_signals_from_another_thread_have_the_task_as_sender(
    redlock: FakeRedlock, charge: Any, ears: Ears, monkeypatch: Patch
) -> None:
    """This includes a block inside a body, whose owner names no task."""
    with redlock.lock("of none"):
        rob(redlock, "of none")

        @charge.app.task(name="work", ignore_result=True)
        def work() -> Any:
            held = redlock.lock("r")
            held.__enter__()
            rob(redlock, "r")
            return held

        held, _info = deliver(work)
        redlock.clock.advance(3.0)
        redlock.watchdog.tend()  # no task is at work now
        held.release()
    lost = {more["resource"]: sender for name, sender, more in ears.heard if name == "lock_lost"}
    assert lost == {"r": work, "of none": None}


def test_signal_receiver_can_be_connected_to_one_task(redlock: FakeRedlock, app: Any) -> None:
    heard = []

    def receive(sender: Any = None, **_more: Any) -> None:
        heard.append(sender.name)

    tasks = []
    for name in ("charge", "refund"):

        @app.task(base=SingletonTask, name=name)
        def task() -> None: ...

        tasks.append(task)
    signals.lock_acquired.connect(receive, sender=tasks[1])  # a proxy still: nobody has used it
    for task in tasks:
        deliver(task)
    signals.lock_acquired.disconnect(receive, sender=tasks[1]._get_current_object())
    assert heard == ["refund"]
    assert not events.has_listeners()


def test_waited_in_a_signal_counts_over_all_deliveries_of_a_task(
    redlock: FakeRedlock, charge: Any, ears: Ears
) -> None:
    since = time.time() - 100.0
    deliver(charge, **{ATTEMPTS: {"since": since, "held": 3, "unavailable": 1}})
    _sender, more = ears.of("lock_acquired")
    assert 100.0 <= more["waited"] < 200.0
    assert more["attempts"] == 5


# -- kept out --------------------------------------------------------------------------------------


DUPLICATE = {"base": SingletonTask, "name": "charge", "lock_key": "order:1"}


@pytest.mark.parametrize("where", ["publish", "run"])
@pytest.mark.parametrize("policy", ["existing", "raise", "skip", "replace"])
def test_duplicate_sends_task_skipped(
    redlock: FakeRedlock, app: Any, box: Box, ears: Ears, policy: str, where: str
) -> None:
    @app.task(**DUPLICATE, lock_scope="until_executed", lock_on_duplicate=policy)
    def charge() -> None: ...

    take(redlock, "first")
    redlock.acquire("order:1", owner=Owner("there", 7, "first"))  # at work: it is not replaced
    ears.heard.clear()
    if where == "run":
        assert isinstance(deliver(charge)[0], DuplicateTask if policy == "raise" else Skipped)
    else:
        with pytest.raises(DuplicateTask) if policy == "raise" else nullcontext():
            charge.delay()
    sender, more = ears.of("task_skipped")
    assert (sender, more["resource"]) == (charge, "order:1")
    assert (more["where"], more["policy"]) == (where, policy)
    assert more["holder"].task_id == "first"
    assert (more["task_id"] == "the-id") is (where == "run")


def test_skipped_task_sends_task_skipped(redlock: FakeRedlock, app: Any, ears: Ears) -> None:
    @app.task(base=SingletonTask, name="charge", lock_key="k", lock_on_conflict="skip")
    def charge() -> None: ...

    redlock.acquire("k", owner=OTHER)
    ears.heard.clear()
    deliver(charge)
    assert ears.names == ["lock_contended", "task_skipped"]
    sender, more = ears.of("lock_contended")
    assert (sender, more["holder"].owner) == (charge, OTHER)
    sender, more = ears.of("task_skipped")
    assert (sender, more["task_id"], more["resource"]) == (charge, "the-id", "k")
    assert (more["holder"], more["where"], more["policy"]) == (OTHER, "run", "skip")


def test_second_delivery_of_a_done_task_sends_task_skipped(
    redlock: FakeRedlock, app: Any, ears: Ears
) -> None:
    @app.task(base=SingletonTask, name="charge", lock_key="k", acks_late=True)
    def charge() -> None: ...

    charge.backend.forget("the-id")
    deliver(charge)
    deliver(charge, delivery_info={"redelivered": True})
    sender, more = ears.of("task_skipped")
    assert (sender, more["task_id"], more["resource"]) == (charge, "the-id", "k")
    assert (more["holder"], more["where"], more["policy"]) == (None, "run", "done")


# -- a beat ----------------------------------------------------------------------------------------


def test_suppressed_tick_sends_beat_deduplicated_and_no_lock_signals(
    monkeypatch: Patch, ears: Ears
) -> None:
    """Claims of ticks are no locks."""
    world = World(monkeypatch, lambda: entries(crontab()), beats=[])
    one, other = world.start(), world.start()

    @other.app.task(name="job", shared=False)  # else every later app has it
    def job() -> None: ...

    other.app.finalize()
    turn = one.guard._claims.decide(due(one), 0.25)
    refused = other.guard._claims.decide(due(other), 0.25)
    assert not refused.sent
    assert ears.heard == []  # it is still being sent
    turn.claim.finish(sent=True)
    entry = due(other)
    assert other.guard._claims.decide(entry, 0.25).sent
    assert ears.names == ["beat_deduplicated"]
    sender, more = ears.of("beat_deduplicated")
    assert sender == job
    assert more["entry"] is entry
    assert more["tick"] == "2026-11-21T10:00:00Z"
    assert more["resource"].startswith("beat:") and "job-0" in more["resource"]
    assert more["where"] == "beat"
    turn = one.guard._claims.decide(due(one), 0.25)  # its own
    assert turn.sent
    assert ears.names == ["beat_deduplicated"]
