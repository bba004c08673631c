"""Nodes that answer with an error: what they refuse, what they owe, and how it is said.

Each is a real server that is made to refuse; the bundled one and Debian's Redis 7.0.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from celery_redlock import ConfigurationError, QuorumUnavailable, Redlock
from celery_redlock.protocol.values import Vote
from celery_redlock.server import LocalServer, start_servers
from tests.support.impostor import Impostor
from tests.support.names import Locks, Log, Request, Servers
from tests.support.nodes import ACL_RULE, admin, all_connected
from tests.support.wait import wait_until

TTL = 30.0
"""Long: nothing that goes away in these tests has expired."""


class Ailment(NamedTuple):
    """The error of a node that refuses writes, and the commands that begin and end it."""

    code: str
    begin: str
    end: str


ALL = [
    Ailment(
        "NOREPLICAS", "CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"
    ),
    Ailment("READONLY", "REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
]


class Ailing:
    """A server of a test's own, that can be made to refuse, and to be well again."""

    def __init__(self, stack: ExitStack, ailment: Ailment, binary: str | None) -> None:
        self.server = stack.enter_context(LocalServer(binary=binary))
        self.client = stack.enter_context(admin(self.server))
        self._ailment = ailment

    def fall_ill(self) -> None:
        self.client.execute_command(*self._ailment.begin.split())

    def get_well(self) -> None:
        self.client.execute_command(*self._ailment.end.split())


@pytest.fixture(params=["the usual server", "redis-server"])
def binary(request: Request) -> str | None:
    if request.param == "the usual server":
        return None
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server is installed")
    return found


Make = Callable[..., "tuple[Redlock, list[Ailing]]"]


@pytest.fixture
def make(servers: Servers, binary: str | None) -> Iterator[Make]:
    """A lock over some nodes that will fall ill, and healthy ones to make it three."""
    with ExitStack() as stack:

        def made(ailment: Ailment, count: int = 1) -> tuple[Redlock, list[Ailing]]:
            ailing = [Ailing(stack, ailment, binary) for _ in range(count)]
            nodes = [*(one.server for one in ailing), *servers[: 3 - count]]
            redlock = Redlock([node.url for node in nodes], ttl=TTL)
            stack.callback(redlock.close)
            return all_connected(redlock), ailing

        yield made


def said(log: Log, name: str, words: str) -> int:
    return sum(
        name in record.getMessage() and words in record.getMessage()
        for record in log.records
        if record.levelno >= logging.WARNING
    )


def everywhere(redlock: Redlock, ailing: list[Ailing], resource: str) -> None:
    """Wait until all nodes have the key, those beyond the quorum included."""
    for one in ailing:
        wait_until(lambda o=one: o.client.exists(f"redlock:{resource}"), 5, "it is set")


@pytest.mark.parametrize("ailment", ALL, ids=lambda one: one.code)
def test_refused_release_is_repeated_when_the_node_recovers(
    make: Make, ailment: Ailment, caplog: Log
) -> None:
    redlock, (ailing,) = make(ailment)
    name = redlock.nodes[0]
    leases = [redlock.acquire(f"r{number}") for number in range(20)]
    for number in range(20):
        everywhere(redlock, [ailing], f"r{number}")
    ailing.fall_ill()
    for lease in leases:
        assert redlock.release(lease) is True  # by the other two

    def is_said() -> int:  # its answers are read when it is next asked something
        redlock.release(redlock.acquire("anything"))
        return said(caplog, name, "does not release")

    wait_until(is_said, 5, "it is said")
    assert said(caplog, name, f"does not release: {ailment.code}") == 1
    assert ailing.client.keys("redlock:r*")
    ailing.get_well()

    def all_free() -> bool:
        redlock.release(redlock.acquire("anything"))
        return not ailing.client.keys("redlock:r*")

    wait_until(all_free, 5, "what was owed is released")
    assert said(caplog, name, "does not release") == 1


@pytest.mark.parametrize("ailment", ALL, ids=lambda one: one.code)
def test_refusing_majority_is_unavailable_and_a_held_lock_lives_to_its_deadline(
    make: Make, ailment: Ailment
) -> None:
    redlock, ailing = make(ailment, count=2)
    lease = redlock.acquire("held")
    everywhere(redlock, ailing, "held")
    for one in ailing:
        one.fall_ill()
    with pytest.raises(QuorumUnavailable, match=ailment.code) as raised:
        redlock.acquire("r")
    assert [vote.vote for vote in raised.value.votes[:2]] == [Vote.SILENT] * 2
    with pytest.raises(QuorumUnavailable, match=ailment.code):
        redlock.extend(lease)
    assert TTL / 2 < lease.remaining() < TTL  # the old deadline stands
    for one in ailing:
        one.get_well()

    def extended() -> Any:
        with suppress(QuorumUnavailable):
            return redlock.extend(lease)

    # At once, except that a former replica is asked for its role on a new connection.
    assert redlock.release(wait_until(extended, 5, "they are well")) is True


def test_replica_that_answers_0_does_not_confirm_a_release(
    servers: Servers, lock_over: Locks
) -> None:
    """A node where another client has the key gives the same answer."""
    with LocalServer(config=["--repl-diskless-sync-delay", "0"]) as empty, ExitStack() as stack:
        redlock = all_connected(lock_over(servers[:3], ttl=TTL))
        lease = redlock.acquire("r")
        for server in servers[:3]:
            client = stack.enter_context(admin(server))
            wait_until(lambda c=client: c.exists("redlock:r"), 5, "it is set")
            client.execute_command("REPLICAOF", "127.0.0.1", str(empty.port))
            stack.callback(client.execute_command, "REPLICAOF", "NO", "ONE")
            wait_until(
                lambda c=client: c.info("replication")["master_link_status"] == "up", 20, "in sync"
            )
            assert not client.exists("redlock:r")
        assert redlock.release(lease) is False


def test_cluster_and_replica_without_its_master_are_refused(
    servers: Servers, binary: str | None, lock_over: Locks, tmp_path: Path
) -> None:
    cluster = ["--cluster-enabled", "yes", "--cluster-config-file", str(tmp_path / "nodes.conf")]
    orphan = ["--replicaof", "127.0.0.1", "1", "--replica-serve-stale-data", "no"]
    for config, words in ((cluster, "(?i)cluster"), (orphan, "(?i)master")):
        sick = LocalServer(binary=binary, config=config)
        with sick, pytest.raises(ConfigurationError, match=words):
            lock_over([sick, servers[0]], ttl=TTL).acquire("r")


def test_node_without_room_for_clients_is_not_hammered(
    servers: Servers, binary: str | None, lock_over: Locks
) -> None:
    with LocalServer(binary=binary) as crowded, admin(crowded) as client:
        client.config_set("maxclients", 1)  # that is this one

        def refused() -> int:
            return int(client.info("stats")["rejected_connections"])

        redlock = lock_over([crowded, *servers[:2]], ttl=TTL)
        others = lock_over([crowded, servers[0]], ttl=TTL)
        wait_until(lambda: redlock.release(redlock.acquire("r")) and refused() >= 3, 10, "3")
        before = refused()
        for _ in range(500):
            assert redlock.release(redlock.acquire("r")) is True
        assert refused() - before < 20  # they come by time, not by request
        with pytest.raises(QuorumUnavailable, match="max number of clients"):
            others.acquire("r")
        client.config_set("maxclients", 1000)

        def granted() -> bool:
            with suppress(QuorumUnavailable):
                return others.release(others.acquire("s"))
            return False

        wait_until(granted, 10, "it has room")


@pytest.mark.parametrize("command", ["EVALSHA", "SET"])
def test_server_that_quotes_a_request_gets_no_token_into_the_log(
    command: str, servers: Servers, lock_over: Locks, caplog: Log
) -> None:
    """The error about an unknown command quotes its arguments."""
    caplog.set_level(logging.DEBUG)
    with Impostor(servers[0].port) as impostor:
        seen: list[bytes] = []

        def quote(request: bytes) -> bytes:
            if f"\r\n{command}\r\n".encode() not in request:
                return b":1\r\n" if b"EVAL" in request else b"$-1\r\n"
            words = request.split(b"\r\n")[2::2]
            seen.extend(word for word in words if word.count(b"|") == 7)
            quoted = b" ".join(b"'%b'" % word for word in words)
            return b"-ERR unknown command '%b', with args beginning with: %b\r\n" % (
                command.encode(),
                quoted,
            )

        redlock = lock_over([impostor], ttl=TTL)
        redlock.connect()
        impostor.reply = quote
        for _ in range(3):  # the first release goes by the script's text
            with suppress(QuorumUnavailable):
                redlock.release(redlock.acquire("r"))
        nonces = {word.decode().rpartition("|")[2] for word in seen}
        assert nonces and all(len(nonce) == 32 for nonce in nonces)
        assert f"unknown command '{command}'" in caplog.text
        assert not any(nonce in caplog.text for nonce in nonces)


def test_evicted_lock_is_set_again_and_logged_as_forgotten(lock_over: Locks, caplog: Log) -> None:
    with start_servers(3, config=["--maxmemory-policy", "allkeys-random"]) as nodes:
        redlock = all_connected(lock_over(nodes, ttl=9.0))
        with redlock.lock("r") as lease, admin(nodes[0]) as client:
            wait_until(lambda: client.exists("redlock:r"), 5, "it is set")
            client.config_set("maxmemory", client.info("memory")["used_memory"] + 300_000)
            number = 0
            while client.exists("redlock:r"):  # foreign writes, no error anywhere
                number += 1
                client.set(f"theirs {number}", b"x" * 10_000)
                assert number < 20_000
            client.config_set("maxmemory", 0)
            wait_until(lambda: client.exists("redlock:r"), 30, "the extension has set it again")
            assert not lease.lost
            what = f"has forgotten r, held by pid {os.getpid()} on"
            wait_until(lambda: said(caplog, redlock.nodes[0], what), 5, "said")
            assert said(caplog, redlock.nodes[0], "or was it released by hand")


@pytest.mark.parametrize("command", ["EVAL", "EVALSHA"])
def test_node_that_runs_no_scripts_is_refused_before_any_lock(
    binary: str | None, lock_over: Locks, command: str
) -> None:
    """SET would acquire a lock there, but it could not be released before its ttl."""
    config = ["--rename-command", command, ""]
    with LocalServer(binary=binary, config=config) as mute, admin(mute) as client:
        redlock = lock_over([mute], ttl=TTL)
        with pytest.raises(ConfigurationError, match=f"runs no scripts.*{command}") as raised:
            redlock.check(timeout=10.0)
        assert redlock.nodes[0] in str(raised.value)
        assert client.dbsize() == 0


def test_node_whose_acl_forbids_scripts_is_refused(lock_over: Locks) -> None:
    with LocalServer() as strict, admin(strict) as client:
        rule = [word for word in ACL_RULE if word != "+eval"]
        client.execute_command("ACL", "SETUSER", "redlock", *rule)
        url = f"redis://redlock:SECRET@127.0.0.1:{strict.port}/0"
        with pytest.raises(ConfigurationError, match=r"runs no scripts.*NOPERM"):
            lock_over([url], ttl=TTL).acquire("r")
