"""Many processes on few names of one PostgreSQL: never two holders, never a stuck waiter."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import postgres
from tests.support.beside import at_once
from tests.support.wait import wait_until

CROWD = """
import fcntl, json, logging, random, sys, threading, time
from celery_redlock import Redlock, ResourceHeld
url, directory, seed, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
said, inside_twice, fences = [], [], []
class Said(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("celery_redlock").addHandler(Said(logging.WARNING))
redlock = Redlock([url], ttl=20.0, node_timeout=10.0, restart_guard="off")
redlock.connect(10.0)
print("ready", flush=True)
sys.stdin.readline()
until = time.monotonic() + seconds
def work(number):
    chance = random.Random(seed * 100 + number)
    while time.monotonic() < until:
        names = chance.sample("abcd", chance.choice([1, 1, 2, 3]))
        fencing = len(names) == 1 and names[0] in "ab"
        try:
            wait = chance.choice([0.0, 2.0])
            lease = redlock.acquire(names if len(names) > 1 else names[0], wait=wait,
                                    fencing=fencing)
        except ResourceHeld:
            continue
        files = [open(f"{directory}/{name}", "a") for name in names]
        try:
            for file in files:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            inside_twice.append(names)
        if fencing:
            files[0].write(f"{lease.fencing_token}\\n")
            files[0].flush()
        for file in files:
            file.close()
        turns[number] += redlock.release(lease)
turns = [0] * 4
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
redlock.close()
print(json.dumps({"turns": sum(turns), "twice": inside_twice, "said": said}))
"""


def test_crowd_on_few_names_never_overlaps_and_meets_no_error(
    database: LocalPostgres, tmp_path: Path
) -> None:
    """READ COMMITTED is enough: without locks of tables, without a retry of any transaction."""
    crowd = [("-c", CROWD, database.url, str(tmp_path), str(seed), "4") for seed in range(4)]
    ends: list[dict[str, Any]] = [json.loads(said) for said in at_once(crowd)]
    assert [end["twice"] for end in ends] == [[]] * len(crowd)
    assert [end["said"] for end in ends] == [[]] * len(crowd)
    assert min(end["turns"] for end in ends) > 5
    for name in "ab":
        fences = [int(line) for line in (tmp_path / name).read_text().splitlines()]
        assert len(fences) > 5
        assert fences == sorted(set(fences))
    rows = postgres.sql(database, "SELECT count(*) FROM redlock_lease WHERE until > now()")
    assert rows == [(0,)]
    deadlocks = postgres.sql(
        database, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    )
    assert deadlocks == [(0,)]


# -- One after another, by hand: the second waits for the first to commit, and reads what it
# left. That is all of READ COMMITTED that is needed.


class Session:
    """A transaction, open for as long as the test likes, and a thread for blocking queries."""

    def __init__(self, database: LocalPostgres) -> None:
        self.connection = psycopg.connect(database.url)
        self.rows: list[Any] = []
        self.error: Exception | None = None
        self._server = database
        self._thread: threading.Thread | None = None

    def do(self, query: str, *values: Any) -> Any:
        cursor = self.connection.execute(query, values)
        return cursor.fetchone()

    def begin(self, query: str, *values: Any) -> None:
        """Execute it in a thread, commit, and return when it waits for another's lock."""

        def run() -> None:
            try:
                self.rows.append(self.do(query, *values))
                self.connection.commit()
            except psycopg.Error as error:
                self.error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()
        pid = self.connection.info.backend_pid
        waits = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s"
        wait_until(lambda: postgres.sql(self._server, waits, pid) == [(True,)], 0.9, "it waits")

    def end(self) -> Any:
        assert self._thread is not None
        self._thread.join(10.0)
        assert self.error is None
        return self.rows[-1]


@pytest.fixture
def session(database: LocalPostgres) -> Iterator[Callable[[], Session]]:
    opened: list[Session] = []

    def make() -> Session:
        opened.append(Session(database))
        return opened[-1]

    yield make
    for one in opened:
        one.connection.close()


ACQUIRE = "SELECT held_by, granted FROM redlock_acquire(%s, %s, 60, %s, %s)"
RELEASE = "SELECT redlock_release(%s, %s, NULL, NULL)"
FAR = 2**60


def test_second_of_two_simultaneous_acquires_waits_and_is_told_the_first(
    session: Callable[[], Session],
) -> None:
    first, second = session(), session()
    assert first.do(ACQUIRE, ["r"], "one", None, None) == (None, 0)
    second.begin(ACQUIRE, ["r"], "two", None, None)
    first.connection.commit()
    assert second.end()[0] == "one"


@pytest.mark.parametrize("fence", [None, 7], ids=["without a fence", "with one"])
def test_acquire_during_a_release_is_granted_with_a_larger_fence(
    session: Callable[[], Session], fence: int | None
) -> None:
    """The row is deleted or changed while the second transaction waits for it."""
    first, second = session(), session()
    first.do(ACQUIRE, ["r"], "one", fence, FAR)
    first.connection.commit()
    assert first.do(RELEASE, ["r"], "one") == (1,)
    second.begin(ACQUIRE, ["r"], "two", fence, FAR)
    first.connection.commit()
    assert second.end() == (None, 8 if fence else 0)


def test_lease_extended_while_another_acquire_waits_stays_with_its_holder(
    session: Callable[[], Session],
) -> None:
    """The ttl was over when the other came; the first to lock the row has the lease."""
    first, second = session(), session()
    first.do(ACQUIRE, ["r"], "one", None, None)
    first.do("UPDATE redlock_lease SET until = '-infinity' RETURNING 1")
    first.connection.commit()
    extend = "SELECT redlock_extend(%s, %s, %s, %s, %s, true)"
    assert first.do(extend, ["r"], ["one"], [0], [60.0], [60.0]) == ("2",)
    second.begin(ACQUIRE, ["r"], "two", None, None)
    first.connection.commit()
    assert second.end()[0] == "one"


def test_missing_key_taken_during_an_extension_is_not_set_again(
    session: Callable[[], Session],
) -> None:
    first, second = session(), session()
    first.do(ACQUIRE, ["b"], "other", None, None)
    extend = "SELECT redlock_extend(%s, %s, %s, %s, %s, true)"
    second.begin(extend, ["a", "b"], ["mine", "mine"], [0, 0], [60.0] * 2, [60.0] * 2)
    first.connection.commit()
    second._thread.join(10.0)  # type: ignore[union-attr]
    assert isinstance(second.error, psycopg.errors.SerializationFailure)
    second.connection.rollback()
    assert second.do("SELECT count(*) FROM redlock_lease WHERE token = 'mine'") == (0,)


def test_waiter_that_joins_during_a_release_is_notified_or_granted(
    session: Callable[[], Session],
) -> None:
    """The release saw an empty queue.

    The next attempt waits for its commit, and finds the key free.
    """
    first, second = session(), session()
    first.do(ACQUIRE, ["r"], "one", None, None)
    first.connection.commit()
    assert first.do(RELEASE, ["r"], "one") == (1,)
    second.do("SELECT redlock_enqueue(%s, %s, 1, 60)", ["r"], "channel:1")
    second.connection.commit()
    second.begin(ACQUIRE, ["r"], "two", None, None)
    first.connection.commit()
    assert second.end()[0] is None


RENEW = "SELECT redlock_extend(%s, %s, %s, %s, %s, false)"


def test_lease_released_while_the_supervisor_renews_it_stays_free(
    session: Callable[[], Session],
) -> None:
    """Both use connections of their own; the release is first."""
    holder, keeper = session(), session()
    holder.do(ACQUIRE, ["r"], "mine", None, None)
    holder.connection.commit()
    assert holder.do(RELEASE, ["r"], "mine") == (1,)
    keeper.begin(RENEW, ["r"], ["mine"], [0], [60.0], [60.0])
    holder.connection.commit()
    assert keeper.end() == ("0",)
    assert holder.do("SELECT count(*) FROM redlock_lease") == (0,)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT held_by FROM redlock_acquire(%s, 'two', 60, NULL, NULL)",
        "SELECT redlock_extend(%s, '{two,two}', '{0,0}', '{60,60}', '{60,60}', true)",
    ],
)
def test_names_are_locked_in_the_order_of_their_bytes(
    session: Callable[[], Session], query: str
) -> None:
    """The order ignores the collation of the database.

    A waiter for the first name has locked no later one.
    """
    first, second, third = session(), session(), session()
    assert first.do(ACQUIRE, ["B"], "one", None, None) == (None, 0)
    second.begin(query, ["a", "B"])
    assert third.do(ACQUIRE, ["a"], "three", None, None) == (None, 0)
    third.connection.rollback()
    first.connection.rollback()
    assert second.end() in [(None,), ("2",)]
