"""A password on its way to a node: who else could read it, and what prevents that."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import redis
from redis.connection import Connection, SSLConnection

from celery_redlock import ConfigurationError, QuorumUnavailable, Redlock
from celery_redlock.stores.kinds import parse_nodes
from celery_redlock.stores.redis.address import SentinelAddress
from celery_redlock.stores.redis.master_watch import MasterWatch
from celery_redlock.stores.secrecy import is_among
from tests.support.names import Patch
from tests.support.proxy import close
from tests.support.sentinels import SERVICE, Puppet
from tests.support.wait import wait_until

PW = "s3cret"
PLAIN = "goes over the network as plain text"
ANYBODY = "goes to whatever server a Sentinel names"


@pytest.fixture(autouse=True)
def _no_password_of_ours(monkeypatch: Patch) -> None:
    for name in ("PGPASSWORD", "PGPASSFILE", "PGSSLMODE", "PGHOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nowhere")


def exposed(node: Any) -> str:
    (address,) = parse_nodes([node])
    return "; ".join(address.exposed or ())


@pytest.mark.parametrize(
    ("node", "what", "fix"),
    [
        (f"redis://:{PW}@10.0.0.1", PLAIN, "write rediss://"),
        (f"redis://redis?password={PW}", PLAIN, "write rediss://"),
        (f"redis://:{PW}@127.evil.example", PLAIN, "write rediss://"),
        ({"host": "10.0.0.1", "password": PW}, PLAIN, "write rediss://"),
        (redis.Redis("10.0.0.1", password=PW), PLAIN, "write rediss://"),
        (f"etcd://u:{PW}@127.0.0.1,10.0.0.1", PLAIN, "write etcds://"),
        (f"postgresql://u:{PW}@10.0.0.1/d", PLAIN, "sslmode=verify-full"),
        (f"postgresql://u:{PW}@localhost,10.0.0.1/d?sslmode=allow", PLAIN, "sslmode=verify-full"),
        (f"postgresql://10.0.0.1/d?password={PW}&sslmode=disable", PLAIN, "sslmode=verify-full"),
        ("postgresql://10.0.0.1/d?passfile=/etc/passwords", PLAIN, "sslmode=verify-full"),
        (f"sentinel://:{PW}@10.0.0.1/m", ANYBODY, "masters="),
        (f"sentinel://:{PW}@127.0.0.1/m", ANYBODY, "masters="),
        (f"sentinel://:{PW}@10.0.0.1/m?ssl=true", ANYBODY, "ssl_ca_certs=PATH"),
        (f"sentinel://:{PW}@10.0.0.1/m?masters=10.0.0.0/24", PLAIN, "add ssl=true"),
        (f"sentinel://10.0.0.1/m?sentinel_password={PW}", PLAIN, "add sentinel_ssl=true"),
    ],
)
def test_password_that_others_can_learn_is_reported_with_what_to_write(
    node: Any, what: str, fix: str
) -> None:
    said = exposed(node)
    assert what in said and fix in said and PW not in said


@pytest.mark.parametrize(
    "node",
    [
        "redis://10.0.0.1",
        f"redis://:{PW}@localhost",
        f"redis://:{PW}@127.0.0.2",
        f"redis://:{PW}@[::1]:1",
        f"redis://:{PW}@",
        f"unix://:{PW}@/run/r.sock",
        f"rediss://:{PW}@10.0.0.1",
        f"etcd://u:{PW}@localhost",
        f"etcds://u:{PW}@10.0.0.1",
        "etcd://10.0.0.1",
        f"postgresql://u:{PW}@localhost/d",
        f"postgresql://u:{PW}@/d",
        f"postgresql://u:{PW}@/d?host=/run/postgresql",
        f"postgresql://u:{PW}@10.0.0.1/d?sslmode=verify-full",
        "postgresql://u@10.0.0.1/d",
        "sentinel://10.0.0.1/m",
        f"sentinel://:{PW}@10.0.0.1/m?masters=127.0.0.0/8,localhost",
        f"sentinel://:{PW}@10.0.0.1/m?ssl=true&ssl_ca_certs=/etc/ca.pem",
        f"sentinel://:{PW}@10.0.0.1/m?ssl=true&masters=db.example",
        f"sentinel://10.0.0.1/m?sentinel_ssl=true&sentinel_password={PW}",
    ],
)
def test_password_that_stays_here_or_is_encrypted_is_not_reported(node: str) -> None:
    assert exposed(node) == ""


def test_password_and_mode_from_the_environment_count(monkeypatch: Patch) -> None:
    monkeypatch.setenv("PGPASSWORD", PW)
    assert PLAIN in exposed("postgresql://10.0.0.1/d")
    monkeypatch.setenv("PGSSLMODE", "verify-full")
    assert exposed("postgresql://10.0.0.1/d") == ""
    monkeypatch.setenv("PGSSLMODE", "require")
    assert parse_nodes(["postgresql://10.0.0.1/d"])[0].unverified == "sslmode"


def test_check_at_a_start_warns_once_for_all_nodes() -> None:
    nodes = [f"redis://:{PW}@0.0.0.0:{port}" for port in (1, 2)]  # here, and no name of this host
    with closing(Redlock([*nodes, f"redis://:{PW}@127.0.0.1:3"])) as redlock:
        found = redlock.check(timeout=0.5)
    assert [one for one in found if PLAIN in one] == [
        f"node 0.0.0.0:1, 0.0.0.0:2: its password {PLAIN}; write rediss://"
    ]


@pytest.mark.parametrize(
    ("host", "masters", "found"),
    [
        ("10.0.0.7", "10.0.0.0/24", True),
        ("10.0.0.7", "10.0.0.7", True),
        ("10.0.1.7", "10.0.0.0/24,10.0.1.8", False),
        ("10.0.0.7.evil.example", "10.0.0.0/24,10.0.0.7", False),
        ("167772167", "10.0.0.0/24", False),
        ("fd00::7", "fd00::/8", True),
        ("fe80::7", "fd00::/8,10.0.0.0/8", False),
        ("DB-1.shop.internal", "*.shop.internal", True),
        ("a.b.shop.internal", "*.shop.internal", True),
        ("shop.internal", "*.shop.internal", False),
        ("evilshop.internal", "*.shop.internal", False),
        ("shop.internal.evil.example", "*.shop.internal,shop.internal", False),
    ],
)
def test_host_is_among_names_domains_and_networks(host: str, masters: str, found: bool) -> None:
    assert is_among(host, masters.split(",")) is found


@pytest.mark.parametrize(
    "masters", ["", "10.0.0.1,", "10.0.0.1/24", "10.0.0.0/33", "db-*", "*", "redis://db", "*."]
)
def test_masters_that_cannot_be_understood_are_refused(masters: str) -> None:
    with pytest.raises(ConfigurationError, match="is no host in small letters"):
        parse_nodes([f"sentinel://h/m?masters={masters}"])


def test_tls_of_master_and_sentinels_is_read_from_the_url() -> None:
    (both,) = parse_nodes(["sentinel://h/m?ssl=true&sentinel_ssl=true&sentinel_socket_timeout=0.5"])
    (none,) = parse_nodes(["sentinel://h/m?ssl=false&sentinel_ssl=no"])
    (weak,) = parse_nodes(["sentinel://h/m?sentinel_ssl=true&sentinel_ssl_cert_reqs=none"])
    assert isinstance(both, SentinelAddress) and isinstance(none, SentinelAddress)
    for address in (both, *both.sentinels):
        assert address.connection_class is SSLConnection
        assert address.arguments["ssl_check_hostname"] is True
    assert {one.connection_class for one in (none, *none.sentinels)} == {Connection}
    (asked,) = both.sentinel.sentinels
    assert asked.connection_pool.connection_kwargs["socket_timeout"] == 0.5
    assert weak.unverified and not both.unverified


class Thief:
    """A server that notes what it is sent, and answers OK to all of it."""

    def __init__(self) -> None:
        self.told = b""
        self.asked = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        close(self._listener)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.asked += 1
            threading.Thread(target=self._note, args=(client,), daemon=True).start()

    def _note(self, client: socket.socket) -> None:
        with client:
            client.settimeout(5.0)
            try:
                while data := client.recv(65536):
                    self.told += data
                    client.sendall(b"+OK\r\n" * data.count(b"*"))
            except OSError:
                return


@pytest.fixture
def thief() -> Iterator[Thief]:
    with closing(Thief()) as one:
        yield one


def test_password_goes_to_no_master_that_the_url_does_not_list(thief: Thief) -> None:
    with Puppet(thief.port) as liar:
        url = f"sentinel://:{PW}@127.0.0.1:{liar.port}/{SERVICE}"
        with closing(Redlock([f"{url}?masters=10.0.0.0/8"])) as redlock:
            with pytest.raises(QuorumUnavailable, match=r"names '127\.0\.0\.1', which `mast"):
                redlock.acquire("r")
            with pytest.raises(QuorumUnavailable):
                redlock.acquire("r", wait=0.1)  # it would listen, too
        assert thief.asked == 0
        with closing(Redlock([url])) as redlock:
            with pytest.raises(QuorumUnavailable):
                redlock.acquire("r")
            wait_until(lambda: PW.encode() in thief.told, 5.0, "without it the thief has it")


def test_honest_sentinel_is_used_beside_one_that_names_another_host() -> None:
    with Puppet(7001) as honest, Puppet(7002, epoch=99, host="127.0.0.2") as liar:
        hosts = f"127.0.0.1:{liar.port},127.0.0.1:{honest.port}"
        (address,) = parse_nodes([f"sentinel://{hosts}/{SERVICE}?masters=127.0.0.1"])
        assert isinstance(address, SentinelAddress)
        with closing(MasterWatch(address)) as watch:
            wait_until(lambda: watch.master(), 10.0, "the honest one has answered")
            assert watch.master() in ({"host": "127.0.0.1", "port": 7001}, {})
            assert liar.greeted
