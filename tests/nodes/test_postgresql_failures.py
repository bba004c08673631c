"""A failure of PostgreSQL is a silent node: no lock is held without a valid deadline.

A free lock is granted within a second once the server is back.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from celery_redlock import ConfigurationError, QuorumUnavailable, Redlock, ResourceHeld
from celery_redlock.protocol.errors import NodeError
from celery_redlock.protocol.restart_guard import RestartGuard
from celery_redlock.stores.kinds import make_node, parse_nodes
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import postgres
from tests.support.machine import in_time
from tests.support.names import Patch
from tests.support.peer import DEADLINE, in_thread
from tests.support.wait import wait_until

DURABLE = {"fsync": "on", "full_page_writes": "on"}


@pytest.fixture(scope="module")
def server() -> Iterator[LocalPostgres]:
    with postgres.start_postgres(**DURABLE, max_connections="20") as started:
        yield started


@pytest.fixture
def make(server: LocalPostgres, lock_over: Callable[..., Redlock]) -> Callable[..., Redlock]:
    usual: dict[str, Any] = {"ttl": 60.0, "node_timeout": 0.3}

    def over(url: str = "", **options: Any) -> Redlock:
        return lock_over([url or server.url], **{**usual, **options})

    return over


def url_of(server: LocalPostgres, user: str = "postgres", database: str = "postgres") -> str:
    return f"postgresql://{user}@127.0.0.1:{server.port}/{database}"


def taken_again(redlock: Redlock, since: float, resource: str = "r") -> None:
    """Check that the lock is granted within a second from then."""
    while True:
        try:
            lease = redlock.acquire(resource)
            break
        except (QuorumUnavailable, ConfigurationError):
            assert time.monotonic() < since + 10.0, "it is not back"
            time.sleep(0.01)
    in_time(since, time.monotonic(), 1.0, "until what is free is taken")
    assert redlock.release(lease)


def free(server: LocalPostgres, resource: str = "r") -> bool:
    query = "SELECT FROM redlock_lease WHERE resource = %s AND until > clock_timestamp()"
    return not postgres.sql(server, query, f"redlock:{resource}")


def backends(server: LocalPostgres) -> list[int]:
    query = "SELECT pid FROM pg_stat_activity WHERE application_name = 'celery_redlock'"
    return [pid for (pid,) in postgres.sql(server, query)]


def terminate(server: LocalPostgres) -> None:
    """End our backends, and wait until they have ended."""
    for pid in backends(server):
        postgres.sql(server, "SELECT pg_terminate_backend(%s)", pid)


@contextlib.contextmanager
def row_locked(server: LocalPostgres, resource: str = "r") -> Iterator[None]:
    """Keep the row locked by another transaction during the block."""
    with postgres.admin(server) as connection, connection.transaction():
        connection.execute(
            "INSERT INTO redlock_lease VALUES (%s, 'x', 0, '-infinity', now())"
            " ON CONFLICT (resource) DO UPDATE SET changed = now()",
            [f"redlock:{resource}"],
        )
        yield
        raise psycopg.Rollback


# -- The server


def test_lock_on_a_hanging_postgresql_is_lost_at_its_deadline(
    server: LocalPostgres, make: Callable[..., Redlock]
) -> None:
    redlock = make(ttl=1.0)
    held = redlock.lock("r")
    held.acquire()
    server.pause()
    asked = time.monotonic()
    with pytest.raises(QuorumUnavailable):
        redlock.acquire("other")
    assert time.monotonic() - asked < 1.0
    wait_until(lambda: held.lost, 3.0, "it is known to be lost")
    assert held.remaining() <= 0
    server.resume()
    since = time.monotonic()
    held.release()  # behind the extensions that reach it now
    taken_again(redlock, since, "other")
    taken_again(make(), since)


def test_killed_postgresql_remembers_its_locks_after_a_restart(
    server: LocalPostgres, make: Callable[..., Redlock]
) -> None:
    """The holders go on: with the guard, too, it is known to have forgotten nothing."""
    # Far longer than the server takes to start after a crash.
    redlock, other = make(restart_guard="uptime", ttl=20.0), make(restart_guard="uptime", ttl=20.0)
    with redlock.lock("r", fencing=True) as held:
        server.kill()
        with pytest.raises(QuorumUnavailable):
            other.acquire("other")
        server.start()
        since = time.monotonic()
        taken_again(other, since, "other")
        with pytest.raises(ResourceHeld):
            other.acquire("r")
        first = held.lease.deadline
        wait_until(lambda: held.lease.deadline > first, 20.0, "it is extended")
        fence = held.lease.fencing_token
    lease = other.acquire("r", wait=5.0, fencing=True)
    assert lease.fencing_token > fence  # type: ignore[operator]


def test_release_lost_with_a_killed_connection_is_made_over_the_next(
    server: LocalPostgres, make: Callable[..., Redlock]
) -> None:
    redlock = make()
    lease = redlock.acquire("r")
    with row_locked(server):
        redlock.release(lease)  # it is not answered in time
        assert not free(server)
        terminate(server)
        since = time.monotonic()
    taken_again(redlock, since, "other")
    wait_until(lambda: free(server), 5.0, "it is free")
    in_time(since, time.monotonic(), 1.0, "until it is free")


def test_acquire_whose_connection_is_killed_leaves_nothing(
    server: LocalPostgres, make: Callable[..., Redlock]
) -> None:
    redlock = make(node_timeout=5.0)
    redlock.release(redlock.acquire("other"))  # one that never worked is not tried at once
    got: list[Any] = []

    def acquire() -> None:
        with redlock.lock("r"):
            got.append(not free(server))

    thread = threading.Thread(target=acquire)
    with row_locked(server):
        thread.start()
        waits = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        wait_until(lambda: postgres.sql(server, waits), 2.0, "it waits for the row")
        terminate(server)
    thread.join(10.0)
    assert got == [True]  # it was asked again, on the next connection
    wait_until(lambda: free(server), 1.0, "it is free")


def test_lock_granted_after_its_deadline_is_released(
    server: LocalPostgres, make: Callable[..., Redlock]
) -> None:
    redlock = make()
    redlock.connect()
    with row_locked(server), pytest.raises(QuorumUnavailable, match=r"no answer within 0\.3"):
        redlock.acquire("r")
    since = time.monotonic()
    taken_again(redlock, since)
    taken_again(make(), since)


def test_locked_row_is_waited_for_a_second_at_most(
    server: LocalPostgres, make: Callable[..., Redlock]
) -> None:
    """Otherwise all requests behind it would wait as well."""
    redlock = make(node_timeout=3.0)
    redlock.connect()
    with row_locked(server):
        with pytest.raises(QuorumUnavailable, match="lock timeout"):
            redlock.acquire("r")
        assert redlock.release(redlock.acquire("other"))
    taken_again(redlock, time.monotonic())


# -- What its user can mend


def test_missing_or_old_tables_are_reported_with_the_command_to_run(
    server: LocalPostgres, make: Callable[..., Redlock]
) -> None:
    postgres.sql(server, "CREATE DATABASE fresh")
    redlock = make(url_of(server, database="fresh"))
    with pytest.raises(ConfigurationError, match="tables are missing; run celery redlock migrate"):
        redlock.acquire("r")
    with psycopg.connect(url_of(server, database="fresh"), autocommit=True) as connection:
        connection.execute(postgres.SCHEMA)
        connection.execute(
            "CREATE OR REPLACE FUNCTION redlock_version() RETURNS int LANGUAGE sql AS 'SELECT 0'"
        )
        with pytest.raises(ConfigurationError, match="of version 0, and this library wants 2; run"):
            make(url_of(server, database="fresh")).acquire("r")
        connection.execute(postgres.SCHEMA)
        # An old client reconnects without a restart, and the node votes at once.
        taken_again(redlock, time.monotonic())
        taken_again(make(url_of(server, database="fresh")), time.monotonic())


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_isolation_other_than_read_committed_is_refused(
    server: LocalPostgres, make: Callable[..., Redlock], isolation: str
) -> None:
    change = "ALTER ROLE postgres %s default_transaction_isolation"
    postgres.sql(server, change % "SET" + f" = '{isolation}'")
    try:
        with pytest.raises(ConfigurationError, match=f"is '{isolation}' for this user"):
            make().acquire("r")
    finally:
        postgres.sql(server, change % "RESET")


PAGE = (Path(__file__).parents[2] / "docs" / "postgresql.md").read_text("utf-8")
(BLOCK,) = re.findall(r"^```sql\n(CREATE ROLE .*?)^```$", PAGE, re.M | re.S)
RIGHTS = [
    f"{right} ON {place}"
    for rights, places in re.findall(r"^GRANT (.*?) ON (.*?) TO shop_worker;$", BLOCK, re.M)
    for place in places.split(", ")
    for right in rights.split(", ")
]
assert len(RIGHTS) == 1 + 8 + 3


@pytest.fixture
def poor(server: LocalPostgres) -> Iterator[str]:
    """The URL of the page's user, where others have no rights in the schema."""
    postgres.sql(server, f"REVOKE ALL ON SCHEMA public FROM PUBLIC; {BLOCK}")
    yield url_of(server, "shop_worker")
    postgres.sql(server, "DROP OWNED BY shop_worker; DROP ROLE shop_worker")
    postgres.sql(server, "GRANT USAGE ON SCHEMA public TO PUBLIC")


def test_user_with_exactly_the_documented_rights_can_do_all(
    poor: str, server: LocalPostgres, make: Callable[..., Redlock]
) -> None:
    redlock, other = make(poor, node_timeout=5.0, ttl=3.0), make(poor, node_timeout=5.0)
    with redlock.lock("r", fencing=True) as held:
        assert other.holder("r") is not None
        first = held.lease.deadline
        wait_until(lambda: held.lease.deadline > first, 5.0, "it is extended")
        waiter = threading.Thread(target=lambda: other.release(other.acquire("r", wait=10.0)))
        waiter.start()
        line = "SELECT FROM redlock_waiter"
        wait_until(lambda: postgres.sql(server, line), 5.0, "it stands in line")
    waiter.join(10.0)
    assert redlock.release(redlock.acquire(["a", "b"]))
    with psycopg.connect(poor, autocommit=True) as connection:
        connection.execute("SELECT redlock_sweep()")


@pytest.mark.parametrize("right", RIGHTS)
def test_missing_right_is_reported_before_the_first_lock(
    poor: str, server: LocalPostgres, make: Callable[..., Redlock], right: str
) -> None:
    postgres.sql(server, f"REVOKE {right} FROM shop_worker")
    table = right.partition(" ON redlock_")[2]
    words = f"permission denied for table redlock_{table}" if table else "tables are missing"
    with pytest.raises(ConfigurationError, match=words):
        make(poor).acquire("r")


def test_error_of_a_neighbours_code_reaches_log_and_callers_without_escapes(
    server: LocalPostgres, make: Callable[..., Redlock], caplog: pytest.LogCaptureFixture
) -> None:
    redlock = make()
    assert redlock.release(redlock.acquire("r"))
    postgres.sql(
        server,
        "CREATE FUNCTION loud() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION"
        " E'\\x1b[31mred\\u202e\\u009b31m\\x07' USING ERRCODE = '42501'; END $$;"
        "CREATE TRIGGER loud BEFORE INSERT ON redlock_lease EXECUTE FUNCTION loud()",
    )
    try:
        said = []
        for one, error in ((redlock, QuorumUnavailable), (make(), ConfigurationError)):
            with pytest.raises(error) as caught:
                one.acquire("r")
            said.append(str(caught.value))
        said += [record.getMessage() for record in caplog.records]
    finally:
        postgres.sql(server, "DROP FUNCTION loud CASCADE")
    assert any("red" in text for text in said)
    assert [text for text in said if not text.replace("\n", "").isprintable()] == []


# -- A server that lets us in, and then answers no question to its end


def message(kind: bytes, body: bytes = b"") -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


SETTINGS = ("server_version", "15.0"), ("client_encoding", "UTF8"), ("in_hot_standby", "off")
SETTINGS += (("default_transaction_read_only", "off"),)
LET_IN = message(b"R", struct.pack("!i", 0))
LET_IN += b"".join(message(b"S", f"{name}\0{value}\0".encode()) for name, value in SETTINGS)
LET_IN += message(b"K", struct.pack("!ii", 1, 2)) + message(b"Z", b"I")
COLUMN = message(b"T", struct.pack("!h", 1) + b"a\0" + struct.pack("!ihihih", 0, 0, 25, -1, -1, 0))


def drip(client: socket.socket) -> None:
    for byte in COLUMN * 1000:
        client.sendall(bytes([byte]))
        time.sleep(0.02)


def other_type(client: socket.socket) -> None:
    row = message(b"D", struct.pack("!hi", 1, 3) + b"xyz")
    client.sendall(COLUMN + row + message(b"C", b"SELECT 1\0") + message(b"Z", b"I"))


HOSTILE: dict[str, Callable[[socket.socket], object]] = {
    "silence": lambda client: client.recv(1),
    "bytes that drip": drip,
    "half an answer": lambda client: (client.sendall(COLUMN[:9]), client.recv(1)),
    "a row of another type": other_type,
    "no PostgreSQL": lambda client: client.sendall(b"HTTP/1.1 200 OK\r\n\r\n" * 99),
}


@pytest.fixture(params=HOSTILE)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client, contextlib.suppress(OSError):
                    client.recv(65536)
                    client.sendall(LET_IN)
                    client.recv(65536)
                    HOSTILE[request.param](client)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        yield f"postgresql://me:SECRET@127.0.0.1:{port}/shop?sslmode=disable&gssencmode=disable"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(DEADLINE)
    assert not thread.is_alive(), "it was hung up on"


def test_handshake_with_a_hostile_postgresql_is_the_silence_of_its_node(
    url: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("celery_redlock.stores.postgresql.handshake.ANSWER_S", 0.3)
    (address,) = parse_nodes([url])
    node = make_node(
        *(0, address, "redlock:", RestartGuard(False, 60.0, print), []),
        clock=time.monotonic,
        later=lambda call: call(),
    )
    with pytest.raises(NodeError) as raised:
        in_thread(node.connect)()
    assert "SECRET" not in str(raised.value)
