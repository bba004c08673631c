"""Waiters of this process: how long they wait, and what they know about the nodes."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from celery_redlock import QuorumUnavailable
from celery_redlock.locking import acquisition
from celery_redlock.locking.acquisition import Acquisition
from celery_redlock.locking.pubsub import ReleaseSubscriber
from celery_redlock.locking.wait_queue import Waiter
from celery_redlock.protocol import quorum
from celery_redlock.protocol.claim import Claim
from celery_redlock.runtime.blocking import blocking
from celery_redlock.runtime.polling import PolledEvent, SharedPoll
from celery_redlock.stores.redis.address import parse_nodes
from tests.support.fake_lock import FakeRedlock
from tests.support.names import Patch

ADDRESS = parse_nodes(["redis://127.0.0.1:1"])[0]
PREFIX = "redlock:"


def an_event() -> PolledEvent:
    return SharedPoll(threading.RLock(), lambda _ready: None).event()


def test_waiter_that_joined_a_queue_twice_cannot_tell_when_a_node_removed_it() -> None:
    waiter = Waiter(2, {0, 1, 2}, "process", an_event())
    waiter.forget()
    waiter.add_notification(0)
    assert waiter.left_by == {0}
    waiter.forget()
    waiter.add_notification(1)  # perhaps a late call, from before: it stands there once more
    assert waiter.left_by == set()


def test_waiter_that_a_minority_has_notified_waits_for_the_others(monkeypatch: Patch) -> None:
    monkeypatch.setattr("celery_redlock.locking.wait_queue.FEW_NOTIFIED_S", (0.1, 0.1))
    waiter = Waiter(2, {0, 1, 2}, "process", an_event())
    waiter.add_notification(0)
    begun = time.monotonic()
    assert blocking(waiter.wait(60.0))
    assert 0.1 <= time.monotonic() - begun < 30.0
    waiter.add_notification(1)
    assert blocking(waiter.wait(60.0)), "a quorum is waited for no longer"


def test_newly_connected_node_may_have_notified_the_waiter_before(monkeypatch: Patch) -> None:
    monkeypatch.setattr(ReleaseSubscriber, "_connect_missing", lambda _: None)  # nobody is there
    wakeup = ReleaseSubscriber([ADDRESS] * 3, PREFIX)
    with wakeup.waiter() as waiter:
        wakeup.notified(1, waiter.name.encode())
        assert (waiter.notifications, waiter.sure, waiter.is_subscribed) == (1, True, False)
        for node in (0, 1):
            wakeup.subscribed(node)
        assert (waiter.notifications, waiter.sure, waiter.is_subscribed) == (2, False, True)
        wakeup.disconnected(0)
        assert not waiter.is_subscribed
        waiter.forget()
        wakeup.close()
        assert waiter.closed and blocking(waiter.wait(60.0)), "there is nothing to wait for"


def test_pause_of_a_waiter_is_no_longer_than_the_rest_of_its_wait(
    redlock: FakeRedlock, monkeypatch: Patch
) -> None:
    pauses: list[float] = []

    async def pause(_waiter: object, seconds: float) -> bool:
        pauses.append(seconds)
        return False

    monkeypatch.setattr(ReleaseSubscriber, "_connect_missing", lambda _: None)  # nobody is there
    monkeypatch.setattr(acquisition, "JITTER", SimpleNamespace(uniform=lambda _low, high: high))
    monkeypatch.setattr(Waiter, "wait", pause)
    redlock.driver.dead = {0, 1, 2}
    with pytest.raises(QuorumUnavailable):
        redlock.acquire("r", wait=0.1)
    assert len(pauses) > 5
    assert max(pauses) <= 0.1


@pytest.mark.parametrize(("wait", "tries"), [(5.0, 1), (0.0, 1), (5.2, 2)])
def test_acquire_does_not_wait_if_its_wait_is_shorter_than_the_restart_guard(
    redlock: FakeRedlock, monkeypatch: Patch, wait: float, tries: int
) -> None:  # fmt: skip
    asked = []

    async def attempt(*_what: object, **_how: object) -> None:
        asked.append(1)
        if len(asked) == 2:
            redlock.client.wakeup.close()  # it does not wait on
        raise QuorumUnavailable("they were just started", retry_after=5.1)

    monkeypatch.setattr(Acquisition, "_attempt", attempt)
    with pytest.raises(QuorumUnavailable):
        redlock.acquire("r", wait=wait)
    assert len(asked) == tries


def test_notification_by_a_release_is_remembered_for_each_key(redlock: FakeRedlock) -> None:
    for name in ("a", "b"):
        claim = Claim(name, "t", 10.0, 5)
        redlock.client._released(claim, quorum.Released(held=True, notified=True, confirmed=True))
    assert [redlock.client.has_notified(name, 1.0) for name in ("a", "b", "a", "c")] == [
        *(True, True, False, False)
    ]
