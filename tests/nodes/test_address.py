"""Addresses of nodes, as users write them, and what is made of them."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from celery_redlock import ConfigurationError, Redlock
from celery_redlock.server import LocalServer
from celery_redlock.stores.kinds import OWN, parse_nodes
from celery_redlock.stores.redis.address import CONNECT_TIMEOUT, Address
from tests.support.names import Locks
from tests.support.nodes import use
from tests.support.published import published

SECRET = "hunter2-canary"


def one(spec: Any) -> Address:
    (address,) = parse_nodes([spec])
    assert isinstance(address, Address)
    return address


@pytest.mark.parametrize(
    ("spec", "name", "kind"),
    [
        ("redis://10.0.0.1:6380/3", "10.0.0.1:6380", Connection),
        ("redis://somewhere", "somewhere:6379", Connection),
        ("redis://[::1]:6380", "::1:6380", Connection),
        ("rediss://10.0.0.1:6380", "10.0.0.1:6380", SSLConnection),
        ("unix:///run/redis.sock?db=2", "/run/redis.sock", UnixDomainSocketConnection),
        ({"host": "10.0.0.1", "port": 6380}, "10.0.0.1:6380", Connection),
        ({"host": "10.0.0.1", "ssl": True}, "10.0.0.1:6379", SSLConnection),
        ({"unix_socket_path": "/run/r.sock"}, "/run/r.sock", UnixDomainSocketConnection),
        (redis.Redis("10.0.0.1", 6380), "10.0.0.1:6380", Connection),
        (redis.Redis.from_url("rediss://10.0.0.1:6380"), "10.0.0.1:6380", SSLConnection),
    ],
)
def test_a_node_is_a_url_a_client_or_a_mapping(spec: Any, name: str, kind: type) -> None:
    address = one(spec)
    assert address.name == name
    assert isinstance(address.connection(), kind)


def test_node_url_mapping_and_client_give_credentials_and_database() -> None:
    for spec in (
        f"redis://lock:{SECRET}@h:1/4",
        {"host": "h", "port": 1, "username": "lock", "password": SECRET, "db": 4},
        redis.Redis("h", 1, 4, username="lock", password=SECRET),
    ):
        connection = one(spec).connection()
        assert (connection.username, connection.password, connection.db) == ("lock", SECRET, 4)


@pytest.mark.parametrize(
    ("url", "path", "db"),
    [
        ("redis+socket:///run/r.sock?virtual_host=3", "/run/r.sock", 3),
        (f"redis+socket://:{SECRET}@/run/r.sock?virtual_host=3", "/run/r.sock", 3),
        ("redis+socket:///run/r.sock?virtual_host=", "/run/r.sock", 0),
        ("redis+socket:///run/r.sock?db=3", "/run/r.sock", 3),
        ("redis+socket:///run/r.sock", "/run/r.sock", 0),
    ],
)
def test_socket_url_as_celery_writes_it_names_path_and_database(
    url: str, path: str, db: int
) -> None:
    connection = one(url).connection()
    assert (connection.path, connection.db) == (path, db)
    assert connection.password == (SECRET if SECRET in url else None)


def test_nodes_in_one_string_are_separated_by_commas() -> None:
    redlock = Redlock(f" redis://:{SECRET},x@a:1 , redis://b:2,\nunix:///run/c.sock\n,")
    assert redlock.nodes == ("a:1", "b:2", "/run/c.sock")
    first, *_rest = redlock.client.addresses
    assert isinstance(first, Address) and first.connection().password == f"{SECRET},x"


def test_retries_of_a_given_redis_client_are_not_adopted() -> None:
    client = redis.Redis(
        "h",
        retry=Retry(ConstantBackoff(1), 10),
        health_check_interval=30,
        decode_responses=True,
        protocol=3,
        socket_timeout=99,
    )
    connection = one(client).connection()
    assert connection.retry._retries == 0
    assert connection.health_check_interval == 0
    assert connection.encoder.decode_responses is False
    assert connection.protocol == 2
    assert connection.socket_timeout == connection.socket_connect_timeout  # not the client's 99 s


def test_connect_timeout_in_a_node_url_is_used() -> None:
    connection = one("redis://h?socket_connect_timeout=3.5").connection()
    assert connection.socket_connect_timeout == connection.socket_timeout == 3.5
    for spec in ("redis://h", {"host": "h"}):
        assert one(spec).connection().socket_connect_timeout == CONNECT_TIMEOUT


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([], "empty"),
        ("", "is empty"),
        (b"redis://a", "must be a list"),
        ("10.0.0.1:1,h:2", r"nodes\[0\].*write redis://10.0.0.1:1.*nodes\[1\].*write redis://h:2"),
        ("redis://a,h:2", r"nodes\[0\]: a redis:// URL names one host"),
        ("redis://a;redis://b", r"nodes\[0\]: a redis:// URL names one host"),
        (["unix:///r", "redis+socket:///r?virtual_host=1"], "the same server"),
        ({"host": "a"}, "must be a list"),
        (None, "must be a list"),
        ([5], r"nodes\[0\].*builtins.int is not a Redis URL"),
        (["redis://a", "amqp://b"], r"nodes\[1\].*'amqp'"),
        (["10.0.0.1:6379"], "scheme"),
        (["redis://a:0"], "1 to 65535"),
        (["redis://a:70000"], "1 to 65535"),
        (["redis://a:b"], "1 to 65535"),
        ([{"hots": "a"}], "hots"),
        ([redis.asyncio.Redis()], "is not a Redis URL, a redis.Redis client"),
        (["redis://a:1/0", "redis://a:1/1"], r"nodes\[0\] and nodes\[1\] are the same server, a:1"),
        (["redis://localhost", "redis://127.0.0.1:6379"], "the same server"),
        (["redis://A", {"host": "a"}], "the same server"),
        ("redis://a?db=1&db=2", r"nodes\[0\]: an option of its URL is there twice"),
        ("redis+socket:///r?virtual_host=1&virtual_host=2", "twice"),
        ("sentinel://a/m?masters=a&masters=b", "twice"),
        ("etcds://a?verify=no&verify=yes", r"nodes\[0\]: an option of its URL is there twice"),
        (["unix:///r", "unix:///r"], "the same server"),
    ],
)
def test_invalid_set_of_nodes_is_refused(nodes: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        parse_nodes(nodes)


@pytest.mark.parametrize(
    ("option", "value", "good"),
    [
        ("sslmode", "zzz", "verify-full"),
        ("target_session_attrs", "foo", "prefer-standby"),
        ("gssencmode", "no", "disable"),
        ("channel_binding", "yes", "require"),
        ("load_balance_hosts", "1", "random"),
        ("connect_timeout", "abc", "0"),
        ("keepalives", "abc", "1"),
        ("keepalives_idle", "5s", "5"),
        ("keepalives_interval", "", "-1"),
        ("keepalives_count", "1.5", "3"),
        ("tcp_user_timeout", "10000ms", "10000"),
    ],
)
def test_option_that_libpq_would_refuse_at_each_connection_is_refused_at_once(
    option: str, value: str, good: str
) -> None:
    pytest.importorskip("psycopg")
    url = f"postgresql://u:{SECRET}@h/d?password={SECRET}&{option}="
    assert parse_nodes([url + good])
    with pytest.raises(ConfigurationError, match=rf"nodes\[0\]: its {option} is no") as caught:
        parse_nodes([url + value])
    assert SECRET not in str(caught.value)


def test_unknown_scheme_is_refused_with_all_installed_schemes_and_their_extras(
    tmp_path: Path,
) -> None:
    with (
        published("own", "tests.support.sqlite_store:KIND", tmp_path),
        pytest.raises(ConfigurationError) as refused,
    ):
        parse_nodes(["zokeeper://a"])
    said = str(refused.value)
    assert said.startswith("nodes[0]: the scheme 'zokeeper' is none of redis://, ")
    assert {f"{scheme}://" for scheme in (*OWN, "own")} <= {*re.split("[ ,]+", said)}
    assert "zookeeper:// (needs the extra celery-redlock[zookeeper])" in said
    assert "etcd://, " in said  # needs none


def test_unencoded_password_in_a_node_url_is_noticed_and_not_shown() -> None:
    with pytest.raises(ConfigurationError, match="%40") as caught:
        parse_nodes([f"redis://u:p@{SECRET}/w:1@127.0.0.1:7911"])
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", ["localhost:7001", "10.0.0.1", "redis-1.internal:6379/0"])
def test_node_without_a_scheme_is_refused_with_the_url_to_write(url: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{url!r} has no scheme; write redis://{url}, or"):
        one(url)


# -- Another way than TCP; TLS is in test_hostile_tls.py


def test_unix_sockets_are_nodes(lock_over: Locks, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.sock") for number in range(3)]
    with ExitStack() as stack:
        configs = [["--unixsocket", path] for path in paths]
        servers = [stack.enter_context(LocalServer(config=config)) for config in configs]
        use(lock_over([f"unix://{path}" for path in paths]), lock_over(servers))
