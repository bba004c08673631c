"""Fencing tokens over real nodes: they grow, whichever client asks, whatever the clocks show."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import redis

from celery_redlock import (
    current_lease,
)
from celery_redlock.protocol import quorum
from celery_redlock.protocol.round import Round
from tests.support.fences import HOUR, Skewed, fences, skewed, take
from tests.support.names import Patch, Servers
from tests.support.wait import wait_until


@pytest.fixture
def clients(servers: Servers) -> Iterator[list[Skewed]]:
    """Three programs: one an hour late, one right, one an hour early."""
    with ExitStack() as stack:
        yield [stack.enter_context(skewed(servers, skew)) for skew in (-HOUR, 0, HOUR)]


def test_fencing_tokens_grow_whoever_asks_and_whatever_the_clock_is(clients: list[Skewed]) -> None:
    turns = [clients[turn] for turn in (1, 0, 2, 0, 1, 1, 2, 0, 0, 1)]
    tokens = [take(client) for client in turns]
    assert tokens == sorted(set(tokens))
    assert tokens[0] == pytest.approx(time.time() * 1e6, abs=60e6)


def test_granted_fencing_token_is_known_to_a_quorum(
    clients: list[Skewed], admins: list[redis.Redis]
) -> None:
    ahead = time.time_ns() // 1000 + HOUR
    for number in range(5):  # all different: what failed attempts of others leave behind
        for node, admin in enumerate(admins):
            admin.set("redlock:r#fence", ahead + (node * 7 + number * 3) % 5 * 10 + number * 100)
        lease = clients[number % 2].acquire("r", fencing=True)
        assert lease.fencing_token is not None
        assert sum(known >= lease.fencing_token for known in fences(admins)) >= 3
        assert clients[number % 2].release(lease)


def test_fencing_tokens_grow_though_one_node_after_the_other_forgets(
    clients: list[Skewed], admins: list[redis.Redis]
) -> None:
    clients[0].skew = clients[2].skew = 0  # where nodes forget, clocks must agree
    tokens = []
    for number in range(15):
        tokens.append(take(clients[number % 3]))
        for node in (number, number + 2):
            admins[node % 5].flushall()
    assert tokens == sorted(set(tokens))


def test_fenced_attempt_interrupted_between_its_rounds_is_undone(
    clients: list[Skewed], admins: list[redis.Redis], monkeypatch: Patch
) -> None:
    def strike(ballot: Round) -> bool:
        raise TimeoutError("a soft time limit")

    monkeypatch.setattr(quorum, "_fence", strike)
    with pytest.raises(TimeoutError):
        clients[1].acquire("r", fencing=True)
    with pytest.raises(TimeoutError), clients[1].lock("r", fencing=True):
        raise AssertionError("it was granted")
    monkeypatch.undo()
    wait_until(lambda: clients[1].holder("r") is None, 2, "it is undone everywhere")
    assert not any(admin.exists("redlock:r") for admin in admins)


def test_fencing_token_stays_through_extensions_and_in_nested_blocks(clients: list[Skewed]) -> None:
    lease = clients[1].acquire("r", fencing=True)
    assert clients[1].extend(lease).fencing_token == lease.fencing_token
    assert clients[1].release(lease)
    with clients[1].lock("r", ttl=1.0, fencing=True) as outer:
        first = outer.fencing_token
        assert first is not None and first > (lease.fencing_token or 0)
        with clients[1].lock("r", fencing=True) as inner:
            assert inner.fencing_token == current_lease().fencing_token == first
        end = outer.lease.deadline
        wait_until(lambda: outer.lease.deadline > end + 0.3, 5, "it has been extended")
        assert outer.fencing_token == first and not outer.lost
