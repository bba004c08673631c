"""A password in a node's URL, quoted or not, whatever is in it: it is shown nowhere.

Either the URL is refused, and none of it is in the error; or all that is made of it to be shown is
free of every piece of the password.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
import redis
from celery import Celery
from celery.worker import control
from hypothesis import example, given, settings
from hypothesis import strategies as st
from redis.sentinel import MasterNotFoundError, Sentinel

from celery_redlock import ConfigurationError, Redlock, SingletonTask
from celery_redlock.config.settings import read_settings
from celery_redlock.stores.kinds import identity, parse_nodes
from celery_redlock.worker import remote_control
from tests.support.names import Patch

CASES = settings(max_examples=int(os.environ.get("URL_CASES", 150)), deadline=None)

REDIS = [
    "redis://u:{}@h:1/0",
    "redis://:{}@[::1]:1/0",
    "redis://{}@h",
    "redis://u:{}@",
    "redis://h:1/0?db=0&password={}",
    "rediss://u:{}@h:1/0?ssl_cert_reqs=none",
    "rediss://h:1/0?ssl_password={}",
    "unix://u:{}@/run/r.sock?db=0",
    "unix:///run/r.sock?password={}",
    "redis+socket://u:{}@/run/r.sock?virtual_host=1",
    "sentinel://u:{}@h:1,i:2/m?db=0",
    "sentinel://h:1,u:{}@i:2/m",
    "sentinel://h:1/m?password={}",
    "sentinel://h:1/m?sentinel_username=u&sentinel_password={}",
    "redis://u%3A{}%40h:1/0",
]
OTHERS = [
    "postgresql://u:{}@h/d",
    "postgres://u:{}@h:1,i:2/d",
    "postgresql://h:1,u:{}@i/d",
    "postgresql://u:{}@[::1]:1/d?sslmode=require",
    "postgresql://u:{}@",
    "postgresql://h/d?password={}&sslmode=prefer",
    "postgresql://h/d?sslpassword={}",
    "postgresql://u%3A{}%40h/d",
    "postgresql://u:{}%40h/d",
    "etcd://u:{}@h:1,i:2",
    "etcds://u:{}@[::1]",
    "etcd://h:1,u:{}@i",
    "etcd://u%3A{}%40h",
]
"""URLs of all kinds, with a password in each place where one may stand, or is put by mistake."""

words = st.integers(7000, 9999).map(str) | st.text("qxz", min_size=4, max_size=6)
between = st.text("/@#?:%&=;,+ []{}|\\'\"!$*~\n\t\x00\x1b\ud800\u2100é", min_size=1, max_size=3)
passwords = st.tuples(words, between, words, between, words).map("".join)


def seen(password: str, text: str) -> list[str]:
    """Return the words of a password that are in a text; not within a number, as of an address."""
    words = re.findall("[0-9]{4,}|[qxz]{4,}", password)
    return [one for one in words if re.search(f"(?<![0-9a-f]){one}(?![0-9a-f])", text.lower())]


@pytest.fixture(scope="module")
def app() -> Celery:
    app = Celery("shop", broker="redis://b", set_as_current=False)
    app.task(lambda: None, name="charge", base=SingletonTask, shared=False)
    return app


def shown(app: Celery, nodes: Any) -> Iterator[str]:
    """Yield all that is made of nodes to be shown, or the error, and all that led to it."""
    app.conf.redlock_nodes = nodes
    yield json.dumps(control.conf(SimpleNamespace(app=app)))
    yield from made_of(app, nodes)


def made_of(app: Celery, nodes: Any) -> Iterator[str]:
    """Yield the same without Celery's own look at the settings."""
    try:
        for address in parse_nodes(read_settings(app).nodes if nodes is None else nodes):
            yield f"{address.name} {identity(address)} {address!r} {address.unverified}"
        redlock = Redlock.from_app(app) if nodes is None else Redlock(nodes)
        yield f"{redlock!r} {redlock.nodes} {redlock.client!r} {redlock.client.addresses!r}"
        yield repr(read_settings(app))
        yield json.dumps(remote_control.settings_of(app))
    except ConfigurationError as error:
        cause: BaseException | None = error
        while cause is not None:
            yield f"{cause} {cause!r} {cause.args}"
            cause = cause.__cause__ or cause.__context__


@CASES
@given(url=st.sampled_from(REDIS + OTHERS), password=passwords, listed=st.booleans())
@example(url="postgresql://u:{}@h/d", password="8888/7777", listed=True)
@example(url="postgresql://u:{}@h/d", password="8888@7777", listed=True)
@example(url="postgresql://u:{}@h/d", password="8888%7777", listed=True)
@example(url="postgresql://u:{}@h/d", password="8888\x007777", listed=True)
@example(url="unix://u:{}@/run/r.sock", password="8888/7777", listed=True)
@example(url="unix://u:{}@/run/r.sock", password="8888?7777", listed=True)
@example(url="redis://u:{}@h:1/0", password="8888/1?7777", listed=True)
@example(url="redis://u:{}@h:1/0", password="8888,/7777", listed=False)
@example(url="redis://u:{}@[::1]:1/0", password="8888[7777", listed=True)
@example(url="redis://h:1/0?password={}", password="8888&qqqq=7777", listed=True)
@example(url="sentinel://u:{}@h:1,i:2/m", password="8888/1@7777", listed=True)
@example(url="redis://:8888@h:1/0?health_check_interval={}", password="7777", listed=True)
@example(url="etcd://u:{}@h:1,i:2", password="8888\u21007777", listed=True)
@example(url="etcd://u%3A{}%40h", password="qqqq", listed=True)
@example(url="postgresql://u%3A{}%40h/d", password="7000:7000/7000", listed=True)
@example(url="postgresql://u:{}%40h/d", password="7000/7000", listed=True)
@example(url="postgresql://u:{}@h/d", password="7000%8000:7000", listed=True)
@example(url="app:{}@h:1", password="8888,7777", listed=False)
@example(url="{}:x@h", password="qqqq", listed=True)
def test_password_in_a_url_is_shown_nowhere(
    app: Celery, url: str, password: str, listed: bool
) -> None:
    # One whose @ is quoted is quoted as a whole.
    whole = url.format(quote(password, "/:", errors="replace") if "%40" in url else password)
    text = " ".join(shown(app, [whole] if listed else whole))
    assert not seen(password, text), text


@pytest.mark.parametrize(
    "broker",
    [
        "redis://:8888;7777@h:1/0",
        "redis://:8888;qqqq:7777@h:1/0",
        "redis://:8888/1?7777@h:1/0",
        "rediss://:8888[7777@[::1]:1/0",
        "redis+socket://:8888/7777@/run/r.sock",
        "sentinel://:8888/7777@h:1;sentinel://:8888/7777@i:1",
        "sentinel://:8888\u21007777@h:1",
        "sentinel://:8888@7777@h:1;sentinel://:8888@7777@i:1",
    ],
)
def test_password_in_the_url_of_a_broker_that_is_the_node_is_shown_nowhere(broker: str) -> None:
    app = Celery("shop", broker=broker, set_as_current=False)
    app.conf.broker_transport_options = {"master_name": "m"}
    text = " ".join(made_of(app, None))
    assert not seen("8888 7777 qqqq", text), text


@pytest.mark.parametrize(
    "node",
    [
        {"host": "redis://:7777@h:1/0"},
        {"host": "u:7777@h", "port": 1},
        {"host": "h", "password": "7777", "pasword": "7777"},
        {"host": "h", "password": "7777", "port": "x"},
        ["7777"],
        redis.Redis("redis://:7777@h:1/0"),
        Sentinel([("h", 1)]).master_for("m", password="7777"),
    ],
    ids=["URL", "user", "typo", "port", "list", "client", "Sentinel"],
)
def test_password_in_a_client_or_a_mapping_is_shown_nowhere(app: Celery, node: Any) -> None:
    assert not seen("7777", " ".join(made_of(app, [node])))


def test_password_of_the_sentinels_is_not_in_the_error_if_none_answers(
    monkeypatch: Patch,
) -> None:
    """Some versions of redis-py put all arguments of their connections into it."""
    (node,) = parse_nodes(["sentinel://h:1/m?sentinel_password=7777"])

    def discover_master(_service: str) -> Any:
        raise MasterNotFoundError(f"No master found: {node.sentinel.sentinel_kwargs}")

    monkeypatch.setattr(node.sentinel, "discover_master", discover_master)
    with pytest.raises(MasterNotFoundError) as raised:
        node.connection()
    assert not seen("7777", f"{raised.value} {raised.value.__context__}")


def passwords_of(address: Any) -> list[str]:
    """Return what a node's connections and its Sentinels' are made with."""
    if address.store == "etcd":
        return [address.user[1]]
    of = [address, *getattr(address, "sentinels", ())]
    names = ("password", "username", "ssl_password", "sslpassword")
    return [one.arguments[name] for one in of for name in names if one.arguments.get(name)]


@settings(CASES, max_examples=40)
@given(
    url=st.sampled_from([one for one in REDIS + OTHERS if "%40" not in one and ",u:" not in one]),
    password=passwords.filter(str.isprintable),
)
def test_quoted_password_is_accepted_and_arrives_as_it_is(url: str, password: str) -> None:
    (address,) = parse_nodes([url.format(quote(password, safe=""))])
    assert password in passwords_of(address)
