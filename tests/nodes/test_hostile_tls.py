"""TLS with certificates on both sides: who may be a node, and who may ask one.

The bundled server has no TLS: these run against another, such as Debian's redis-server.
"""

from __future__ import annotations

import gc
import logging
import re
import socket
import ssl
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from celery_redlock import QuorumUnavailable, Redlock
from celery_redlock.protocol.claim import Claim
from celery_redlock.server import LocalServer
from celery_redlock.stores.redis.address import CONNECT_TIMEOUT, parse_nodes
from tests.support import wanting
from tests.support.certificates import Authority
from tests.support.machine import in_time
from tests.support.names import Locks, Log, Servers
from tests.support.nodes import use
from tests.support.sentinels import SERVICE, Puppet
from tests.support.wait import wait_until

TTL = 20.0


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if wanting.tls_server() is None:
        pytest.skip(wanting.NO_TLS)
    return Authority(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def theirs(ours: Authority, tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("theirs"), "theirs")


@pytest.fixture(scope="module")
def ports(ours: Authority) -> Iterator[list[int]]:
    """Three servers named localhost, which want to see a certificate of ours."""
    cert, key = ours.sign("server", "DNS:localhost")
    with ExitStack() as stack:
        found = []
        for _ in range(3):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            config = [
                *("--tls-port", str(port), "--tls-auth-clients", "yes"),
                *("--tls-cert-file", str(cert), "--tls-key-file", str(key)),
                *("--tls-ca-cert-file", str(ours.ca)),
            ]
            stack.enter_context(LocalServer(binary=wanting.tls_server(), config=config))
            found.append(port)
        yield found


@pytest.fixture
def lock(lock_over: Locks) -> Iterator[Callable[..., Redlock]]:
    made: list[Redlock] = []

    def make(nodes: list[Any]) -> Redlock:
        made.append(lock_over(nodes, ttl=TTL))
        return made[-1]

    yield make
    for one in made:
        one.client.driver.close(wait=5.0)
    with warnings.catch_warnings():
        # redis-py leaves a socket whose handshake fails to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def arguments(authority: Authority | None, client: tuple[Path, Path] | None) -> dict[str, str]:
    given = {"ssl_ca_certs": str(authority.ca)} if authority else {}
    if client is not None:
        given |= {"ssl_certfile": str(client[0]), "ssl_keyfile": str(client[1])}
    return given


def urls(ports: list[int], given: dict[str, str], host: str = "localhost") -> list[str]:
    query = "&".join(f"{name}={value}" for name, value in given.items())
    return [f"rediss://{host}:{port}/0?{query}" for port in ports]


@pytest.fixture(scope="module")
def client(ours: Authority) -> tuple[Path, Path]:
    return ours.sign("worker", "DNS:worker")


@pytest.mark.parametrize("form", ["URLs", "mappings", "clients"])
def test_tls_with_certificates_on_both_sides_works(
    form: str,
    ports: list[int],
    ours: Authority,
    client: tuple[Path, Path],
    lock: Locks,
    caplog: Log,
) -> None:
    given = arguments(ours, client)
    nodes: list[Any] = urls(ports, given)
    if form != "URLs":
        nodes = [{"host": "localhost", "port": port, "ssl": True, **given} for port in ports]
    if form == "clients":
        # Said aloud: by default, a client of redis-py 5 does not check the name.
        nodes = [redis.Redis(**one, ssl_check_hostname=True) for one in nodes]
    redlock, other = lock(nodes), lock(nodes)
    for one in (redlock, other):
        one.connect(10.0)
    use(redlock, other)  # its listeners speak TLS as well
    # More leases than fit a TLS record: the request goes in pieces.
    claims = [
        redlock.client.claims[redlock.acquire(f"{form} {n}", ttl=20.0).token] for n in range(300)
    ]
    extended: list[Claim] = []
    redlock.client._extend(claims, extended.extend)
    assert len(extended) == 300
    assert caplog.records == []


def refused(lock: Redlock, words: str) -> None:
    def says(wait: float) -> bool:
        with pytest.raises(QuorumUnavailable) as raised:
            lock.acquire("r", wait=wait)
        return re.search(words, str(raised.value)) is not None

    for wait in (0.0, 0.2):  # a busy machine takes longer for a handshake than for an attempt
        wait_until(lambda wait=wait: says(wait), 20.0, words)


def test_server_certificate_of_another_authority_is_refused(
    ports: list[int], theirs: Authority, client: tuple[Path, Path], lock: Locks
) -> None:
    for trusted in (theirs, None):  # those of the system
        refused(lock(urls(ports, arguments(trusted, client))), "CERTIFICATE_VERIFY_FAILED")


def test_client_without_a_certificate_gets_no_answer(
    ports: list[int], ours: Authority, lock: Locks
) -> None:
    refused(lock(urls(ports, arguments(ours, None))), "3 of 3 nodes")


def test_client_with_a_foreign_certificate_gets_no_answer(
    ports: list[int], ours: Authority, theirs: Authority, lock: Locks
) -> None:
    strangers = theirs.sign("worker", "DNS:worker")
    refused(lock(urls(ports, arguments(ours, strangers))), "3 of 3 nodes")


@pytest.mark.parametrize("form", ["URLs", "mappings"])
def test_host_name_that_the_certificate_lacks_is_refused(
    form: str, ports: list[int], ours: Authority, client: tuple[Path, Path], lock: Locks
) -> None:
    given = arguments(ours, client)
    nodes: list[Any] = urls(ports, given, host="127.0.0.1")
    if form == "mappings":
        nodes = [{"host": "127.0.0.1", "port": port, "ssl": True, **given} for port in ports]
    refused(lock(nodes), "IP address mismatch")


@pytest.mark.parametrize("weakened", ["ssl_cert_reqs=none", "ssl_check_hostname=false"])
def test_unchecked_certificate_works_with_a_warning(
    weakened: str,
    ports: list[int],
    ours: Authority,
    client: tuple[Path, Path],
    lock: Locks,
    caplog: Log,
) -> None:
    nodes = urls(ports, arguments(ours, client), host="127.0.0.1")
    redlock = lock([f"{node}&{weakened}" for node in nodes])
    assert redlock.release(redlock.acquire("r")) is True
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 3
    assert all("the certificate of node " in text for text in warned)


def test_tls_to_a_plain_port_fails_at_once_and_delays_no_lock(
    servers: Servers, lock: Locks
) -> None:
    mistaken = [f"rediss://127.0.0.1:{server.port}/0" for server in servers]
    redlock = lock([mistaken[0], servers[1].url, servers[2].url])
    redlock.acquire("first")
    begun = time.monotonic()
    for number in range(20):
        assert redlock.release(redlock.acquire(f"r{number}")) is True
    in_time(begun, time.monotonic(), 20 * 0.05, "twenty locks")
    begun = time.monotonic()
    with pytest.raises(QuorumUnavailable, match="3 of 3 nodes"):
        lock(mistaken[:3]).acquire("r")
    in_time(begun, time.monotonic(), CONNECT_TIMEOUT + 1.5, "to be refused")


def test_plain_connection_to_a_tls_port_is_refused(
    ports: list[int], servers: Servers, lock: Locks
) -> None:
    plain = [f"redis://localhost:{port}/0" for port in ports]
    refused(lock(plain), "(?i)connection|reset|timeout")
    redlock = lock([plain[0], servers[1].url, servers[2].url])
    assert redlock.release(redlock.acquire("r")) is True


def test_master_named_by_a_sentinel_is_checked_by_that_host_name(
    ports: list[int], ours: Authority, client: tuple[Path, Path], lock: Locks
) -> None:
    """A certificate of the same authority for another host is not enough."""
    query = "&".join(f"{name}={value}" for name, value in arguments(ours, client).items())
    for host, words in (("127.0.0.1", "IP address mismatch"), ("localhost", "")):
        with Puppet(ports[0], host=host) as sentinel:
            url = f"sentinel://127.0.0.1:{sentinel.port}/{SERVICE}?ssl=true&{query}"
            redlock = lock([url])
            if words:
                refused(redlock, words)
                continue
            redlock.connect(timeout=0)
            (node,) = redlock.client.driver.nodes
            wait_until(lambda node=node: node.channel.up, 10.0, "it is connected")


@pytest.mark.parametrize("watched", [False, True], ids=["alone", "behind a Sentinel"])
def test_broker_with_broker_use_ssl_is_locked_on_over_tls(
    watched: bool, ports: list[int], ours: Authority, client: tuple[Path, Path]
) -> None:
    """A listener without TLS would read the password."""
    with Puppet(ports[0], host="localhost") as sentinel:
        url = f"redis://localhost:{ports[0]}/0"
        url = f"sentinel://127.0.0.1:{sentinel.port}/0" if watched else url
        app = Celery("shop", broker=url, set_as_current=False)
        app.conf.redlock_restart_guard = "off"
        app.conf.broker_transport_options = {"master_name": SERVICE}
        app.conf.broker_use_ssl = {"ssl_cert_reqs": ssl.CERT_REQUIRED, **arguments(ours, client)}
        redlock = Redlock.from_app(app)
        try:
            assert redlock.release(redlock.acquire("r", wait=10.0)) is True
        finally:
            redlock.client.driver.close(wait=5.0)


def test_parsed_address_keeps_certificate_checks_as_strict_as_given() -> None:
    mapping = {"host": "h", "ssl": True}
    for spec in (
        "rediss://h:1/0",
        mapping,
        redis.Redis(host="h", ssl=True, ssl_check_hostname=True),
    ):
        (address,) = parse_nodes([spec])
        connection = address.connection()
        assert connection.cert_reqs == ssl.CERT_REQUIRED
        assert connection.check_hostname is True
        assert address.arguments["ssl_check_hostname"] is True  # redis-py 5 has another default
        assert not address.unverified
    kept = {"ssl_min_version": ssl.TLSVersion.TLSv1_3, "ssl_ciphers": "ECDHE+AESGCM"}
    (address,) = parse_nodes([{**mapping, **kept, "ssl_ca_certs": "ca.pem"}])
    assert address.arguments.items() >= {**kept, "ssl_ca_certs": "ca.pem"}.items()
    for weak in ("ssl_cert_reqs=none", "ssl_check_hostname=False"):
        assert parse_nodes([f"rediss://h:1/0?{weak}"])[0].unverified
    assert not parse_nodes(["redis://h:1/0"])[0].unverified
