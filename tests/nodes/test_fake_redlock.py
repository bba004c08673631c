"""Features of the fake alone (its clock), and what it refuses.

The rest is in the contract tests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_redlock import LeaseLost, QuorumUnavailable, Redlock, SingletonTask
from celery_redlock.protocol.errors import RedlockError
from celery_redlock.runtime.clock import monotonic
from celery_redlock.testing import (
    FakeNodes,
    assert_free,
    assert_locked,
    assert_skipped,
    fake_redlock,
    redlock_disabled,
)


@pytest.fixture
def fake() -> Iterator[FakeNodes]:
    with fake_redlock(5) as nodes:
        yield nodes


@pytest.fixture
def lock(fake: FakeNodes) -> Redlock:
    return Redlock(["redis://127.0.0.1:1/0"], ttl=10.0)


def test_fake_leases_are_extended_or_expire_as_time_passes(fake: FakeNodes, lock: Redlock) -> None:
    lease = lock.acquire("order:2")
    fake.advance(5.0)
    assert not lease.lost
    fake.advance(5.1)
    assert lease.lost
    assert_free("order:2", within=0)
    before = monotonic()
    with lock.lock("order:1") as held:
        fake.advance(1000.0)
        assert monotonic() - before >= 1000.0
        assert held.remaining() > 5.0
        assert_locked("order:1", by=held, within=0)


def test_fake_jump_of_the_clock_loses_only_leases_shorter_than_it(
    fake: FakeNodes, lock: Redlock
) -> None:
    told = threading.Event()
    short = lock.lock("order:1", on_lost=lambda _held: told.set())
    with short as held, lock.lock("order:2", ttl=60.0) as longer:
        fake.jump(11.0)
        # In a thread, which jump() has started; by itself the watchdog looks after 3 seconds.
        assert told.wait(2.5), "the loss is told when jump() returns"
        with pytest.raises(LeaseLost, match="expired"):
            held.ensure()
        longer.ensure()


def test_fake_node_whose_clock_steps_forgets_its_locks(fake: FakeNodes, lock: Redlock) -> None:
    with lock.lock("order:1") as held:
        fake.jump_node(0, 20.0)
        fake.jump_node(1, 20.0)
        assert fake.redlock.try_acquire("order:1") is None
        fake.jump_node(2, 20.0)
        assert fake.redlock.try_acquire("order:1") is not None
        fake.extend()
        assert held.lost


def test_redlock_made_while_fake_nodes_are_cut_off_does_not_reach_them(fake: FakeNodes) -> None:
    fake.partition(0, 1, 2)
    late = Redlock(["redis://127.0.0.1:1/0"])
    with pytest.raises(QuorumUnavailable, match="cut off by the test"):
        late.acquire("order:1")
    fake.heal()
    assert late.acquire("order:1").remaining() > 0


def test_fake_refuses_a_child_process_and_the_number_of_no_node(
    fake: FakeNodes, lock: Redlock
) -> None:
    fake._memory.process += 1  # as if this were another
    with pytest.raises(RedlockError, match="redlock_nodes, which are real servers"):
        lock.acquire("order:1")
    with pytest.raises(RedlockError, match="redlock_nodes"):
        _ = fake.settings
    for wrong in (5, -1):
        with pytest.raises(IndexError, match="they are 0 to 4"):
            fake.partition(wrong)


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(task_always_eager=True, redlock_wait=0.01)
    yield app
    app.close()


def test_split_vote_on_fakes_is_neither_locked_nor_free_and_a_minority_is_free(
    fake: FakeNodes, lock: Redlock
) -> None:
    for node in fake.nodes[:2]:
        node.store("redlock:").held["order:2"] = ("x", node.clock() + 60.0)
    assert_free("order:2", within=0)
    for number, node in enumerate(fake.nodes[:4]):
        token = f"|host|{number % 2}||0||0|{number % 2:032d}"
        node.store("redlock:").held["order:1"] = (token, node.clock() + 60.0)
    with pytest.raises(AssertionError, match="not locked: no quorum of the 5 nodes has one token"):
        assert_locked("order:1", within=0)
    with pytest.raises(AssertionError, match=r"not free: locked by pid 0 .*; pid 1 on host \(2 of"):
        assert_free("order:1", within=0)


def test_assertions_on_fakes_raise_without_a_quorum(fake: FakeNodes, lock: Redlock) -> None:
    fake.partition(0, 1, 2)
    for assertion in (assert_free, assert_locked):
        with pytest.raises(QuorumUnavailable, match="fake-1:6379"):
            assertion("order:1")  # type: ignore[operator]


def test_assert_locked_checks_the_holder_named_by(
    fake: FakeNodes, app: Celery, lock: Redlock
) -> None:
    @app.task(shared=False, base=SingletonTask, name="shop.rebuild")
    def rebuild() -> None:
        assert_locked(rebuild, within=0)
        with pytest.raises(AssertionError, match=r"not locked by task 0-0, but by .*pid \d+ on"):
            assert_locked(rebuild, by="0-0", within=0)

    rebuild()
    with lock.lock("order:1") as mine:
        assert_locked("order:1", by=mine, within=0)
        assert_locked("order:1", by=mine.lease, within=0)
        with pytest.raises(AssertionError, match="not locked by task , but"):
            assert_locked("order:1", by="", within=0)  # a plain call's token has no task's id
        other = lock.acquire("order:2")
        with pytest.raises(AssertionError, match=r"not locked by the lease with token .*, but by"):
            assert_locked("order:1", by=other, within=0)
        with pytest.raises(AssertionError) as failed:
            assert_free("order:1", within=0)
        assert mine.token not in str(failed.value)


def test_assert_locked_accepts_any_slot_of_a_key_with_a_limit(fake: FakeNodes, app: Celery) -> None:
    @app.task(shared=False, base=SingletonTask, name="shop.report", lock_limit=3)
    def report() -> int:
        return 1

    redlock = Redlock.from_app(app)
    leases = [redlock.acquire("shop.report()", limit=3) for _ in range(3)]
    for lease in leases:
        assert_locked(report, by=lease, within=0)
    for lease in leases:
        redlock.release(lease)
    assert_free(report, within=0)
    with fake.hold(report):
        assert redlock.try_acquire("shop.report()", limit=3) is None
    fake.steal(report)
    assert redlock.try_acquire("shop.report()", limit=3) is None


@pytest.mark.parametrize("what", [5, len, Celery("shop", set_as_current=False)])
def test_assert_free_refuses_objects_that_take_no_lock(fake: FakeNodes, what: Any) -> None:
    with pytest.raises(TypeError, match="takes no lock: give"):
        assert_free(what)
    with pytest.raises(TypeError, match="takes no arguments"):
        assert_free("order:1", 1)


def test_assert_skipped_reports_how_a_task_that_was_not_skipped_ended(app: Celery) -> None:
    with pytest.raises(AssertionError, match="was not skipped: its body ran and returned 1"):
        assert_skipped(1)

    @app.task(shared=False, name="shop.fails")
    def fails() -> None:
        raise KeyError("x")

    with pytest.raises(AssertionError, match=r"not skipped: it failed with KeyError\('x'\)"):
        assert_skipped(fails.apply())
    app.conf.task_always_eager = False
    pending = app.AsyncResult("1-2")
    with pytest.raises(AssertionError, match="1-2 has no result yet: PENDING"):
        assert_skipped(pending, within=0)


def test_redlock_disabled_works_for_every_app_and_can_be_nested(app: Celery) -> None:
    @app.task(shared=False, base=SingletonTask, name="shop.rebuild")
    def rebuild() -> bool:
        return True

    app.conf.redlock_nodes = ["redis://127.0.0.1:1/0"]
    with redlock_disabled():
        with redlock_disabled():
            assert rebuild()
        assert rebuild()
    with pytest.raises(QuorumUnavailable):
        rebuild()
    Redlock.from_app(app).close()
