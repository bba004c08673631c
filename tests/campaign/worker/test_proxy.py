"""The network of the campaign does what its acts say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_redlock.server import LocalServer
from tests.support.network import REPLIES, REQUESTS, Link, Network
from tests.support.wait import wait_until


@pytest.fixture
def link(server: LocalServer) -> Iterator[Link]:
    with Network() as network:
        yield network.link(server.port, "seed")


@pytest.fixture
def client(link: Link) -> Iterator[redis.Redis]:
    with redis.Redis(port=link.port, socket_timeout=0.3, retry=Retry(NoBackoff(), 0)) as one:
        yield one


@pytest.fixture
def direct(server: LocalServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as one:
        yield one


def test_cut_request_is_late_and_not_lost(
    link: Link, client: redis.Redis, direct: redis.Redis
) -> None:
    client.ping()
    link.held = {REQUESTS}
    with pytest.raises(redis.TimeoutError):
        client.set("k", "late")  # and the client gives up, and closes
    assert direct.get("k") is None
    link.heal()
    wait_until(lambda: direct.get("k") == b"late", 10.0, "the request has arrived")


@pytest.mark.parametrize(
    ("what", "value", "error"),
    [("held", {REPLIES}, redis.TimeoutError), ("breaks", 1, redis.ConnectionError)],
)
def test_reply_cut_or_broken_off_leaves_its_request_done(
    link: Link, client: redis.Redis, direct: redis.Redis, what: str, value: Any, error: Any
) -> None:
    client.ping()
    setattr(link, what, value)
    with pytest.raises(error):
        client.set("k", "done")
    assert direct.get("k") == b"done"
    if what == "held":
        link.heal()  # the other breaks off once
    assert client.get("k") == b"done"
