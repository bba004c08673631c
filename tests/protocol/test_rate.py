"""A rate: how it is read, which window it counts in, and what a start asks of the nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from celery_redlock import ConfigurationError, ResourceHeld, current_lease, locked
from celery_redlock.locking.start import Start
from celery_redlock.messages.policy import backoff
from celery_redlock.protocol.lease import drift
from celery_redlock.protocol.rate import rate_of
from celery_redlock.protocol.values import Holder
from tests.support.fake_lock import FakeRedlock


@pytest.mark.parametrize(
    ("text", "burst", "starts", "window"),
    [
        ("10/m", None, 10, 60.0),
        ("10/5m", None, 10, 300.0),
        ("1/s", None, 1, 1.0),
        ("100/h", None, 100, 3600.0),
        ("1/d", None, 1, 86_400.0),
        ("10/m", 3, 3, 18.0),
        ("600/m", 10, 10, 1.0),
    ],
)
def test_rate_is_read_as_starts_and_window(
    text: str, burst: int | None, starts: int, window: float
) -> None:
    rate = rate_of(text, burst)
    assert (rate.starts, rate.window) == (starts, window)
    lasts = rate.ttl - drift(rate.ttl)
    assert lasts == pytest.approx(rate.window + rate.slack)
    assert lasts - rate.window <= min(0.25, window / 20) + 1e-9
    assert rate.longest(0.25) > rate.ttl


def start(redlock: FakeRedlock, text: str = "2/m") -> Start:
    taken = Start(redlock, "r", rate_of(text), wait=0.0, owner=None)
    taken.acquire()
    return taken


def test_rate_refuses_further_starts_until_the_window_is_over(redlock: FakeRedlock) -> None:
    for _ in range(2):
        start(redlock).release()
    with pytest.raises(ResourceHeld, match=r"^r has its 2 starts of the last 60 s \(2/m\); ") as no:
        start(redlock)
    assert no.value.holder is not None
    assert no.value.holder.expires_in == pytest.approx(60.0, abs=1.0)
    redlock.driver.clock.advance(62.0)
    start(redlock).release()


def test_start_under_a_rate_is_no_lock_of_the_same_name(redlock: FakeRedlock) -> None:
    taken = start(redlock)
    with redlock.lock("r") as lease:
        assert lease.token
    assert current_lease() is taken
    assert (taken.lost, taken.fencing_token) == (False, None)
    taken.release()


def test_rate_of_several_keys_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="rate counts the starts of one key"):
        locked("a:<x>", "b:<x>", rate="2/m")(lambda x: None)


def test_resource_name_of_a_start_is_refused(redlock: FakeRedlock) -> None:
    with pytest.raises(ConfigurationError, match="the starts that a rate counts"):
        redlock.acquire("r#start")


def test_task_over_its_rate_is_sent_again_when_the_next_may_start() -> None:
    """The time is not random, because the nodes have reported when that is."""
    options: Any = SimpleNamespace(rate="2/m", retry_backoff=1.0, retry_backoff_max=60.0)
    refusal = ResourceHeld("r", holder=Holder("r", None, 3, 3, expires_in=30.0))
    for _ in range(20):
        assert 30.0 < backoff(options, refusal, {"held": 1}, False, 600.0) <= 31.0
        assert backoff(options, refusal, {"held": 1}, False, 20.0) == 20.0
