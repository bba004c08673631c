"""Starts that a rate counts, on every kind of node."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from celery_redlock import Redlock, ResourceHeld
from celery_redlock.locking.start import Start
from celery_redlock.protocol.rate import rate_of
from tests.support.subjects import Server


@pytest.mark.parametrize("kind", ["valkey", "debian", "postgresql"])
def test_window_admits_as_many_starts_as_its_rate(
    request: pytest.FixtureRequest, lock_over: Callable[..., Redlock], kind: str
) -> None:
    node: Server = request.getfixturevalue(kind)
    redlock = lock_over([node.url], restart_guard="off", ttl=10.0)

    def start(wait: float = 0.0) -> float:
        with Start(redlock, f"paced-{kind}", rate_of("2/2s"), wait=wait, owner=None):
            return time.monotonic()

    first, _second = start(), start()
    with pytest.raises(ResourceHeld, match=f"paced-{kind} has its 2 starts of the last 2 s"):
        for _ in range(3):  # on a machine so busy that the window is over meanwhile
            start()
    third = start(wait=10.0)
    assert third - first >= 2.0
    assert redlock.try_acquire(f"paced-{kind}") is not None  # no start is in a lock's way
