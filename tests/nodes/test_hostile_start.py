"""A node that claims to be what it is not stops a start only where it leaves no quorum."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from click.testing import CliRunner

from celery_redlock import ConfigurationError, Redlock
from celery_redlock.cli.context import Site
from celery_redlock.cli.doctor import command as doctor
from celery_redlock.server import LocalServer
from tests.support.names import Log, Servers
from tests.support.nodes import admin
from tests.support.proxy import Proxy
from tests.support.wait import wait_until
from tests.tools.cli.clinic import Forger, examined, found

RUN_ID = rb"run_id:[0-9a-f]{40}"


class Liar(Forger):
    """A proxy in front of a node.

    Its claims about that node, and their delay, can be changed any time.
    """

    def __init__(self, port: int, pattern: bytes, says: bytes) -> None:
        self.says = says
        super().__init__(port, pattern, self._say)

    def _say(self, _truth: bytes) -> bytes:
        time.sleep(self.delay)
        return self.says


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def run_of(server: LocalServer) -> bytes:
    with admin(server) as client:
        return b"run_id:%b" % client.info("server")["run_id"].encode()


def name(node: LocalServer | Proxy) -> str:
    return f"127.0.0.1:{node.port}"


def lock(stack: ExitStack, *nodes: LocalServer | Proxy) -> Redlock:
    made = Redlock([node.url for node in nodes], ttl=5.0, restart_guard="off")
    stack.callback(made.close)
    return made


def errors(log: Log) -> list[str]:
    return [r.getMessage() for r in log.records if r.levelno == logging.ERROR]


CLAIMS: dict[str, tuple[bytes, bytes]] = {
    "a replica": (rb"role:master\r\n", b"role:slave \r\n"),
    "a cluster's": (rb"cluster_enabled:0", b"cluster_enabled:1"),
    "another": (RUN_ID, b""),
}


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("first", [False, True], ids=["behind the others", "ahead of them"])
def test_lying_node_among_five_stops_no_start(
    servers: Servers, stack: ExitStack, caplog: Log, claim: str, first: bool
) -> None:
    pattern, says = CLAIMS[claim]
    liar = stack.enter_context(Liar(servers[0].port, pattern, says or run_of(servers[1])))
    blamed = stack.enter_context(Proxy(servers[1].port))
    late = blamed if first else liar
    late.mode, late.delay = "slow to connect", 0.2
    redlock = lock(stack, liar, blamed, *servers[2:])
    (warning,) = redlock.check(timeout=10.0)
    assert "is not usable and has no vote" in warning
    redlock.release(redlock.acquire("r", wait=2.0))  # not refused, either
    (error, *_) = wait_until(lambda: errors(caplog), 5, "it is said")
    if claim == "another":
        for said in (warning, error):  # who came second has no vote, but is not blamed alone
            assert name(liar) in said and name(blamed) in said and "one of the two lies" in said
    else:
        assert f"node {name(liar)} is not usable" in warning
    code, report = examined(Site(nodes=[n.url for n in (liar, blamed, *servers[2:])]))
    bad = found(report, "wrong")
    assert code == 1 and set(bad) == {"twins" if claim == "another" else "role"}
    assert name(liar) in next(iter(bad.values()))["where"]


def test_lying_node_that_leaves_no_quorum_stops_the_start_and_both_are_named(
    servers: Servers, stack: ExitStack
) -> None:
    liar = stack.enter_context(Liar(servers[0].port, RUN_ID, run_of(servers[1])))
    nodes = (liar, servers[1], servers[2])
    with pytest.raises(ConfigurationError, match="one of the two lies") as refusal:
        lock(stack, *nodes).check(timeout=10.0)
    assert name(liar) in str(refusal.value) and name(servers[1]) in str(refusal.value)
    result = CliRunner().invoke(doctor, [], obj=Site(nodes=[node.url for node in nodes]))
    assert "no quorum: 1 of 3 nodes are independent masters, 2 are needed" in result.output


def test_lying_node_that_changes_its_name_silences_no_more_than_one_other(
    servers: Servers, stack: ExitStack
) -> None:
    liar = stack.enter_context(Liar(servers[0].port, RUN_ID, run_of(servers[1])))
    blamed = stack.enter_context(Proxy(1))  # it is away
    redlock = lock(stack, liar, blamed, *servers[2:])
    redlock.connect()
    nodes = redlock.client.driver.nodes
    wait_until(lambda: nodes[0].channel.up, 5, "the liar has a vote")
    blamed.lead_to(servers[1].port)
    wait_until(lambda: nodes[1].misfit, 5, "the honest one came second")
    for server in servers[2:]:
        liar.says = run_of(server)
        liar.reset()

        def goes_on() -> list[bool]:
            redlock.release(redlock.acquire("r"))
            return [bool(node.misfit) for node in nodes] == [True] + 4 * [False]

        wait_until(goes_on, 10, "the liar is out, and the honest one back")
