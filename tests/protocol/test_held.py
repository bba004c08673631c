"""A lease in its holder's hands: its state is current, nested use is counted, and it ends once."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import threading
import time
import warnings
from contextvars import copy_context
from dataclasses import replace
from typing import Any

import pytest

from celery_redlock import (
    AsyncRedlock,
    LeaseLost,
    QuorumUnavailable,
    RedlockError,
    ResourceHeld,
    current_lease,
)
from celery_redlock.events import Listener, subscribe, unsubscribe
from celery_redlock.locking.held import HeldLease
from celery_redlock.locking.stack import release_leftovers
from celery_redlock.locking.unlocked import Unlocked
from celery_redlock.protocol.lease import Lease
from celery_redlock.protocol.values import Owner
from celery_redlock.runtime import clock
from tests.support.delivering import rob
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Log, Patch
from tests.support.wait import wait_until


def test_lock_object_accepts_the_stdlib_spelling_or_explains(redlock: FakeRedlock) -> None:
    """`if lock.acquire():` is that of redis-py; `async with` belongs to AsyncRedlock."""
    held = redlock.lock("r")
    assert held.acquire() is True
    held.release()

    async def enter() -> None:
        async with held:
            pass

    with pytest.raises(RedlockError, match="r: a lock of Redlock blocks: use `with`, or Async"):
        asyncio.run(enter())


def test_extension_changes_the_remaining_time_but_no_old_lease(
    redlock: FakeRedlock,
) -> None:
    with redlock.lock("r") as held:
        assert held.remaining() == pytest.approx(10.0 - 0.102)  # less the drift
        redlock.clock.advance(4.0)
        assert held.remaining() == pytest.approx(6.0 - 0.102)
        old = held.lease
        redlock.watchdog.tend()
        assert held.remaining() == pytest.approx(10.0 - 0.102)
        assert old.remaining() == pytest.approx(6.0 - 0.102)  # a value does not change
        assert held.lease.token == old.token
        held.ensure(9.0)
        with pytest.raises(LeaseLost):
            held.ensure(9.9)


def test_second_release_does_nothing_and_frees_no_lock_of_another(redlock: FakeRedlock) -> None:
    held = redlock.lock("r")
    held.acquire()
    assert held.release() is True
    sent = len(redlock.driver.rounds)
    assert held.release() is False
    assert len(redlock.driver.rounds) == sent
    held.acquire()
    redlock.clock.advance(11.0)
    other = redlock.acquire("r")
    assert held.release() is False  # it reports the loss
    assert redlock.tokens("r") == {other.token}


def test_kept_lock_stays_locked_and_is_no_longer_ours(redlock: FakeRedlock) -> None:
    held = redlock.lock("r")
    held.acquire()
    token = held.token
    redlock.clock.advance(4.0)
    assert held.keep(60.0) is True
    assert held.lost
    with pytest.raises(RedlockError, match="no current lease"):
        current_lease()
    assert held.release() is False
    redlock.watchdog.tend()
    redlock.clock.advance(59.9)
    assert redlock.tokens("r") == {token}
    redlock.clock.advance(0.2)
    assert redlock.free("r")


def test_lease_that_is_over_cannot_be_kept(redlock: FakeRedlock) -> None:
    """Such as one released, kept before, of another process, or lost to another holder."""
    held = redlock.lock("r")
    held.acquire()
    held._pid += 1  # as a fork's child sees it
    asked = len(redlock.driver.rounds)
    assert held.keep(60.0) is False
    assert len(redlock.driver.rounds) == asked
    held._pid -= 1
    assert held.keep(5.0) is True
    asked = len(redlock.driver.rounds)
    assert held.keep(60.0) is False
    assert len(redlock.driver.rounds) == asked
    for taken in (True, False):
        late = redlock.lock(f"late {taken}")
        late.acquire()
        redlock.clock.advance(11.0)
        others = {redlock.acquire(late.resource).token if taken else None}
        assert late.keep(60.0) is False
        assert redlock.tokens(late.resource) == others


def test_lock_that_was_never_acquired_has_no_token_and_no_lease(redlock: FakeRedlock) -> None:
    held = redlock.lock("r")
    assert held.lost
    assert held.remaining() == 0.0
    assert held.release() is False
    for ask in (lambda: held.token, lambda: held.lease, held.ensure):
        with pytest.raises(RedlockError, match="r was never acquired"):
            ask()


# -- nested use ----------------------------------------------------------------------------------


def test_nested_blocks_share_one_lease_also_after_an_error_inside(redlock: FakeRedlock) -> None:
    with redlock.lock("r") as outer:
        token = outer.token
        with redlock.lock("r") as middle:
            with pytest.raises(KeyError), redlock.lock("r") as inner:
                assert inner is middle is outer
                raise KeyError
            assert redlock.tokens("r") == {token}
        assert redlock.tokens("r") == {token}
    assert redlock.free("r")
    assert redlock.driver.rounds == ["acquire", "release"]


def test_many_blocks_may_end_in_any_order(redlock: FakeRedlock) -> None:
    """There are more of them than `stack.BLOCK`."""
    names = [f"r{number}" for number in range(250)]
    held = {name: redlock.lock(name).__enter__() for name in names}
    seen = copy_context()
    random.Random(7).shuffle(names)
    while names:
        assert current_lease() is list(held.values())[-1]
        for name in (names[0], names[-1]):
            with redlock.lock(name) as again:
                assert again is held[name]
        held.pop(names.pop()).release()
    with pytest.raises(RedlockError, match="no current lease"):
        current_lease()
    assert seen.run(current_lease).resource == "r249"  # a copy keeps what it saw
    assert len(redlock.driver.rounds) == 500


def test_nested_blocks_of_two_resources_are_two_locks_and_the_inner_is_current(
    redlock: FakeRedlock,
) -> None:
    with redlock.lock("a") as a:
        with redlock.lock("b") as b:
            assert current_lease() is b
            with redlock.lock("a") as again:
                assert again is a
        assert current_lease() is a
        assert redlock.free("b")
        assert not redlock.free("a")
    with pytest.raises(RedlockError, match="no current lease"):
        current_lease()


def test_repr_of_a_held_lease_shows_no_token(redlock: FakeRedlock) -> None:
    with redlock.lock("r") as held:
        assert held.token not in repr(held)
        assert held.token not in repr(held.lease)
        assert "r, 9.898 s left" in repr(held)


# -- losing it -----------------------------------------------------------------------------------


class Witness(Listener):
    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.losses: list[LeaseLost] = []

    def lost(self, loss: LeaseLost) -> None:
        self.losses.append(loss)
        self.heard.append(("lost", loss.resource, loss.reason))

    def released(self, lease: Any, held: bool) -> None:
        self.heard.append(("released", lease.resource, held))


@pytest.fixture
def witness() -> Any:
    witness = Witness()
    subscribe(witness)
    yield witness
    unsubscribe(witness)


def test_loss_of_a_lease_is_reported_to_on_lost_listeners_and_log(
    redlock: FakeRedlock, witness: Witness, caplog: Log
) -> None:
    told: list[HeldLease] = []
    with redlock.lock("r", on_lost=told.append) as held:
        rob(redlock, "r")
        redlock.clock.advance(3.0)
        redlock.watchdog.tend()
        assert held.lost
        wait_until(lambda: told == [held], 10, "it is told")
        assert witness.heard == [("lost", "r", "refused")]
        (record,) = [record for record in caplog.records if "lost the lock r" in record.message]
        assert record.levelno == logging.ERROR
        assert f"held by pid {os.getpid()} on " in record.message
        assert "after 3.0 s: refused" in record.message
        for node in redlock.nodes:
            assert f"{node} {'no' if node in redlock.nodes[:3] else 'yes'}" in record.message
        (loss,) = witness.losses
        assert (loss.task, loss.reason, loss.held_for) == ("", "refused", pytest.approx(3.0))
        assert loss.owner is not None and loss.owner.pid == os.getpid()
        assert [vote.vote.value for vote in loss.votes] == ["no", "no", "no", "yes", "yes"]
        assert held.token not in caplog.text
        redlock.watchdog.tend()
        assert len(told) == 1
    assert witness.heard[1:] == [("released", "r", False)]


def test_loss_names_the_silent_nodes_and_the_time_held(
    redlock: FakeRedlock, witness: Witness
) -> None:
    with redlock.lock("r") as held:
        redlock.driver.dead |= {1, 2, 3}
        for _ in range(40):
            redlock.clock.advance(0.25)
            redlock.watchdog.tend()
        assert held.lost
        (loss,) = witness.losses
        assert loss.reason == "expired"
        assert loss.held_for == pytest.approx(10.0, abs=0.3)
        assert [vote.vote.value for vote in loss.votes] == ["yes", *["silent"] * 3, "yes"]
        assert all(vote.detail for vote in loss.votes[1:4])
        redlock.clock.advance(60.0)
        with pytest.raises(LeaseLost) as raised:
            held.ensure()
        assert raised.value.held_for == loss.held_for  # not until it was asked again
        assert raised.value.votes == loss.votes


def test_the_clock_of_leases_counts_time_that_the_machine_was_suspended(monkeypatch: Patch) -> None:
    if not hasattr(time, "CLOCK_BOOTTIME"):
        pytest.skip("this system has no clock that does")
    clocks = {time.CLOCK_MONOTONIC: 100.0, time.CLOCK_BOOTTIME: 100.0}
    monkeypatch.setattr(time, "clock_gettime", lambda clock: clocks[clock])
    lease = Lease("r", "t", 10.0, 110.0, clock.monotonic)
    assert not lease.lost
    clocks[time.CLOCK_BOOTTIME] += 3600.0  # its lid was closed
    assert lease.lost


# -- no lock at all ------------------------------------------------------------------------------


def test_unlocked_lease_is_never_lost_and_releases_nothing() -> None:
    with Unlocked("r") as held:
        assert current_lease() is held
        assert held.resource == "r"
        assert (held.token, held.fencing_token) == ("", None)
        assert not held.lost and not held.lost_unnoticed()
        assert held.remaining() == held.lease.remaining() == math.inf
        held.ensure(1e9)
        assert held.release() is False
        assert held.keep(60.0) is False
    with pytest.raises(RedlockError):
        current_lease()


def test_slow_on_lost_delays_nothing_else(redlock: FakeRedlock) -> None:
    may_end, ended = threading.Event(), threading.Event()

    def slow(_held: object) -> None:
        may_end.wait(10)
        ended.set()

    held = redlock.lock("r", on_lost=slow)
    held.acquire()
    claim = held.claim
    assert claim is not None
    claim.lose("expired")
    held._lost(claim)
    assert not ended.is_set()
    may_end.set()
    assert ended.wait(10)
    held.release()


def test_thread_with_the_context_of_its_parent_does_not_share_its_lock(
    redlock: FakeRedlock,
) -> None:
    """Python without a GIL starts each thread with the context of its parent."""
    refused: list[bool] = []

    def other() -> None:
        assert current_lease().token == held.token  # it may ask how its parent is doing
        try:
            with redlock.lock("r"):
                refused.append(False)
        except ResourceHeld:
            refused.append(True)
        release_leftovers()

    owner = Owner("host", 1, stamp="a delivery's")
    with redlock.lock("r", owner=owner) as held:
        thread = threading.Thread(target=copy_context().run, args=(other,))
        thread.start()
        thread.join()
        assert not held.lost
        with redlock.lock("r") as inner:
            assert inner is held
    assert refused == [True]


def test_leftovers_of_a_delivery_are_released_and_a_lock_of_the_program_is_kept(
    redlock: FakeRedlock,
) -> None:
    stamped = redlock.lock("left", owner=Owner("host", 1, "task", stamp="a delivery's"))
    stamped.acquire()
    with redlock.lock("own") as own, redlock.lock("named", owner=Owner("host", 1)) as named:
        release_leftovers()
        assert stamped.lost and not own.lost and not named.lost


def test_asyncio_task_does_not_share_the_lock_of_its_parent(
    redlock: FakeRedlock,
) -> None:
    async def child() -> bool:
        with pytest.raises(ResourceHeld), redlock.lock("r"):
            pass
        return True

    async def parent() -> bool:
        with redlock.lock("r") as held, redlock.lock("r") as inner:
            assert inner is held
            return await asyncio.create_task(child())

    assert asyncio.run(parent())


def test_lease_that_ended_unnoticed_is_lost_at_its_release(redlock: FakeRedlock) -> None:
    with redlock.lock("r") as outer, redlock.lock(["q", "r"]) as held:
        assert not held.lost_unnoticed()
        with pytest.raises(LeaseLost):
            held.ensure(60.0)
        redlock.clock.advance(20.0)  # no thread ran meanwhile
        assert outer.lost_unnoticed() and held.lost_unnoticed()  # also what is shared
        with pytest.raises(LeaseLost):
            outer.ensure()
        assert not outer.lost_unnoticed()  # the loss was reported


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "unseen"])
def test_lost_lease_that_its_body_releases_counts_as_lost_unnoticed(
    redlock: FakeRedlock, seen: bool
) -> None:
    """The release does not hide that another may have worked meanwhile."""
    with redlock.lock("r") as held:
        if seen:  # by the watchdog, which finds another's token on the nodes
            rob(redlock, "r")
            redlock.watchdog.tend()
        else:
            redlock.clock.advance(20.0)
        held.release()
        assert held.lost_unnoticed()


def test_lock_that_is_never_entered_warns_when_it_is_collected(redlock: FakeRedlock) -> None:
    with pytest.warns(RuntimeWarning, match="lock of r was made and never acquired") as caught:
        redlock.lock("r")
    assert caught[0].filename == __file__
    with pytest.warns(RuntimeWarning, match="lock of s was made and never acquired"):
        AsyncRedlock(["redis://127.0.0.1:1"]).lock("s")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with redlock.lock("r"), redlock.lock("r") as inner:
            assert inner
        with redlock.lock("r"), pytest.raises(ResourceHeld):
            redlock.lock("r").acquire()
        with pytest.raises(RedlockError), AsyncRedlock(["redis://127.0.0.1:1"]).lock("s"):
            pass  # type: ignore[unreachable]


def test_truth_of_a_lock_that_is_not_held_is_an_error(redlock: FakeRedlock) -> None:
    with pytest.raises(RedlockError, match=r"^r: .* neither true nor false: write `with redlock"):
        if redlock.lock("r"):
            pass
    held = redlock.lock("r")
    held.acquire()
    assert held
    held.release()
    assert held  # an object that was in use, as before


def test_extension_needs_a_quorum_and_a_lease_that_is_not_over(
    redlock: FakeRedlock,
) -> None:
    lease = redlock.acquire("r")
    redlock.driver.dead = {0, 1, 2}
    with pytest.raises(QuorumUnavailable, match="2 of 5 nodes confirmed the extension in time"):
        redlock.extend(lease)
    redlock.driver.dead = set()
    assert redlock.extend(lease).token == lease.token
    redlock.clock.advance(20.0)
    with pytest.raises(LeaseLost, match="to be extended is over"):
        redlock.extend(lease)
    assert not redlock.release(replace(lease, token="another"))
    with pytest.raises(LeaseLost, match=r"to be extended is over \(released\)"):
        redlock.extend(replace(lease, token="another"))
