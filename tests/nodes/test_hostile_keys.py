"""Keys of other programs under our names, names of any kind, forged leases: no lock suffers.

Other writers on the nodes can block a resource; its owner is reported, and the key never deleted.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import redis

from celery_redlock import ConfigurationError, LeaseLost, Redlock, ResourceHeld
from celery_redlock.config.checks import DAY, MIN_TTL
from celery_redlock.protocol.lease import Lease, drift
from celery_redlock.protocol.names import MAX_NAME_CHARS
from celery_redlock.protocol.values import Owner
from celery_redlock.server import LocalServer
from tests.support.wait import wait_until

KINDS: dict[str, Callable[[redis.Redis], object]] = {
    "string": lambda client: client.set("redlock:r", "theirs"),
    "empty string": lambda client: client.set("redlock:r", ""),
    "no text": lambda client: client.set("redlock:r", b"\xff\x00\xfe"),
    "list": lambda client: client.rpush("redlock:r", "theirs"),
    "hash": lambda client: client.hset("redlock:r", "field", "theirs"),
    "set": lambda client: client.sadd("redlock:r", "theirs"),
    "sorted set": lambda client: client.zadd("redlock:r", {"theirs": 1}),
    "stream": lambda client: client.xadd("redlock:r", {"theirs": 1}),
    "almost a token": lambda client: client.set("redlock:r", "a|b|c|d|e|f"),
    "the answer to a SET": lambda client: client.set("redlock:r", "OK"),
}


@pytest.fixture
def redlock(servers: list[LocalServer], lock_over: Callable[..., Redlock]) -> Redlock:
    return lock_over(servers[:3], ttl=5.0)


@pytest.fixture
def clients(servers: list[LocalServer]) -> Iterator[list[redis.Redis]]:
    """Yield a client for each of three nodes; replies are bytes."""
    with ExitStack() as stack:
        yield [stack.enter_context(redis.Redis(port=server.port)) for server in servers[:3]]


def foreign(
    clients: list[redis.Redis], kind: str, ttl: float | None = None
) -> Callable[[], list[bytes]]:
    """Make another program's key on some nodes; return its present contents."""
    for client in clients:
        KINDS[kind](client)
        if ttl is not None:
            client.pexpire("redlock:r", int(ttl * 1000))
    return lambda: [client.dump("redlock:r") for client in clients]


@pytest.mark.parametrize("kind", KINDS)
def test_foreign_key_without_a_ttl_holds_for_ever_and_the_error_says_where(
    kind: str, clients: list[redis.Redis], redlock: Redlock
) -> None:
    now = foreign(clients, kind)
    before = now()
    with pytest.raises(ResourceHeld) as raised:
        redlock.acquire("r")
    assert raised.value.permanent
    text = str(raised.value)
    assert "r is held forever, by another program's key" in text
    assert "the key redlock:r on 127.0.0.1:" in text
    assert "has no ttl" in text and "delete it" in text and "redlock_prefix" in text
    assert sum(node in text for node in redlock.nodes) >= 2
    assert redlock.try_acquire("r") is None
    assert now() == before
    holder = redlock.holder("r")
    assert holder is not None and holder.owner is None and holder.expires_in == float("inf")


@pytest.mark.parametrize("kind", ["string", "list"])
def test_foreign_key_with_a_ttl_holds_and_is_then_free(
    kind: str, clients: list[redis.Redis], redlock: Redlock
) -> None:
    foreign(clients, kind, ttl=1.0)
    with pytest.raises(ResourceHeld, match="another program's key") as raised:
        redlock.acquire("r")
    assert not raised.value.permanent
    assert "forever" not in str(raised.value)
    holder = redlock.holder("r")
    assert holder is not None and 0 < (holder.expires_in or 0) <= 1.0
    assert redlock.release(redlock.acquire("r", wait=5.0)) is True


def test_foreign_value_of_any_size_is_not_fetched(
    clients: list[redis.Redis], redlock: Redlock
) -> None:
    for client in clients:
        client.set("redlock:r", b"x" * 50_000_000)
    with pytest.raises(Exception, match=r"more than \d+ bytes"):
        redlock.acquire("r")
    assert redlock.release(redlock.acquire("other", wait=5.0)) is True
    for client in clients:
        assert client.strlen("redlock:r") == 50_000_000


# -- Names


def test_resource_name_too_long_for_a_key_is_refused_with_advice(redlock: Redlock) -> None:
    for length in (MAX_NAME_CHARS + 1, 1_000_000):
        with pytest.raises(ConfigurationError, match=f"has {length}: put a digest") as raised:
            redlock.acquire("x" * length)
        assert len(str(raised.value)) < 300


# -- Times


@pytest.mark.defaults
def test_every_valid_ttl_is_longer_than_twice_the_patience_and_drift(
    lock_over: Callable[..., Redlock],
) -> None:
    """TTL > 2 x (node timeout + drift): a node is never waited for longer than a tenth of it."""
    redlock = lock_over(["redis://127.0.0.1:1"], node_timeout=60.0)
    ttl = MIN_TTL
    while ttl <= DAY:
        assert ttl > 2 * (redlock.client.patience(ttl) + drift(ttl))
        ttl *= 1.1


@pytest.mark.parametrize(
    "ttl", [0, -1, MIN_TTL / 2, DAY + 1, 2.0**63, 1e308, float("inf"), float("nan"), "30", True]
)
def test_invalid_ttl_is_refused_before_anything_is_sent(ttl: float, redlock: Redlock) -> None:
    for refused in (
        lambda: Redlock(["redis://127.0.0.1:1"], ttl=ttl),
        lambda: redlock.acquire("r", ttl=ttl),
        lambda: redlock.lock("r", ttl=ttl).acquire(),
    ):
        with pytest.raises(ConfigurationError, match="ttl must be"):
            refused()
    assert redlock.holder("r") is None


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e300, -1e300, "60", True, None])
def test_invalid_time_to_keep_a_lock_is_refused(seconds: float, redlock: Redlock) -> None:
    with redlock.lock("r") as lease:
        with pytest.raises(ConfigurationError, match="a lock is kept for a number of seconds"):
            lease.keep(seconds)
        assert not lease.lost
        assert lease.keep(1e15) is True  # the longest


# -- Leases


def test_forged_lease_frees_and_extends_nothing(
    servers: list[LocalServer], redlock: Redlock, lock_over: Callable[..., Redlock]
) -> None:
    other = lock_over(servers[:3], ttl=5.0)
    lease = redlock.acquire("r")
    forged: list[Lease] = [
        dataclasses.replace(lease, token=Owner("host", 1).token("0" * 32)),
        dataclasses.replace(lease, token=lease.token[:-1]),
        dataclasses.replace(lease, token=""),
        dataclasses.replace(lease, token="*"),
    ]
    for forgery in forged:
        assert redlock.release(forgery) is False
        with pytest.raises(LeaseLost):
            redlock.extend(forgery)
    # Not even the true one, by an instance that did not acquire it; nor for another resource.
    assert other.release(lease) is False
    with pytest.raises(LeaseLost):
        other.extend(lease)
    victim = other.acquire("victim")
    assert redlock.release(dataclasses.replace(lease, resource="victim")) is True  # that is "r"
    assert other.extend(victim).remaining() > 0
    assert redlock.holder("r") is None
    assert other.release(victim) is True


def test_token_has_128_random_bits(redlock: Redlock) -> None:
    nonces = set()
    for _ in range(100):
        lease = redlock.acquire("r")
        nonces.add(lease.token.rpartition("|")[2])
        redlock.release(lease)
    assert len(nonces) == 100
    assert all(len(nonce) == 32 and int(nonce, 16) >= 0 for nonce in nonces)
    # Each of the bits is sometimes set and sometimes not: by chance wrong once in 10**27 runs.
    values = [int(nonce, 16) for nonce in nonces]
    for bit in range(128):
        assert len({value >> bit & 1 for value in values}) == 2


def test_forged_holder_cannot_write_into_the_log(
    clients: list[redis.Redis], redlock: Redlock, caplog: pytest.LogCaptureFixture
) -> None:
    """Any writer under our prefix chooses the host and the task that an operator reads."""
    caplog.set_level(logging.DEBUG)
    evil = "\x1b[2J\nCRITICAL all is well\u202e"
    for client in clients:
        client.set("redlock:r", Owner(evil, 1, evil, 0, evil).token("n"), px=5000)
    with pytest.raises(ResourceHeld) as raised:
        redlock.acquire("r")
    assert str(raised.value).isprintable()
    assert "\n" not in repr(raised.value.holder)
    wait_until(lambda: redlock.holder("r") is not None, 5, "it is held")
    assert all(record.getMessage().isprintable() for record in caplog.records)
