"""Locks over one PostgreSQL do all that they do over Redis."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from celery import Celery

from celery_redlock import Redlock, ResourceHeld, SingletonTask
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import postgres
from tests.support.crowd import at_most_three_are_inside
from tests.support.machine import in_time

ROOT = Path(__file__).parents[2]


@pytest.fixture
def make(database: LocalPostgres, lock_over: Callable[..., Redlock]) -> Callable[..., Redlock]:
    return lambda **options: lock_over([database], **{"ttl": 60.0, "node_timeout": 5.0, **options})


def held(database: LocalPostgres) -> set[str]:
    rows = postgres.sql(database, "SELECT resource FROM redlock_lease WHERE until > now()")
    return {name.removeprefix("redlock:") for (name,) in rows}


def test_a_lock_of_several_is_held_in_whole_or_not_at_all(
    make: Callable[..., Redlock], database: LocalPostgres
) -> None:
    redlock, other = make(), make()
    with redlock.lock(["a", "b"]):
        assert held(database) == {"a", "b"}
        with pytest.raises(ResourceHeld, match="b is held by pid"):
            other.acquire(["c", "b"])
        assert held(database) == {"a", "b"}
    assert held(database) == set()


def test_at_most_so_many_are_inside(make: Callable[..., Redlock]) -> None:
    at_most_three_are_inside(make, threads=6, times=4)


def test_what_is_kept_after_the_block_is_free_in_time(
    make: Callable[..., Redlock], database: LocalPostgres
) -> None:
    redlock, other = make(), make()
    with redlock.lock("r") as lock:
        assert lock.keep(1.0)
        kept = time.monotonic()
    with pytest.raises(ResourceHeld):
        other.acquire("r")
    other.release(other.acquire("r", wait=10.0))
    assert time.monotonic() - kept > 0.9
    in_time(kept + 1.0, time.monotonic(), 2.0, "until it is free")


HOLD = """
import sys, time
from celery_redlock import Redlock
redlock = Redlock(sys.argv[1:], ttl=60.0, restart_guard="off", keeper="process", node_timeout=5.0)
with redlock.lock(["account-2", "account-1"]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_held_is_free_at_once(
    make: Callable[..., Redlock], database: LocalPostgres
) -> None:
    other = make()
    other.release(other.acquire("x"))
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, database.url], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(ResourceHeld):
                other.acquire("account-1")
        finally:
            holder.kill()
        killed = time.monotonic()
    other.release(other.acquire(["account-1", "account-2"], wait=10.0))  # the ttl is a minute
    in_time(killed, time.monotonic(), 1.0, "from the death to the grant")


def test_a_long_held_lock_is_extended_by_two_that_never_give_it_to_another(
    make: Callable[..., Redlock],
) -> None:
    """By its thread, and by the process that stands by."""
    redlock, other = make(ttl=1.0, keeper="process"), make()
    with redlock.lock("r") as lock:
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            with pytest.raises(ResourceHeld):
                other.acquire("r")
        assert not lock.lost


def test_a_task_is_published_once_while_it_waits_and_again_afterwards(
    database: LocalPostgres,
) -> None:
    app = Celery("reserving", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.redlock_nodes = [database.url]
    app.conf.redlock_node_timeout = 5.0

    @app.task(
        shared=False,
        base=SingletonTask,
        lock_key=["a:<src>", "a:<dst>"],
        lock_scope="until_executed",
    )
    def move(src: int, dst: int) -> None: ...

    with app:
        first = move.apply_async((1, 2))
        assert held(database) == {"a:1#reserved", "a:2#reserved"}
        assert move.apply_async((3, 2)).id == first.id
        assert held(database) == {"a:1#reserved", "a:2#reserved"}
        assert move.apply_async((4, 3)).id != first.id
        assert len(held(database)) == 4
        Redlock.from_app(app).close()
