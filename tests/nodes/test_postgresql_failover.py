"""A server that may have forgotten locks has no vote for a span: a promoted standby, one that was
set back, one that crashed where commits are not waited for. For all who connect from then on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psycopg
import pytest

from celery_redlock import Lease, QuorumUnavailable, Redlock
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import postgres
from tests.support.wait import wait_until

TTL = 6.0
DURABLE = {"fsync": "on", "full_page_writes": "on"}
Make = Callable[..., Redlock]


@pytest.fixture
def start() -> Iterator[Callable[..., LocalPostgres]]:
    """Starts servers; with `like`, what that one has as well."""
    postgres.require()
    with ExitStack() as stack:

        def started(
            like: LocalPostgres | None = None, *options: str, signs: str = "", **settings: str
        ) -> LocalPostgres:
            if like is None:
                server = postgres.made(**DURABLE | settings)
            else:
                server = LocalPostgres(**DURABLE | settings)
                server.copy(like, *options)
            stack.callback(server.stop)
            if signs:
                (server.data / signs).touch()
            server.start()
            if like is None:
                postgres.sql(server, postgres.SCHEMA)
                postgres.sql(server, "CHECKPOINT")
            return server

        yield started


@pytest.fixture
def make(lock_over: Callable[..., Redlock]) -> Make:
    def over(url: str) -> Redlock:
        return lock_over([url], ttl=TTL, node_timeout=1.0, restart_guard="uptime")

    return over


def both(primary: LocalPostgres, standby: LocalPostgres) -> str:
    """Both hosts in one URL: of those that answer it is the one that takes writes."""
    return f"postgresql://postgres@127.0.0.1:{standby.port},127.0.0.1:{primary.port}/postgres"


def forgotten(server: LocalPostgres, resource: str = "redlock:r") -> bool:
    return not postgres.sql(
        server, "SELECT 1 FROM redlock_lease WHERE resource = %s AND until > now()", resource
    )


def has_no_vote_before(held: Lease, clients: list[Redlock]) -> None:
    """Check that it has no vote until a whole span has passed, and that it reports why."""
    for client in clients:
        wait_until(lambda client=client: doubted(client), 10.0, "it is connected to it")  # type: ignore[misc]
    assert held.remaining() > 0
    wait_until(lambda: taken(clients[-1]), TTL + 10.0, "it votes at last")
    assert held.remaining() <= 0


def doubted(client: Redlock) -> bool:
    try:
        client.release(client.acquire("r"))
    except QuorumUnavailable as error:
        return "it may have forgotten locks, and has no vote for another" in str(error)
    raise AssertionError("it votes")


def taken(client: Redlock) -> bool:
    try:
        return client.release(client.acquire("r"))
    except QuorumUnavailable:
        return False


def behind(primary: LocalPostgres, standby: LocalPostgres) -> None:
    """Disconnect the standby from all later writes of its primary."""
    postgres.sql(standby, "ALTER SYSTEM SET primary_conninfo = ''")
    postgres.sql(standby, "SELECT pg_reload_conf()")
    following = "SELECT 1 FROM pg_stat_replication"
    wait_until(lambda: not postgres.sql(primary, following), 5.0, "it does not follow any more")


def fail_over(primary: LocalPostgres, standby: LocalPostgres) -> None:
    primary.kill()
    standby.promote()
    assert forgotten(standby)


def test_promoted_standby_has_no_vote_for_a_span(
    start: Callable[..., LocalPostgres], make: Make
) -> None:
    primary = start()
    standby = start(primary, "-R")
    url = both(primary, standby)
    holder, other = make(url), make(url)
    assert taken(holder), "a fresh database has no pause"
    assert taken(other)
    behind(primary, standby)
    held = holder.acquire("r")
    fail_over(primary, standby)
    has_no_vote_before(held, [other, make(url)])
    new = make(url)  # what it is told for how long is rounded up by a second
    wait_until(lambda: taken(new), 3.0, "it is known for a span: also to who has not met it")


def test_second_standby_of_a_primary_is_not_taken_for_the_first(
    start: Callable[..., LocalPostgres], make: Make
) -> None:
    """Both become timeline 2, and only one has the locks that were granted on it."""
    primary = start()
    first, second = start(primary, "-R"), start(primary, "-R")
    client = make(
        both(primary, first).replace("127.0.0.1", f"127.0.0.1:{second.port},127.0.0.1", 1)
    )
    assert taken(client)
    primary.kill()
    first.promote()
    wait_until(lambda: taken(client), TTL + 10.0, "the first votes after a span")
    held = client.acquire("r")
    first.kill()
    second.promote()
    assert forgotten(second)
    has_no_vote_before(held, [client])


def test_lock_that_a_promoted_standby_forgot_is_lost_before_another_has_it(
    start: Callable[..., LocalPostgres], make: Make
) -> None:
    primary = start()
    standby = start(primary, "-R")
    url = both(primary, standby)
    holder = make(url)
    held = holder.lock("kept"), holder.lock("r")
    held[0].acquire()
    wait_until(lambda: not forgotten(standby, "redlock:kept"), 5.0, "the standby knows of it")
    behind(primary, standby)
    held[1].acquire()
    fail_over(primary, standby)
    other = make(url)
    wait_until(lambda: held[1].lost, TTL, "it knows of its loss")
    assert doubted(other)
    before = held[0].lease.deadline
    wait_until(lambda: held[0].lease.deadline > before, TTL, "what is known is extended")
    assert not held[0].lost
    assert held[0].release()
    held[1].release()


def test_paused_primary_grants_nothing_if_commits_wait_for_the_standby(
    start: Callable[..., LocalPostgres], make: Make
) -> None:
    primary = start()
    standby = start(primary, "-R")
    postgres.sql(primary, "ALTER SYSTEM SET synchronous_standby_names = '*'")
    postgres.sql(primary, "SELECT pg_reload_conf()")
    old = make(primary.url)
    assert taken(old)
    primary.pause()
    standby.promote()
    new = make(both(primary, standby))
    wait_until(lambda: taken(new), TTL + 10.0, "the new primary votes after a span")
    held = new.acquire("r")
    primary.resume()
    answers = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    wait_until(lambda: not taken(old) and postgres.sql(primary, answers), 10.0, "the old one waits")
    for _ in range(3):
        assert not taken(old)
    new.release(held)


@pytest.mark.slow
def test_server_set_back_to_a_backup_has_no_vote_for_a_span(
    start: Callable[..., LocalPostgres], make: Make
) -> None:
    today = start()
    recovery = {"restore_command": "/bin/false", "recovery_target": "immediate"}
    recovery["recovery_target_action"] = "promote"
    holder = make(today.url)
    held = holder.acquire("early")
    back = start(today, signs="recovery.signal", **recovery)
    wait_until(lambda: not in_recovery(back), 10.0, "it takes writes")
    held = holder.acquire("r")
    today.kill()
    assert forgotten(back)
    has_no_vote_before(held, [make(back.url)])


def in_recovery(server: LocalPostgres) -> bool:
    return postgres.sql(server, "SELECT pg_is_in_recovery()") == [(True,)]


def restarted(server: LocalPostgres) -> None:
    server.restart()


def one_killed(server: LocalPostgres) -> None:
    """Kill a server process: all sessions end, unwritten changes are lost; the postmaster stays."""
    (pid,) = (
        row[0]
        for row in postgres.sql(
            server, "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"
        )
    )
    os.kill(pid, signal.SIGKILL)

    def back() -> bool:
        try:
            query = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"
            return postgres.sql(server, query) not in ([], [(pid,)])
        except psycopg.OperationalError:
            return False

    wait_until(back, 10.0, "it is back")


@pytest.mark.parametrize(
    ("setting", "crash"),
    [
        pytest.param({"synchronous_commit": "off"}, restarted, marks=pytest.mark.slow),
        ({"synchronous_commit": "off"}, one_killed),
        pytest.param({"fsync": "off"}, restarted, marks=pytest.mark.slow),
    ],
)
def test_server_with_synchronous_commit_off_has_no_vote_after_a_crash(
    start: Callable[..., LocalPostgres],
    make: Make,
    crash: Callable[[LocalPostgres], None],
    setting: dict[str, str],
) -> None:
    server = start(**setting)
    holder, other = make(server.url), make(server.url)
    assert taken(other)
    held = holder.acquire("r")
    assert not forgotten(server)
    crash(server)
    postgres.sql(server, "DELETE FROM redlock_lease")  # as if it had not been written yet
    has_no_vote_before(held, [other, make(server.url)])


@pytest.mark.parametrize("crash", [restarted, one_killed])
def test_server_with_synchronous_commit_on_votes_at_once_after_a_crash(
    start: Callable[..., LocalPostgres], make: Make, crash: Callable[[LocalPostgres], None]
) -> None:
    server = start()
    other = make(server.url)
    held = make(server.url).acquire("r")
    crash(server)
    new = make(server.url)
    for client in (other, new):
        wait_until(lambda client=client: voted(client), 5.0, "it votes")  # type: ignore[misc]
    assert not forgotten(server)
    assert held.remaining() > 0


def voted(client: Redlock) -> bool:
    try:
        return client.release(client.acquire("other"))
    except QuorumUnavailable as error:
        assert "forgotten" not in str(error)
        return False


@pytest.mark.parametrize(
    "attributes", ["", pytest.param("?target_session_attrs=any", marks=pytest.mark.slow)]
)
def test_standby_is_refused_as_a_node(
    start: Callable[..., LocalPostgres], make: Make, attributes: str
) -> None:
    standby = start(start(), "-R")
    with pytest.raises(QuorumUnavailable, match="read-only") as info:
        make(standby.url + attributes).acquire("r")
    assert "forgotten" not in str(info.value)
