"""Locks in a real ZooKeeper: what holds over a session, and what is refused."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner

from celery_redlock import (
    AsyncRedlock,
    ConfigurationError,
    LeaseLost,
    QuorumUnavailable,
    Redlock,
    ResourceHeld,
    SingletonTask,
    locked,
)
from celery_redlock.cli import redlock as command
from celery_redlock.cli.verdict import options_of
from celery_redlock.config.task_lock import lock_of
from celery_redlock.keepalive.supervisor import LeaseSupervisor
from celery_redlock.protocol import quorum
from celery_redlock.protocol.claim import Claim
from celery_redlock.server import free_port
from celery_redlock.stores.kinds import parse_nodes
from celery_redlock.stores.tls import context_of
from celery_redlock.stores.zookeeper.address import QUIET
from tests.support.certificates import Authority, openssl
from tests.support.names import Log, Patch
from tests.support.nodes import supervised_table
from tests.support.wait import wait_until
from tests.support.zookeeper import LocalZooKeeper, require

Locks = Callable[..., Redlock]
TTL = 5.0


@pytest.fixture(scope="module")
def started() -> Iterator[LocalZooKeeper]:
    pytest.importorskip("kazoo")
    require()
    with LocalZooKeeper(1, TTL) as server:
        yield server


@pytest.fixture(scope="module")
def slow() -> Iterator[LocalZooKeeper]:
    pytest.importorskip("kazoo")
    require()
    server = LocalZooKeeper(1, TTL)
    server.members[0].lines = ["tickTime=7000"]
    with server:
        yield server


@pytest.fixture
def zookeeper(started: LocalZooKeeper) -> LocalZooKeeper:
    started.resume()
    return started.start()


@pytest.fixture
def over(zookeeper: LocalZooKeeper, lock_over: Locks) -> Locks:
    """Makes a lock over the ensemble; each has a session of its own."""
    return lambda **options: lock_over([zookeeper.url], **options)


def store_of(redlock: Redlock) -> Any:
    """Return the store of a lock that has been used."""
    return redlock.client.driver.nodes[0].connection.store


def expire(redlock: Redlock) -> None:
    """End the session of a lock on the server, as an expiry does."""
    from kazoo.client import KazooClient

    client = store_of(redlock)._client
    hosts = ",".join("%s:%d" % host for host in client.hosts)  # noqa: UP031
    thief = KazooClient(hosts=hosts, client_id=client.client_id, timeout=10.0)
    thief.start()
    thief.stop()
    thief.close()


def free(redlock: Redlock, name: str, token: str) -> bool:
    """Free the lock of another process, as a supervisor does."""
    redlock.connect(10.0)
    claim = Claim(name, token, TTL, 1)
    done = redlock.client.driver.run(lambda now: quorum.free(claim, now, patience=5.0))
    return bool(done.yes)


def test_zookeeper_lock_excludes_and_is_free_after_its_release(over: Locks) -> None:
    mine, other = over(), over()
    with mine.lock("r"):
        with pytest.raises(ResourceHeld) as refused, other.lock("r"):
            pass
        assert refused.value.holder.owner == mine.client.owner
        with other.lock("r/../s"):
            pass
    with other.lock("r"):
        pass


def test_zookeeper_lock_outlasts_its_ttl_and_its_session_by_extensions(over: Locks) -> None:
    mine, other = over(), over()
    with mine.lock("long") as held:
        end = time.monotonic() + 3 * TTL
        while time.monotonic() < end:
            assert other.try_acquire("long") is None
            assert held.remaining() > 0.3
            time.sleep(0.2)


def test_zookeeper_lock_that_its_living_holder_no_longer_extends_is_free_after_its_ttl(
    over: Locks,
) -> None:
    mine, other = over(), over()
    mine.acquire("left")
    begin = time.monotonic()
    with pytest.raises(ResourceHeld):
        other.acquire("left")
    with other.lock("left", wait=5 * TTL):
        assert time.monotonic() - begin < 2 * TTL + 2.0


def test_zookeeper_fencing_tokens_grow_over_sessions_and_keys(over: Locks) -> None:
    tokens = []
    for redlock in (over(), over()):
        for name in ("f", "g"):
            with redlock.lock(name, fencing=True) as held:
                tokens.append(held.fencing_token)
    assert tokens == sorted(set(tokens))


def test_zookeeper_grants_several_keys_or_none_and_slots_of_a_limit(over: Locks) -> None:
    mine, other = over(), over()
    assert mine.try_acquire("a") is not None
    assert other.try_acquire(("a", "b")) is None
    assert mine.try_acquire("b") is not None
    taken = [one.try_acquire("l", limit=2) is not None for one in (mine, other, mine)]
    assert taken == [True, True, False]


def test_expired_zookeeper_session_loses_all_its_locks_and_says_so(
    over: Locks, caplog: Log
) -> None:
    mine, other = over(), over()
    with pytest.raises(LeaseLost), mine.lock("gone") as held, mine.lock("gone too") as second:
        expire(mine)
        wait_until(lambda: held.lost and second.lost, TTL, "its holder knows")
        with other.lock("gone"):
            pass
        held.ensure()
    (record,) = (one for one in caplog.records if getattr(one, "event", "") == "session_lost")
    assert record.levelname == "ERROR" and "all 2 locks" in record.getMessage()
    with mine.lock("gone"):  # in a new session
        pass


def test_expired_zookeeper_session_of_an_idle_process_is_no_error(over: Locks, caplog: Log) -> None:
    caplog.set_level("INFO", "celery_redlock")
    mine = over()
    mine.release(mine.acquire("idle"))

    def ends() -> Any:
        records = (one for one in caplog.records if getattr(one, "event", "") == "session_lost")
        return next(records, None)

    expire(mine)
    record = wait_until(ends, 10.0, "its end is logged")
    assert record.levelname == "INFO" and "no lock was taken in it" in record.getMessage()
    assert not [one for one in caplog.records if one.levelname == "ERROR"]
    mine.release(mine.acquire("idle", wait=5.0))  # in a new session


def test_holder_of_a_silent_zookeeper_stops_before_the_session_can_end(
    over: Locks, zookeeper: LocalZooKeeper
) -> None:
    mine, other = over(), over()
    assert other.try_acquire("other") is not None
    with pytest.raises(LeaseLost), mine.lock("silent") as held:
        zookeeper.pause()
        frozen = time.monotonic()
        try:
            wait_until(lambda: held.lost, 2 * TTL, "it has ended by the clock of its holder")
            assert time.monotonic() - frozen <= TTL + 0.5
        finally:
            zookeeper.resume()
        held.ensure()
    wait_until(lambda: other.try_acquire("silent") is not None, 5 * TTL, "it is free at last")


def test_release_that_a_silent_zookeeper_misses_is_done_when_it_is_back(
    over: Locks, zookeeper: LocalZooKeeper
) -> None:
    mine, other = over(), over()
    assert other.try_acquire("warm") is not None
    lease = mine.acquire("missed")
    zookeeper.pause()
    mine.release(lease)
    zookeeper.resume()
    wait_until(lambda: other.try_acquire("missed") is not None, 3 * TTL, "it is free")


def test_restarted_zookeeper_keeps_locks_and_their_holders(
    over: Locks, zookeeper: LocalZooKeeper
) -> None:
    mine, other = over(), over()
    with mine.lock("kept") as held:
        zookeeper.kill()
        zookeeper.start()
        wait_until(lambda: other.holder("kept") is not None, 5 * TTL, "it answers")
        assert other.try_acquire("kept") is None
        assert not held.lost or held.remaining() == 0.0


def test_freed_zookeeper_lock_is_lost_and_its_holder_frees_no_other(over: Locks) -> None:
    """A node that was made again has the version of the one before."""
    mine, other = over(), over()
    lease = mine.acquire("again")
    assert free(other, "again", lease.token)
    theirs = other.acquire("again")
    assert mine.release(lease) is False
    assert other.extend(theirs).token == theirs.token
    with pytest.raises(LeaseLost), mine.lock("seen") as held:
        assert free(other, "seen", held.token)
        other.acquire("seen")
        wait_until(lambda: held.lost, TTL, "its extension was refused")
        held.ensure()
    assert other.holder("seen").owner == other.client.owner


def test_lock_of_another_token_is_not_freed(over: Locks) -> None:
    mine, other = over(), over()
    mine.acquire("mine")
    assert not free(other, "mine", "another token")
    assert other.holder("mine").owner == mine.client.owner


CHILD = """
import sys, time
from celery_redlock import Redlock
redlock = Redlock([sys.argv[1]])
print(redlock.acquire("child").token, flush=True)
time.sleep(60)
"""


def test_supervisor_frees_the_zookeeper_locks_of_a_dead_child(
    zookeeper: LocalZooKeeper, over: Locks
) -> None:
    """It does not wait for the end of the child's session, and extends nothing before."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, zookeeper.url], stdout=subprocess.PIPE, text=True
    )
    table, mine = supervised_table(1), over()
    keeper = LeaseSupervisor(table, mine.client.driver, 2.0)
    try:
        assert child.stdout is not None
        token = child.stdout.readline().strip()
        claim = Claim(("child",), token, TTL, 1)
        table.register(claim)
        keeper.run_once()
        assert mine.try_acquire("child") is None
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        began = time.monotonic()
        assert free(mine, "child", token)
        assert mine.try_acquire("child") is not None
        assert time.monotonic() - began < TTL / 2
    finally:
        child.kill()
        child.communicate()


KEPT = """
import sys, time
from celery_redlock import Redlock
redlock = Redlock([sys.argv[1]], keeper="process")
redlock.lock("kept").acquire()
print("here", flush=True)
time.sleep(60)
"""


def test_keeper_process_frees_zookeeper_locks_of_a_killed_program_and_says_what_it_cannot(
    zookeeper: LocalZooKeeper, over: Locks
) -> None:
    mine = over()
    child = subprocess.Popen(
        [sys.executable, "-c", KEPT, zookeeper.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
        assert mine.try_acquire("kept") is None
        child.kill()
        killed = time.monotonic()
        wait_until(lambda: mine.try_acquire("kept") is not None, 2 * TTL, "it is freed")
        assert time.monotonic() - killed < TTL, "its session has not ended"
    finally:
        child.kill()
        said = child.communicate()[1]
    assert "the keeper 'process' extends no lock in ZooKeeper" in said


def test_short_zookeeper_session_is_refused_with_the_ttl_that_it_allows(
    zookeeper: LocalZooKeeper, lock_over: Locks
) -> None:
    url = zookeeper.url.partition("?")[0] + "?ttl=60"
    with pytest.raises(ConfigurationError, match=r"sessions of 40 s at most.*write \?ttl=20"):
        lock_over([url], ttl=60.0).check()


REFUSED = pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"scope": "until_executed"}, "lasts as long as the session"),
        ({"hold_for": 5.0}, "lasts as long as the session"),
        ({"rate": "10/m"}, "lasts as long as the session"),
        ({"shared": True}, "has one holder"),
        ({"ttl": 30.0}, r"ttl is 30, and a lock in ZooKeeper lasts 5 s"),
    ],
    ids=str,
)
URL = "zookeeper://127.0.0.1:1?ttl=5"


@REFUSED
def test_options_that_zookeeper_cannot_keep_are_refused_when_the_app_is_finalized(
    options: dict[str, Any], why: str
) -> None:
    app = Celery("zookeeper", set_as_current=False)
    app.conf.redlock_nodes = [URL]

    @app.task(name="charge")
    @locked(key="<name>", **options)
    def task(name: str) -> None: ...

    with pytest.raises(ConfigurationError, match="charge: .*" + why):
        app.finalize()


@REFUSED
@pytest.mark.parametrize("client", ["installed", "missing"])
def test_task_that_zookeeper_cannot_keep_is_not_published(
    options: dict[str, Any], why: str, client: str, monkeypatch: Patch
) -> None:
    """Also if its URL is set after the task was made, and in a program without kazoo."""
    if client == "missing":
        monkeypatch.setitem(sys.modules, "kazoo", None)
    app = Celery("zookeeper", broker="memory://", set_as_current=False)

    @app.task(name="charge", base=SingletonTask, **{f"lock_{k}": v for k, v in options.items()})
    def task(name: str) -> None: ...

    @app.task(name="plain", base=SingletonTask)
    def plain() -> None: ...

    app.finalize()
    app.conf.redlock_nodes = URL
    app.conf.task_default_queue = "refused"  # a broker in memory keeps what other tests have sent
    with pytest.raises(ConfigurationError, match="charge: .*" + why):
        task.delay("a")
    with app.connection_for_read() as connection:
        queue = connection.SimpleQueue("refused")
        assert queue.qsize() == 0
        plain.delay()
        assert queue.qsize() == 1
        queue.clear()


@pytest.mark.parametrize("kind", [Redlock, AsyncRedlock])
def test_ttl_longer_than_a_zookeeper_session_allows_is_refused_unless_it_is_the_default(
    kind: Callable[..., Any],
) -> None:
    pytest.importorskip("kazoo")
    assert kind([URL]).ttl == 5.0
    assert kind([URL], ttl=5.0).ttl == 5.0
    with pytest.raises(ConfigurationError, match=r"ttl is 6, and a lock in ZooKeeper lasts 5 s"):
        kind([URL], ttl=6)


def test_explain_shows_the_ttl_that_a_lock_in_zookeeper_has() -> None:
    pytest.importorskip("kazoo")
    app = Celery("zookeeper", set_as_current=False)
    app.conf.redlock_nodes = [URL]

    @app.task(base=SingletonTask)
    def task() -> None: ...

    options = {name: value for name, value, _source in options_of(lock_of(task), app)}
    assert options["ttl"] == 5.0


@pytest.mark.parametrize(
    ("asked", "named"), [(["pause", "r"], "a pause"), (["limit", "r", "2"], "an operator's limit")]
)
def test_pause_or_limit_over_zookeeper_is_refused(
    zookeeper: LocalZooKeeper, asked: list[str], named: str
) -> None:
    done = CliRunner().invoke(command, [*asked, "--for", "60s", "--yes", "--nodes", zookeeper.url])
    assert done.exit_code != 0
    assert f"{named} cannot be had: a lock in ZooKeeper lasts as long as the session" in done.output


def test_commands_show_explain_and_free_a_zookeeper_lock(
    zookeeper: LocalZooKeeper, over: Locks
) -> None:
    mine = over()
    mine.acquire("shown")
    run = CliRunner().invoke
    listed = run(command, ["ls", "--nodes", zookeeper.url])
    assert listed.exit_code == 0, listed.output
    assert "shown" in listed.output
    shown = run(command, ["show", "shown", "--nodes", zookeeper.url])
    assert mine.client.owner.host in shown.output
    freed = run(command, ["release", "shown", "--force", "--nodes", zookeeper.url])
    assert freed.exit_code == 0, freed.output
    assert over().try_acquire("shown") is not None
    measured = run(command, ["bench", "--seconds", "0.2", "--nodes", zookeeper.url])
    assert measured.exit_code == 0, measured.output


@pytest.mark.parametrize("ttl", [5.0, 10.0, 17.5])
def test_long_tick_of_zookeeper_is_a_warning_of_the_worker_and_of_the_doctor(
    slow: LocalZooKeeper, lock_over: Locks, ttl: float
) -> None:
    """The server ticks each 7 s, so that its sessions last 14 s or more."""
    url = f"{slow.url.partition('?')[0]}?ttl={ttl:g}"
    said = " ".join(lock_over([url], ttl=ttl).check(timeout=10.0))
    doctor = " ".join(CliRunner().invoke(command, ["doctor", "--nodes", url]).output.split())
    assert ("stay held for 14 s" in said) == (2 * ttl < 14)
    assert ("tickTime of 7 s is too long for the ttl" in doctor) == (0.4 * ttl < 7)
    assert ("?ttl=18" in doctor) == (0.4 * ttl < 7)


def test_doctor_examines_a_zookeeper_ensemble(zookeeper: LocalZooKeeper) -> None:
    url = zookeeper.url.partition("?")[0]
    fine = CliRunner().invoke(command, ["doctor", "--nodes", f"{url}/doctor?ttl=5"])
    assert fine.exit_code == 0, fine.output
    assert "names one server" in fine.output
    long = CliRunner().invoke(command, ["doctor", "--nodes", f"{url}/doctor?ttl=60"])
    assert long.exit_code == 1
    assert "write ?ttl=20" in long.output
    root = CliRunner().invoke(command, ["doctor", "--nodes", f"{url}/celery_redlock/..?ttl=5"])
    assert root.exit_code != 0


def test_doctor_reports_no_quorum_where_zookeeper_refuses_writes(
    zookeeper: LocalZooKeeper, lock_over: Locks
) -> None:
    from kazoo.security import make_acl

    url = f"{zookeeper.url.partition('?')[0]}/sealed?ttl=5"
    lock = lock_over([url])
    lock.release(lock.acquire("r"))
    store_of(lock)._client.set_acls("/locks", [make_acl("world", "anyone", read=True, admin=True)])
    refused = CliRunner().invoke(command, ["doctor", "--nodes", url])
    assert refused.exit_code == 1, refused.output
    assert "quorum: 1 node: no quorum: 0 of 1 node can grant a lock" in refused.output
    assert "nothing can be locked, and writes says why" in refused.output


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("zookeeper://", "servers cannot be understood"),
        ("zookeeper://a:0", "servers cannot be understood"),
        ("zookeeper://a,a", "names a server twice"),
        ("zookeeper://a/../b", "no node of ZooKeeper"),
        ("zookeeper://a?tls=1", "takes the option ttl"),
        ("zookeeper://a?ttl=10&ttl=20", r"nodes\[0\]: an option of its URL is there twice"),
        ("zookeeper://a?ttl=1", "in seconds, 5 or more"),
        ("zookeepers://a?ca=/nowhere", "certificates cannot be read"),
        ("zookeepers://a?verify=false", "verify is yes or no, not 'false'"),
        ("zookeeper://a,b", ""),
    ],
)
def test_zookeeper_url_is_read_or_refused_with_the_reason(url: str, why: str) -> None:
    pytest.importorskip("kazoo")
    if not why:
        (address,) = parse_nodes([url])
        assert address.name == "a:2181,b:2181/celery_redlock"
        return
    with pytest.raises(ConfigurationError, match=why):
        parse_nodes([url])


def test_two_zookeeper_urls_are_refused() -> None:
    pytest.importorskip("kazoo")
    with pytest.raises(ConfigurationError, match="names 2 ZooKeeper ensembles"):
        parse_nodes("zookeeper://a,zookeeper://b")


def test_zookeeper_release_notifies_the_first_waiter_of_another_process(over: Locks) -> None:
    """Without a notification a waiter tries after a second at the earliest, once it has asked."""
    mine, other = over(), over()
    with mine.lock("warm"):
        assert other.holder("warm") is not None
    took = []
    for turn in range(6):
        lease = mine.acquire(f"handed {turn}")
        granted: list[float] = []

        def wait(turn: int = turn, granted: list[float] = granted) -> None:
            with other.lock(f"handed {turn}", wait=10.0):
                granted.append(time.monotonic())

        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.8)
        mine.release(lease)
        released = time.monotonic()
        waiter.join(10.0)
        took.append(granted[0] - released)
    assert sorted(took[1:])[2] < 0.15  # the first has subscribed meanwhile


def test_zookeeper_queue_is_empty_after_all_waits(over: Locks) -> None:
    mine, other = over(), over()
    lease = mine.acquire("queued")
    with pytest.raises(ResourceHeld), other.lock("queued", wait=1.0):
        pass
    mine.release(lease)
    client = store_of(mine)._client
    wait_until(lambda: not client.get_children("/line"), 5.0, "nobody stands in a queue")


def test_zookeeper_waiter_whose_notifications_are_lost_tries_by_itself(over: Locks) -> None:
    mine, other = over(), over()
    lease = mine.acquire("deaf")
    client = store_of(mine)._client
    done: list[bool] = []
    waiter = threading.Thread(target=lambda: done.append(other.lock("deaf", wait=10.0).acquire()))
    waiter.start()
    wait_until(lambda: client.get_children("/calls"), 5.0, "it listens")
    for child in client.get_children("/calls"):
        client.delete(f"/calls/{child}")
    mine.release(lease)
    waiter.join(10.0)
    assert done == [True]


def test_zookeeper_user_alone_can_take_and_free_its_locks(
    zookeeper: LocalZooKeeper, lock_over: Locks
) -> None:
    hosts = zookeeper.url.partition("://")[2].partition("?")[0]
    mine = lock_over([f"zookeeper://shop:SECRET@{hosts}/users?ttl=5"])
    with mine.lock("r") as held:
        assert not held.lost
        for other in ("", "shop:WRONG@"):
            stranger = lock_over([f"zookeeper://{other}{hosts}/users?ttl=5"])
            with pytest.raises(ConfigurationError, match="its ACL refuses us") as refused:
                stranger.check(timeout=10.0)
            assert "WRONG" not in str(refused.value)
    assert "SECRET" not in repr(mine.client.addresses)
    open_to_all = f"zookeeper://shop:SECRET@{hosts}?ttl=5"
    lock_over([zookeeper.url]).holder("r")  # made without a user
    doctor = CliRunner().invoke(command, ["doctor", "--nodes", open_to_all])
    assert "everybody may delete locks" in doctor.output


def test_missing_levels_of_a_zookeeper_path_are_made(
    zookeeper: LocalZooKeeper, lock_over: Locks
) -> None:
    hosts = zookeeper.url.partition("?")[0]
    mine, other = (lock_over([f"{hosts}/deep/er/est?ttl=5"]) for _ in range(2))
    assert mine.try_acquire("r") is not None
    assert other.try_acquire("r") is None


def test_missing_levels_of_a_zookeeper_path_that_we_may_not_make_are_named(
    zookeeper: LocalZooKeeper, lock_over: Locks
) -> None:
    hosts = zookeeper.url.partition("://")[2].partition("?")[0]
    lock_over([f"zookeeper://admin:SECRET@{hosts}/closed?ttl=5"]).check(timeout=10.0)
    url = f"zookeeper://{hosts}/closed/a/b?ttl=5"
    why = r"let us make /closed/a: .* run create /closed/a, create /closed/a/b in zkCli.sh"
    with pytest.raises(ConfigurationError, match=why):
        lock_over([url]).check(timeout=10.0)
    doctor = CliRunner().invoke(command, ["doctor", "--nodes", url])
    assert "let a user who may do so run create /closed/a," in " ".join(doctor.output.split())


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The hosts of a server that wants a certificate of its clients, and a folder of them."""
    pytest.importorskip("kazoo")
    require()
    folder = tmp_path_factory.mktemp("tls")
    authority, other = Authority(folder, "ca"), Authority(folder, "other")
    other.sign("client", "DNS:client")
    authority.sign("client", "DNS:client")
    cert, key = authority.sign("zookeeper", "IP:127.0.0.1")
    store = folder / "server.p12"
    openssl(
        *("pkcs12", "-export", "-in", str(cert), "-inkey", str(key), "-out", str(store)),
        *("-passout", "pass:secret"),
    )
    server = LocalZooKeeper(1, TTL)
    port = free_port()
    server.members[0].lines = [
        "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory",
        f"secureClientPort={port}", "secureClientPortAddress=127.0.0.1",
        f"ssl.keyStore.location={store}", "ssl.keyStore.password=secret",
        f"ssl.trustStore.location={authority.ca}",
    ]  # fmt: skip
    with server:
        yield f"127.0.0.1:{port}", folder


def test_zookeeper_locks_over_tls_and_hands_over_to_waiters(
    secured: tuple[str, Path], lock_over: Locks
) -> None:
    hosts, folder = secured
    url = f"zookeepers://{hosts}/tls?ttl=5&ca={folder}/ca.pem"
    url += f"&cert={folder}/ca-client.pem&key={folder}/ca-client.key"
    mine, other = lock_over([url]), lock_over([url])
    for redlock in (mine, other):
        redlock.connect(10.0)
    granted: list[float] = []

    def wait() -> None:
        with other.lock("r", wait=10.0):
            granted.append(time.monotonic())

    with mine.lock("r") as held:
        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(1.5)  # so long that it has subscribed
        assert not granted and not held.lost
    released = time.monotonic()
    waiter.join(10.0)
    assert granted[0] - released < 0.5
    begin = time.monotonic()
    for _ in range(50):
        mine.release(mine.acquire("s"))
    assert time.monotonic() - begin < 10.0
    doctor = CliRunner().invoke(command, ["doctor", "--nodes", url])
    assert doctor.exit_code == 0, doctor.output
    assert "does not serve" not in doctor.output


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("ca={0}/other.pem&cert={0}/ca-client.pem&key={0}/ca-client.key", "verify failed"),
        ("ca={0}/ca.pem&cert={0}/other-client.pem&key={0}/other-client.key", "no server"),
        ("ca={0}/ca.pem", "no server"),
    ],
)
def test_zookeeper_certificate_that_is_not_trusted_ends_the_connection(
    secured: tuple[str, Path], lock_over: Locks, options: str, why: str
) -> None:
    hosts, folder = secured
    redlock = lock_over([f"zookeepers://{hosts}/tls?ttl=5&{options.format(folder)}"])
    redlock.connect(10.0)
    with pytest.raises(QuorumUnavailable, match=why):
        redlock.acquire("r")


def test_answers_in_one_tls_record_are_all_read(tmp_path: Path) -> None:
    """The socket has no more to read, and TLS has decrypted more than was asked for."""
    session = pytest.importorskip("celery_redlock.stores.zookeeper.session")
    authority = Authority(tmp_path, "ca")
    there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    there.load_cert_chain(*authority.sign("zookeeper", "DNS:zookeeper"))
    there.num_tickets = 0
    context = context_of({"ca": str(authority.ca)})
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(there.wrap_socket, theirs, server_side=True)
        with (
            context.wrap_socket(ours, server_hostname="zookeeper") as plain,
            served.result() as far,
        ):
            far.sendall(b"12345678")
            assert plain.recv(4) == b"1234"
            handler = session._Handler(context)
            assert handler.select([plain], [], [], 0.2)[0] == [plain]
            assert plain.recv(4) == b"5678"
            assert handler.select([plain], [], [], 0.2)[0] == []


def test_new_process_leaves_a_hung_server_of_zookeeper_after_a_second(
    zookeeper: LocalZooKeeper, lock_over: Locks, monkeypatch: Patch
) -> None:
    session = pytest.importorskip("celery_redlock.stores.zookeeper.session")
    with socket.create_server(("127.0.0.1", 0)) as hung:  # it accepts, and answers nothing
        ports = [hung.getsockname()[1], zookeeper.members[0].port]
        order = {port: place for place, port in enumerate(ports)}
        monkeypatch.setattr(
            "kazoo.protocol.connection.random.shuffle",
            lambda hosts: hosts.sort(key=lambda host: order[host[2]]),
        )
        url = f"zookeeper://{','.join(f'127.0.0.1:{port}' for port in ports)}?ttl=5"
        redlock = lock_over([url])
        began = time.monotonic()
        lease = redlock.acquire("r")
        assert session.LEAVE_S <= time.monotonic() - began < redlock.node_timeout
        redlock.release(lease)
        listed = CliRunner().invoke(command, ["ls", "--timeout", "0.5", "--nodes", url])
        assert listed.exit_code == 0, listed.output


def test_coroutines_lock_in_zookeeper_and_are_notified(zookeeper: LocalZooKeeper) -> None:
    async def main() -> float:
        async with AsyncRedlock([zookeeper.url]) as mine, AsyncRedlock([zookeeper.url]) as other:
            async with mine.lock("r", fencing=True) as held:
                with pytest.raises(ResourceHeld):
                    await other.acquire("r")
                waiter = asyncio.ensure_future(other.acquire("r", wait=20.0))
                await asyncio.sleep(TTL + 1)  # it is extended
                held.ensure()
            began = time.monotonic()
            await other.release(await waiter)
            return time.monotonic() - began

    assert asyncio.run(main()) < 0.5


@pytest.mark.parametrize("quiet", [True, False])
def test_process_connects_anew_before_it_locks_after_a_quiet_time(over: Locks, quiet: bool) -> None:
    """The leader may be about to end its session, and hears of a new connection at once."""
    mine = over()
    mine.release(mine.acquire("r"))
    store = store_of(mine)
    connect, made = store._client._connection._connect, []

    def counted(*arguments: Any) -> Any:
        made.append(1)
        return connect(*arguments)

    store._client._connection._connect = counted
    store._heard -= QUIET * TTL if quiet else 0.0
    session = store._client.client_id[0]
    assert mine.try_acquire("r") is not None
    assert len(made) == quiet
    assert store._client.client_id[0] == session
