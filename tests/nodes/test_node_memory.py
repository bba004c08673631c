"""Votes of real servers: restarted and promoted ones, and servers that are no nodes."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_redlock import ConfigurationError, QuorumUnavailable, Redlock, ResourceHeld
from celery_redlock.protocol.lease import drift
from celery_redlock.protocol.names import TRUSTED_KEY
from celery_redlock.protocol.restart_guard import LOOK_AFTER_S
from celery_redlock.protocol.values import Vote
from celery_redlock.server import LocalServer, start_servers
from tests.conftest import as_new
from tests.support.names import Locks, Log, Servers
from tests.support.nodes import GUARDED_TTL as TTL
from tests.support.nodes import admin, make_known, told_all
from tests.support.wait import wait_until

NO_INFO = "on >SECRET resetkeys ~redlock:* resetchannels &redlock:* nocommands +get +set +del" + (
    " +pexpire +pttl +eval +evalsha +publish +client|setname"
)


@pytest.fixture
def log(caplog: Log) -> Log:
    caplog.set_level(logging.INFO)
    return caplog


@pytest.fixture(scope="module")
def three() -> Iterator[list[LocalServer]]:
    with start_servers(3) as three:
        yield three


@pytest.fixture
def known(three: Servers) -> Servers:
    """Servers that may vote at once; they have no key but the mark that allows it."""
    as_new(three)
    make_known(three)
    return three


# -- Restarts


def test_node_votes_when_it_has_been_up_longer_than_the_ttl(lock: Locks, log: Log) -> None:
    before = time.monotonic()
    with LocalServer() as server:
        started = time.monotonic()
        redlock = lock([server])
        with pytest.raises(QuorumUnavailable) as refusal:
            redlock.acquire("r")
        (vote,) = refusal.value.votes
        assert vote.vote is Vote.SILENT
        what = r"started \d s ago: it may have forgotten locks, and has no vote for another \d\.\d"
        assert re.fullmatch(rf"{what} s", vote.detail)
        assert vote.detail in str(refusal.value)
        # Whoever has connected says so, perhaps in another thread.
        lines = lambda: [text for text in log.messages if "has no vote" in text]  # noqa: E731
        (line,) = wait_until(lines, 10.0, "it is said")
        assert re.match(rf"node 127\.0\.0\.1:{server.port} {what} s\. ", line)
        with admin(server, text=True) as client:  # it was asked, and the request was undone
            wait_until(lambda: not client.keys("*"), 1, "it is undone")

        redlock.release(wait_until(lambda: try_it(redlock), 10, "it votes"))
        since = time.monotonic()
        assert since - before > TTL + drift(TTL)
        assert since - started < TTL + drift(TTL) + 2.0  # whole seconds, and a busy machine
        assert len([text for text in log.messages if "has no vote" in text]) == 1


def try_it(redlock: Redlock) -> Any:
    with contextlib.suppress(QuorumUnavailable):
        return redlock.acquire("r")


def test_node_that_forgot_does_not_help_to_a_second_grant(known: Servers, lock: Locks) -> None:
    """X has a bare quorum, one of its nodes forgets: the rest and that one are no quorum."""
    with start_servers(1) as (forgetful,):
        # It must vote first: the holder's guard is off.
        nodes: list[Any] = [known[0], forgetful, known[1]]
        holder = lock([known[0], forgetful, "redis://127.0.0.1:1"], ttl=30, restart_guard="off")
        lease = holder.acquire("r")
        forgetful.restart()
        guarded, careless = lock(nodes, ttl=30), lock(nodes, ttl=30, restart_guard="off")
        for _ in range(2):
            with pytest.raises(ResourceHeld) as refusal:
                guarded.acquire("r")
            assert [vote.vote for vote in refusal.value.votes] == [Vote.NO, Vote.SILENT, Vote.YES]
        found = guarded.holder("r")  # "free" from the one that forgot is no answer
        assert found is not None and found.nodes == 1
        assert not lease.lost
        careless.release(careless.acquire("r"))  # what the guard is for


def test_held_locks_survive_the_restart_of_every_node(lock: Locks) -> None:
    """The nodes restart one after the other; an extension counts on a node that has no vote yet."""
    with start_servers(3) as servers:
        redlock = lock(servers, ttl=30.0, restart_guard="off")
        guarded = lock(servers, ttl=30.0)
        lease = redlock.acquire("r")
        # The client with the guard takes the lease over, because fresh nodes let none acquire.
        guarded.client.claims[lease.token] = redlock.client.claims[lease.token]
        guarded.connect()
        for server in servers:
            server.restart()
            wait_until(
                lambda: extended_everywhere(guarded, lease), 10, "it is set on the new node again"
            )
        assert guarded.extend(lease).remaining() > 25
        other = lock(servers, ttl=30.0, restart_guard="off")
        with pytest.raises(ResourceHeld):
            other.acquire("r")


def extended_everywhere(redlock: Redlock, lease: Any) -> bool:
    """Extend the lease; return True if each node has it now."""
    redlock.extend(lease)
    holder = redlock.holder("r")
    return holder is not None and holder.nodes == 3


def test_nodes_vote_by_the_longest_ttl_that_a_check_names(lock: Locks) -> None:
    with LocalServer() as server:
        redlock = lock([server], ttl=TTL)
        (warning,) = redlock.check(ttl=100.0)
        assert warning.endswith("You can only wait: the longest ttl in use is 100 s.")
        with pytest.raises(QuorumUnavailable, match=r"no vote for another (9\d|10\d)\.\d s"):
            redlock.acquire("r", ttl=TTL)


# -- Replicas


def follow(replica: LocalServer, master: LocalServer) -> None:
    with admin(master, text=True) as client:  # it would wait for more replicas, for five seconds
        client.config_set("repl-diskless-sync-delay", 0)
    with admin(replica, text=True) as client:
        client.replicaof("127.0.0.1", master.port)
        wait_until(
            lambda: client.info("replication")["master_link_status"] == "up", 20, "it is in sync"
        )


def promote(replica: LocalServer) -> None:
    with admin(replica, text=True) as client:
        client.replicaof("NO", "ONE")


def test_promoted_replica_has_no_vote_like_a_restarted_node(lock: Locks) -> None:
    """The replica has been up for long, and may lack its master's last acknowledged writes."""
    with start_servers(2) as (master, replica):
        follow(replica, master)
        trusted = lock([master], ttl=TTL)
        trusted.release(wait_until(lambda: try_it(trusted), 10, "the old ones are trusted"))
        promote(replica)
        redlock = lock([replica], ttl=TTL)
        with pytest.raises(QuorumUnavailable, match=r"was a replica, met 0 s ago.* no vote for"):
            redlock.acquire("r")
        redlock.release(wait_until(lambda: try_it(redlock), 10, "it is trusted"))
        time.sleep(2 * LOOK_AFTER_S)
        redlock.release(redlock.acquire("r"))  # it looks at it again, and marks it
        script = lock([replica], ttl=TTL)
        script.release(script.acquire("r"))
        with admin(replica) as client:  # not ours, and longer than a node may answer
            client.set(f"redlock:{TRUSTED_KEY}", "1" * 1_000_000)
        with pytest.raises(QuorumUnavailable, match="was a replica, met 0 s ago"):
            lock([replica], ttl=TTL).acquire("r")


def test_node_that_becomes_a_replica_loses_its_vote_and_is_logged(lock: Locks, log: Log) -> None:
    with start_servers(3) as servers, LocalServer() as master:
        redlock = lock(servers, ttl=TTL)
        redlock.release(wait_until(lambda: try_it(redlock), 10, "all are trusted"))
        follow(servers[0], master)

        def is_out() -> bool:
            redlock.release(redlock.acquire("r"))  # the others go on
            return bool(redlock.client.driver.nodes[0].misfit)

        wait_until(is_out, 10, "it is out")
        promote(servers[0])

        def is_back() -> bool:
            redlock.release(redlock.acquire("r"))
            return not redlock.client.driver.nodes[0].misfit

        wait_until(is_back, 10, "it is back")
        errors = [r.getMessage() for r in log.records if r.levelno == logging.ERROR]
        (error,) = errors
        assert f"node 127.0.0.1:{servers[0].port} is not usable: it is a replica" in error
        assert f"node 127.0.0.1:{servers[0].port} was a replica, met 0 s ago" in log.text


# -- Not independent, not masters


def test_server_under_two_names_is_found_without_info(
    lock: Locks, log: Log, tmp_path: Path
) -> None:
    """A nonce is written through one name and read through the other."""
    path = str(tmp_path / "node.sock")
    config = ["--unixsocket", path]
    with LocalServer(config=config) as server, start_servers(2) as (one, two):
        for node in (server, one, two):
            with admin(node, text=True) as client:
                client.execute_command("ACL", "SETUSER", "lock", *NO_INFO.split())
        urls = [f"redis://lock:SECRET@127.0.0.1:{node.port}" for node in (server, one, two)]
        redlock = lock([urls[0], urls[1], f"unix://lock:SECRET@{path}"])
        connect = redlock.client.driver.connect  # waits for all three: a quorum is no twin yet
        for ask in (lambda: connect(30.0, rest=30.0), lambda: redlock.acquire("r")):
            with pytest.raises(ConfigurationError, match="is the same server as") as refusal:
                ask()
            assert path in str(refusal.value)
            assert str(server.port) in str(refusal.value)
        # Three that are three do work, without a guard, and that is said once.
        wait_until(lambda: "is the same server as" in log.text, 5.0, "it is said of the others")
        redlock.close()
        log.clear()
        redlock = lock(urls, ttl=30.0)
        redlock.release(redlock.acquire("r"))
        told_all(redlock)

        def said() -> list[str]:
            return [text for text in log.messages if "does not show its INFO" in text]

        wait_until(said, 5.0, "it is said")  # by whichever thread has met the node
        (_line,) = said()
        assert "SECRET" not in log.text
        with admin(one, text=True) as client:
            for key in client.keys("*"):
                assert re.fullmatch("redlock:nonce:[0-9a-f]{32}", key)
                assert 0 < client.pttl(key) <= 60_000


def test_nodes_that_are_away_are_no_error_of_the_check(known: Servers, lock: Locks) -> None:
    redlock = lock([known[0], known[1], "redis://127.0.0.1:1"])
    assert redlock.check() == []
    redlock.release(redlock.acquire("r"))
    assert lock(["redis://127.0.0.1:1"]).check() == []


def test_eviction_policy_of_a_node_is_logged_as_a_warning(lock: Locks, log: Log) -> None:
    config = ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"]
    with LocalServer(config=config) as server:
        make_known([server])
        redlock = lock([server])
        redlock.release(redlock.acquire("r"))
        (line,) = wait_until(  # another thread logs it
            lambda: [text for text in log.messages if "evict" in text], 5.0, "it is told"
        )
        assert f"node 127.0.0.1:{server.port} evicts keys" in line and "allkeys-lru" in line
        assert redlock.check() == []  # said already
        assert lock([server]).check() == [line]
