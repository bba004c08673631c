"""The broker as the one node: it is reached as Celery reaches it."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_redlock import ConfigurationError
from celery_redlock.config.default_node import default_node
from celery_redlock.stores.kinds import parse_nodes
from celery_redlock.stores.redis.address import Address, SentinelAddress

OURS = {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": "/etc/our ca&x.pem"}
SENTINELS = "sentinel://:pw@h:1/3;sentinel://:pw@i:2/3"


def node(broker: str, **conf: Any) -> Any:
    app = Celery("shop", broker=broker, set_as_current=False)
    app.conf.update(conf)
    (address,) = parse_nodes([default_node(app)])
    return address


def tls_of(address: Address) -> dict[str, Any]:
    assert address.speaks_tls
    return {k: v for k, v in address.arguments.items() if k.startswith("ssl_")}


@pytest.mark.parametrize("broker", ["redis://:p%3Fw@h:1/3", "rediss://:p%3Fw@h:1?db=3"])
def test_broker_with_broker_use_ssl_is_a_node_with_the_same_tls(broker: str) -> None:
    address = node(broker, broker_use_ssl=OURS)
    assert tls_of(address) == {
        "ssl_cert_reqs": "required",
        "ssl_ca_certs": "/etc/our ca&x.pem",
        "ssl_check_hostname": True,
    }
    assert (address.name, address.arguments["password"]) == ("h:1", "p?w")
    assert address.arguments["db"] == 3 and not address.unverified


@pytest.mark.parametrize(
    ("given", "reqs"),
    [
        ({"ssl_cert_reqs": ssl.CERT_NONE}, "none"),
        ({"ssl_cert_reqs": None}, "none"),
        ({"ssl_cert_reqs": "none"}, "none"),
        ({"ssl_cert_reqs": "CERT_OPTIONAL"}, "optional"),
        ({"ssl_cert_reqs": 2}, "required"),
        ({"ssl_ca_path": Path("/etc/ca"), "ssl_certfile": None}, None),
        ({"ssl_check_hostname": False}, None),
    ],
)
def test_spellings_of_broker_use_ssl_are_read_as_redis_py_reads_them(given: Any, reqs: Any) -> None:
    address = node("redis://h:1", broker_use_ssl=given)
    tls = tls_of(address)
    assert tls.get("ssl_cert_reqs") == reqs and tls.get("ssl_certfile") is None
    assert bool(address.unverified) == (reqs == "none" or "ssl_check_hostname" in given)


def test_tls_options_in_the_brokers_url_replace_broker_use_ssl() -> None:
    """kombu does the same, and there these options turn TLS on for redis:// as well."""
    for broker in ("redis://h:1/0", "rediss://h:1/0"):
        address = node(f"{broker}?ssl_cert_reqs=CERT_NONE", broker_use_ssl=OURS)
        assert tls_of(address) == {"ssl_cert_reqs": "none"}


def test_master_of_a_broker_behind_sentinels_is_asked_over_tls() -> None:
    options = {
        "master_name": "m",
        "sentinel_kwargs": {"ssl": True, "ssl_cert_reqs": ssl.CERT_REQUIRED, "password": None},
    }
    address = node(SENTINELS, broker_use_ssl=OURS, broker_transport_options=options)
    assert isinstance(address, SentinelAddress)
    assert tls_of(address)["ssl_ca_certs"] == "/etc/our ca&x.pem"
    assert address.arguments["db"] == 3 and not address.unverified
    for sentinel in address.sentinels:
        assert tls_of(sentinel)["ssl_cert_reqs"] == "required"
        assert sentinel.arguments.get("password") is None
    options = {"master_name": "m"}
    inside = SENTINELS.replace("/3;", "/3?ssl_cert_reqs=required;")
    address = node(inside, broker_transport_options=options)
    assert tls_of(address)["ssl_cert_reqs"] == "required"
    assert not any(sentinel.speaks_tls for sentinel in address.sentinels)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (True, "broker_use_ssl is no mapping"),
        ("required", "broker_use_ssl is no mapping"),
        ({"ca_certs": "/etc/ca.pem", "ssl_cert_reqs": "none"}, "ca_certs"),
        ({"ssl_min_version": ssl.TLSVersion.TLSv1_3}, "ssl_min_version"),
        ({"ssl_ca_data": b"s3cret"}, "ssl_ca_data"),
        ({"ssl_password": "s3cret%41"}, "ssl_password"),
    ],
)
@pytest.mark.parametrize("broker", ["redis://:s3cret@h:1", "rediss://:s3cret@h:1", SENTINELS])
def test_broker_use_ssl_that_cannot_be_taken_over_is_refused(
    broker: str, given: Any, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words) as raised:
        node(broker, broker_use_ssl=given, broker_transport_options={"master_name": "m"})
    assert "redlock_nodes" in str(raised.value) and "s3cret" not in str(raised.value)


def test_broker_without_broker_use_ssl_has_the_tls_of_its_scheme() -> None:
    for given in (False, None, {}):
        assert not node("redis://h:1", broker_use_ssl=given).speaks_tls
    assert node("rediss://h:1").speaks_tls


def test_socket_of_a_broker_is_reached_without_tls() -> None:
    assert node("redis+socket:///run/r.sock", broker_use_ssl=OURS).name == "/run/r.sock"


@pytest.mark.parametrize(
    "url", ["unix://run/x.sock", "unix://:pw@run/x.sock?db=1", "unix://x.sock"]
)
def test_socket_whose_path_has_two_slashes_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"write unix:///\S*x\.sock") as raised:
        parse_nodes([url])
    assert "pw" not in str(raised.value)
    with pytest.raises(ConfigurationError, match=r"redis\+socket:///\S*x\.sock"):
        node(url.replace("unix", "redis+socket"))
