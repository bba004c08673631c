"""Nodes that change behind a client's back: another server at the address, another role."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import pickle
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from celery import Celery

from celery_redlock import (
    AsyncRedlock,
    ConfigurationError,
    Lease,
    NotAcquired,
    QuorumUnavailable,
    Redlock,
)
from celery_redlock.protocol.lease import drift
from celery_redlock.protocol.restart_guard import LOOK_AFTER_S
from celery_redlock.protocol.values import Vote
from celery_redlock.server import LocalServer, start_servers
from tests.support.names import Locks, Log, Patch, Servers
from tests.support.nodes import admin, all_connected
from tests.support.proxy import Proxy
from tests.support.wait import wait_until

TTL = 2.0
SPAN = TTL + drift(TTL)


@pytest.fixture(scope="module")
def old() -> Iterator[list[LocalServer]]:
    """Six servers that have been up for longer than a span."""
    with start_servers(6) as servers:
        for server in servers:
            wait_until(lambda s=server: uptime(s) > SPAN + 2, 20, "it has been up for long")
        yield servers


def uptime(server: LocalServer) -> int:
    with admin(server, text=True) as client:
        return int(client.info("server")["uptime_in_seconds"])


def tried(redlock: Redlock, resource: str) -> Lease | None:
    with contextlib.suppress(NotAcquired):
        return redlock.acquire(resource)
    return None


def refused(redlock: Redlock, resource: str) -> list[Vote]:
    """The votes for a resource that another holds, once all nodes are connected again."""

    def votes() -> list[Any]:
        with pytest.raises(NotAcquired) as refusal:
            redlock.release(redlock.acquire(resource))
        return [vote for vote in refusal.value.votes if "connect" not in vote.detail]

    return [vote.vote for vote in wait_until(lambda: len(votes()) == 3 and votes(), 10, "answers")]


# -- Another server behind a known address


@contextlib.contextmanager
def proxies(servers: Sequence[LocalServer]) -> Iterator[list[Proxy]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Proxy(server.port)) for server in servers]


def test_another_server_behind_a_known_address_has_no_vote_for_a_span(
    old: Servers, lock: Locks, caplog: Log
) -> None:
    """It was started after our connection to the old one, and still long ago."""
    with proxies(old[:3]) as nodes, start_servers(2) as later:
        holder, other = lock(nodes), lock(nodes)
        other.release(other.acquire("mine"))  # connected, before these two were started...
        for server in later:
            server.restart()
        wait_until(lambda: min(map(uptime, later)) > SPAN + 2, 20, "they have been up for long")
        other.release(other.acquire("mine"))
        lease = holder.acquire("r")
        for proxy, server in zip(nodes[1:], later, strict=True):
            proxy.lead_to(server.port)
        swapped = time.monotonic()
        while time.monotonic() < swapped + SPAN:
            second = tried(other, "r")
            assert second is None or lease.remaining() == 0, "two holders"
            time.sleep(0.02)
        assert caplog.text.count("is another server than before, met ") >= 2
        wait_until(lambda: tried(other, "r"), 3, "they have been known for a span")


@pytest.mark.parametrize("per_call", ["a loop", "an instance and a loop"])
def test_another_server_has_no_vote_in_an_event_loop_that_began_after_the_swap(
    old: Servers, lock: Locks, per_call: str
) -> None:
    with proxies(old[:3]) as nodes:
        app = Celery("loops", broker="memory://", set_as_current=False)
        app.conf.update(
            redlock_nodes=[node.url for node in nodes],
            redlock_ttl=TTL,
            redlock_restart_guard="uptime",
        )
        holder, other = lock(nodes), AsyncRedlock.from_app(app)

        def acquired() -> bool:
            redlock = AsyncRedlock.from_app(app) if "instance" in per_call else other

            async def ask() -> Lease | None:
                return await redlock.try_acquire(per_call)

            with contextlib.suppress(QuorumUnavailable):
                return asyncio.run(ask()) is not None
            return False

        wait_until(acquired, 5, "all are connected to")
        lease = wait_until(lambda: tried(holder, per_call), 5, "that lease is over")
        for proxy, server in zip(nodes[1:], old[3:5], strict=True):
            proxy.lead_to(server.port)
        swapped = time.monotonic()
        while time.monotonic() < swapped + SPAN:
            assert not acquired() or lease.remaining() == 0, "two holders"
            time.sleep(0.02)
        wait_until(acquired, 3, "they have been known for a span")


def test_old_connection_has_no_vote_once_a_check_has_met_another_server(
    old: Servers, lock: Locks
) -> None:
    """The check has connections of its own, to the same addresses."""
    with proxies(old[:3]) as nodes:
        ours, others = all_connected(lock(nodes)), lock(nodes, restart_guard="off")
        wait_until(lambda: tried(ours, "mine"), 5, "all are trusted")
        before = [node.connection for node in ours.client.driver.nodes]
        for proxy, server in zip(nodes[1:], old[3:5], strict=True):
            proxy.lead_to(server.port, keep=True)
        ours.check()
        lease = all_connected(others).acquire("behind", ttl=30.0)
        assert tried(ours, "behind") is None and lease.remaining() > 0
        assert [node.connection for node in ours.client.driver.nodes] == before


# -- Demoted and promoted again, on a living connection


def demote_and_promote(server: LocalServer, master: LocalServer) -> float:
    """Make a server a replica and a master again; return the seconds it took."""
    with admin(server, text=True) as client, admin(master, text=True) as above:
        above.config_set("repl-diskless-sync-delay", 0)
        begun = time.monotonic()
        client.replicaof("127.0.0.1", master.port)
        while client.info("replication")["master_link_status"] != "up":
            assert time.monotonic() < begun + 20
        client.replicaof("NO", "ONE")
        return time.monotonic() - begun


def test_node_demoted_and_promoted_on_a_living_connection_has_no_vote(
    old: Servers, lock: Locks, caplog: Log
) -> None:
    with start_servers(1) as (empty,):
        nodes = old[3:]
        holder, other = lock(nodes, restart_guard="off"), lock(nodes)
        other.release(wait_until(lambda: tried(other, "mine"), 5, "all are trusted"))
        connections = [node.connection for node in other.client.driver.nodes]
        lease = holder.acquire("kept", ttl=30.0)
        took = [demote_and_promote(server, empty) for server in nodes[:2]]
        # What the interval between two looks relies on.
        assert min(took) > LOOK_AFTER_S
        votes = refused(other, "kept")
        assert votes[:2] == [Vote.SILENT, Vote.SILENT]  # and the third may not be waited for
        assert lease.remaining() > 0
        assert [node.connection for node in other.client.driver.nodes] == connections
        assert caplog.text.count("was a replica, met 0 s ago") >= 2


@pytest.mark.parametrize("right", ["never had", "taken away"])
def test_missing_right_to_info_changes_nothing_and_is_logged_once(
    old: list[LocalServer], lock: Locks, caplog: Log, right: str
) -> None:
    with admin(old[5], text=True) as client:
        rule = ["on", ">SECRET", "~*", "&*", "+@all", *["-info"] * (right == "never had")]
        client.execute_command("ACL", "SETUSER", "blind", "reset", *rule)
        redlock = lock([f"redis://blind:SECRET@127.0.0.1:{old[5].port}"])
        redlock.release(redlock.acquire("r"))
        client.execute_command("ACL", "SETUSER", "blind", "-info")
        for _ in range(2):
            time.sleep(2 * LOOK_AFTER_S)  # idle
            redlock.release(redlock.acquire("r"))
    assert len([line for line in caplog.messages if "does not show its INFO" in line]) == 1


def test_busy_connection_is_not_asked_for_its_role(
    old: Servers, lock: Locks, monkeypatch: Patch
) -> None:
    """On the hot path, an executed write shows that the node is a master."""
    look_after = 0.2  # seconds: on a busy machine a lock takes longer than the real one
    monkeypatch.setattr("celery_redlock.protocol.restart_guard.LOOK_AFTER_S", look_after)
    redlock = lock(old[:3])
    redlock.release(redlock.acquire("r"))

    def looks() -> int:
        with admin(old[0], text=True) as client:
            return int(client.info("commandstats").get("cmdstat_info", {}).get("calls", 0))

    before, begun, ends = looks(), time.monotonic(), [time.monotonic()]
    while ends[-1] < begun + 3 * look_after:
        redlock.release(redlock.acquire("r"))
        ends.append(time.monotonic())
    most = looks() - before - 1
    # A busy machine may keep us from it for so long.
    stalls = sum(end - start > look_after / 2 for start, end in itertools.pairwise(ends))
    assert len(ends) > 5 and most <= 1 + stalls, f"{most} looks, {stalls} stalls, {len(ends)} locks"
    before = looks()
    for _ in range(3):
        time.sleep(1.5 * look_after)  # idle
        redlock.release(redlock.acquire("r"))
    assert looks() - before == 1 + 3


@pytest.fixture(autouse=True)
def log(caplog: Log) -> None:
    caplog.set_level(logging.INFO)


# -- Known servers, and servers that are no nodes


def test_retry_after_is_the_time_until_there_is_a_quorum(lock: Locks) -> None:
    with start_servers(3) as servers:
        redlock = lock(servers, ttl=5.0)
        begun = time.monotonic()
        with pytest.raises(QuorumUnavailable) as refusal:
            redlock.acquire("r", wait=1.0)  # in vain: it does not wait
        assert refusal.value.retry_after is not None
        assert 1.0 < refusal.value.retry_after <= 5.0 + drift(5.0)
        assert pickle.loads(pickle.dumps(refusal.value)).retry_after == refusal.value.retry_after
        due = begun + refusal.value.retry_after
        redlock.release(redlock.acquire("r", wait=20.0))
        assert time.monotonic() > due - 0.1
    nowhere = lock([f"redis://127.0.0.1:{port}" for port in (1, 2, 3)])
    with pytest.raises(QuorumUnavailable) as refusal:
        nowhere.acquire("r")
    assert refusal.value.retry_after is None


def test_guard_auto_is_on_for_three_nodes_and_off_for_one(lock: Locks) -> None:
    with start_servers(3) as servers:
        alone = lock(servers[:1], ttl=30.0, restart_guard="auto")
        alone.release(alone.acquire("r"))
        for count, on in ((1, False), (2, False), (3, True)):
            assert lock(servers[:count], restart_guard="auto").client.guard.on is on


def test_unsuitable_minority_is_silent_and_a_majority_stops_the_start(
    old: Servers, lock: Locks, caplog: Log
) -> None:
    with start_servers(2) as replicas:
        for replica in replicas:
            with admin(replica, text=True) as client:
                client.replicaof("127.0.0.1", old[5].port)
        three = [old[0], old[1], replicas[0]]
        redlock = lock(three)
        (warning,) = redlock.check()
        assert "is not usable and has no vote: it is a replica (READONLY) of" in warning
        redlock.release(redlock.acquire("minority"))
        unchecked = lock(three)
        unchecked.release(unchecked.acquire("minority", wait=5.0))
        errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
        assert any(f":{replicas[0].port} is not usable: it is a replica" in e for e in errors)
        for ask in ("check", "connect"):
            with pytest.raises(ConfigurationError, match="it is a replica"):
                getattr(lock([old[0], *replicas]), ask)()
        with proxies(old[1:2]) as twice, pytest.raises(ConfigurationError, match="same server"):
            lock([*three, *twice, old[2]]).check()
