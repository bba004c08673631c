"""Further promises of locks over one PostgreSQL; more are in the tests of Redis."""

from __future__ import annotations

import time

import pytest

from celery_redlock import ResourceHeld
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support.machine import in_time
from tests.support.names import Locks


@pytest.fixture
def make(database: LocalPostgres, lock_over: Locks) -> Locks:
    return lambda **options: lock_over([database], **{"ttl": 60.0, "node_timeout": 5.0, **options})


def test_lock_kept_after_its_block_is_free_in_time(make: Locks) -> None:
    redlock, other = make(), make()
    with redlock.lock("r") as lock:
        assert lock.keep(1.0)
        kept = time.monotonic()
    with pytest.raises(ResourceHeld):
        other.acquire("r")
    other.release(other.acquire("r", wait=10.0))
    assert time.monotonic() - kept > 0.9
    in_time(kept + 1.0, time.monotonic(), 2.0, "until it is free")


def test_lock_extended_by_thread_and_sidecar_is_never_given_to_another(make: Locks) -> None:
    """Both extend it: the thread, and the standby process."""
    redlock, other = make(ttl=1.0, keeper="process"), make()
    with redlock.lock("r") as lock:
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            with pytest.raises(ResourceHeld):
                other.acquire("r")
        assert not lock.lost
