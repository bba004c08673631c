"""Several resources in one lock, and limits, over real nodes and processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import redis
from celery import Celery

from celery_redlock import Lease, Redlock, ResourceHeld, SingletonTask
from tests.support import postgres
from tests.support.beside import at_once
from tests.support.machine import in_time
from tests.support.names import Locks, Request, Servers
from tests.support.wait import wait_until

BOTH = ["account-1", "account-2"]


@pytest.fixture
def urls(servers: Servers) -> list[str]:
    return [server.url for server in servers]


@pytest.fixture
def make(urls: list[str], lock_over: Locks) -> Locks:
    return partial(lock_over, urls)


def keys(admins: list[redis.Redis]) -> set[str]:
    return {name for admin in admins for name in admin.keys("redlock:*")}


class Store(NamedTuple):
    """Nodes of one kind, and a look at the keys held there."""

    urls: list[str]
    held: Callable[[], set[str]]


@pytest.fixture(params=["redis", "postgresql"])
def store(request: Request) -> Store:
    if request.param == "redis":
        admins = request.getfixturevalue("admins")
        return Store(request.getfixturevalue("urls"), lambda: keys(admins))
    database = request.getfixturevalue("database")
    rows = "SELECT resource FROM redlock_lease WHERE until > now()"
    return Store([database.url], lambda: {name for (name,) in postgres.sql(database, rows)})


@pytest.fixture
def over(store: Store, lock_over: Locks) -> Locks:
    return partial(lock_over, store.urls, node_timeout=5.0)


def test_lock_of_several_keys_is_held_in_whole_or_not_at_all(over: Locks, store: Store) -> None:
    redlock = over()
    both = {"redlock:account-1", "redlock:account-2"}
    with redlock.lock(BOTH, ttl=3.0) as held:
        assert store.held() == both
        before = held.lease.deadline
        wait_until(lambda: held.lease.deadline > before, 6.0, "an extension")
        with pytest.raises(ResourceHeld, match="account-2 is held by pid"):
            over().acquire(["account-3", "account-2"])
        wait_until(lambda: store.held() == both, 1.0, "the other has left nothing")
    wait_until(lambda: not store.held(), 1.0, "all keys are gone")


def test_hundred_keys_with_limits_of_a_hundred_are_acquired(make: Locks) -> None:
    """For the second lease, ten thousand slots are looked at: a reply of 200 000 bytes."""
    names = [f"account-{number}" for number in range(100)]
    first, second = (make().acquire(names, limit=100, ttl=9.0) for _ in range(2))
    assert not set(first.resources) & set(second.resources)


def in_queue(admins: list[redis.Redis], name: str) -> list[int]:
    """Return the number of waiters in the queue of a resource, per node."""
    return [admin.zcard(f"redlock:{name}#line") for admin in admins]


class Waiting:
    """A waiter for both resources, in a thread.

    It has joined the queue of the held one once it is made.
    """

    def __init__(self, redlock: Redlock, admins: list[redis.Redis], held: str) -> None:
        self.granted = 0.0
        self.lease: Lease | None = None
        self.thread = threading.Thread(target=self._run, args=(redlock,), daemon=True)
        before = in_queue(admins, held)
        self.thread.start()
        after = [count + 1 for count in before]
        wait_until(lambda: in_queue(admins, held) == after, 10.0, "it waits")

    def _run(self, redlock: Redlock) -> None:
        self.lease = redlock.acquire(BOTH, wait=30.0)
        self.granted = time.monotonic()


@pytest.mark.usefixtures("never_by_itself")
@pytest.mark.parametrize("held", BOTH)
def test_waiter_for_several_keys_queues_only_for_the_held_one(
    make: Locks, admins: list[redis.Redis], held: str
) -> None:
    holder = make()
    theirs = holder.acquire(held, ttl=60.0)
    waiting = Waiting(make(), admins, held)
    (other,) = set(BOTH) - {held}
    assert in_queue(admins, other) == [0] * 5
    released = time.monotonic()
    holder.release(theirs)
    waiting.thread.join(10.0)
    in_time(released, waiting.granted, 1.0, "from the release to the grant")
    # Nobody waits for the answers when it leaves the queues.
    both = {"redlock:account-1", "redlock:account-2"}
    wait_until(lambda: keys(admins) == both, 2.0, "it stands in none afterwards")


@pytest.mark.usefixtures("never_by_itself")
def test_waiter_for_several_limits_is_woken_by_a_slot_of_the_full_one(
    make: Locks, admins: list[redis.Redis]
) -> None:
    """A notification for one is passed on while the other is full, whichever slots are held."""
    holder, single, several = make(), make(), make()
    ours = [holder.acquire("tenant", limit=2, ttl=60.0) for _ in range(2)]
    theirs = [holder.acquire("all", limit=3, ttl=60.0) for _ in range(3)]
    got: dict[str, float] = {}

    def wait(
        redlock: Redlock, name: str, resource: str | list[str], limit: int | list[int]
    ) -> None:
        lease = redlock.acquire(resource, limit=limit, wait=30.0, ttl=60.0)
        got[name] = time.monotonic()
        if name == "single":
            redlock.release(lease)

    calls = [
        (several, "several", ["tenant", "all"], [2, 3]),
        (single, "single", "tenant", 2),
    ]
    threads = [threading.Thread(target=wait, args=args, daemon=True) for args in calls]
    for number, thread in enumerate(threads, 1):
        thread.start()
        wait_until(lambda n=number: in_queue(admins, "tenant") == [n] * 5, 10.0, "it waits")
    ours.sort(key=lambda lease: lease.resources)
    released = time.monotonic()
    holder.release(ours[1])  # it calls the one that wants both, which cannot have the other
    threads[1].join(10.0)
    in_time(released, got["single"], 1.0, "from the release to the next waiter's grant")
    wait_until(lambda: in_queue(admins, "all") == [1] * 5, 10.0, "it waits there")
    wait_until(lambda: in_queue(admins, "tenant") == [0] * 5, 10.0, "and only there")
    released = time.monotonic()
    holder.release(theirs[1])
    threads[0].join(10.0)
    in_time(released, got["several"], 1.0, "from the release to the grant")


def test_five_processes_move_money_between_five_accounts(urls: list[str], tmp_path: Path) -> None:
    accounts = [tmp_path / f"account-{number}" for number in range(5)]
    for account in accounts:
        account.write_text("1000")
    clerk = ("-m", "benchmarks.bank", "together", str(tmp_path), "1.0", "0.001", *urls)
    moves = [int(said) for said in at_once([clerk] * 5)]
    assert sum(int(account.read_text()) for account in accounts) == 5000
    assert len({account.read_text() for account in accounts}) > 1  # it did move
    assert sum(moves) > 5


def test_task_with_several_keys_reserves_all_of_them_or_none(store: Store) -> None:
    app = Celery("reserving", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.redlock_nodes = store.urls
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
        assert store.held() == {"redlock:a:1#reserved", "redlock:a:2#reserved"}
        assert move.apply_async((3, 2)).id == first.id
        assert store.held() == {"redlock:a:1#reserved", "redlock:a:2#reserved"}
        assert move.apply_async((4, 3)).id != first.id
        assert len(store.held()) == 4
        Redlock.from_app(app).close()
