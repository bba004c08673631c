"""Fencing tokens where one of five nodes lies upwards, and where clocks are days apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import redis

from celery_redlock import QuorumUnavailable, Redlock
from celery_redlock.protocol.lease import FENCE_LIMIT
from celery_redlock.protocol.quorum import FENCE_AHEAD
from celery_redlock.protocol.values import Vote
from celery_redlock.server import LocalServer
from tests.support.fences import HOUR, Skewed, fences, skewed, take
from tests.support.wait import wait_until
from tests.tools.cli.clinic import Forger

KEY = "redlock:r#fence"


class Liar(Forger):
    """A proxy in front of a node that reports another number than the node has stored."""

    def __init__(self, port: int) -> None:
        self.lie: Callable[[int], int] = int
        super().__init__(port, rb":\d{16}\r\n", lambda said: b":%d\r\n" % self.lie(int(said[1:-2])))


@pytest.fixture
def liar(servers: list[LocalServer]) -> Iterator[Liar]:
    with Liar(servers[0].port) as one:
        yield one


@pytest.fixture
def client(servers: list[LocalServer], liar: Liar) -> Iterator[Callable[..., Skewed]]:
    """Makes clients of five nodes, the first of which may lie."""
    with ExitStack() as stack:
        yield lambda skew=0: stack.enter_context(skewed([liar, *servers[1:]], skew))


def wall() -> int:
    return time.time_ns() // 1000


@pytest.mark.parametrize("number", [FENCE_LIMIT, FENCE_LIMIT - 1, 4 * 10**15])
def test_node_that_answers_the_largest_fencing_number_poisons_no_client(
    client: Callable[..., Skewed], liar: Liar, admins: list[redis.Redis], number: int
) -> None:
    one, two = client(), client()
    tokens = [take(one)]
    liar.lie = lambda _said: number
    for _ in range(3):
        tokens += [take(one), take(two)]
    liar.lie = int  # it is replaced
    tokens += [take(two), take(one)]
    assert tokens == sorted(set(tokens))
    assert max(fences(admins)) < wall()


def test_node_that_answers_the_largest_allowed_number_gains_one_day_at_most(
    client: Callable[..., Skewed], liar: Liar, admins: list[redis.Redis]
) -> None:
    """The clock is the bound. If the last token were, each grant would add another day."""
    one, two = client(), client()
    liar.lie = lambda said: said + FENCE_AHEAD // 2
    tokens: list[int] = []

    def believed() -> bool:  # where its answer is among the first three
        tokens.append(take(one))
        return max(fences(admins)) > wall()

    wait_until(believed, 20.0, "its number is taken")
    tokens += [take(client) for _ in range(5) for client in (two, one)]
    liar.lie = int
    tokens.append(take(two))
    assert tokens == sorted(set(tokens))
    assert wall() < max(fences(admins)) < wall() + FENCE_AHEAD


def test_fencing_number_poisoned_before_is_reported_and_not_kept_longer(
    client: Callable[..., Skewed], admins: list[redis.Redis]
) -> None:
    one = client()
    for admin in admins[1:3]:
        admin.set(KEY, wall() + FENCE_AHEAD + 5 * HOUR, px=70_000)
    assert take(one) < wall()  # a minority costs nothing
    admins[3].set(KEY, FENCE_LIMIT - 1, px=70_000)
    with pytest.raises(QuorumUnavailable) as refusal:
        one.acquire("r", fencing=True)
    votes = refusal.value.votes
    assert [vote.vote for vote in votes][1:4] == [Vote.SILENT] * 3
    for vote in votes[1:4]:
        assert "more than a day ahead of the clock here; see docs/fencing.md" in vote.detail
    for admin in admins[1:4]:
        assert 0 < admin.pttl(KEY) <= 70_000
        wait_until(lambda a=admin: not a.exists("redlock:r"), 2, "nothing of ours is there")


def test_clocks_almost_a_day_apart_still_get_growing_fencing_tokens(
    client: Callable[..., Skewed],
) -> None:
    slow, fast = client(-11 * HOUR), client(12 * HOUR)
    tokens = [take(one) for one in (slow, fast, slow, slow, fast, slow)]
    assert tokens == sorted(set(tokens))


def test_clock_more_than_a_day_behind_gets_no_fencing_token_and_no_smaller_one(
    client: Callable[..., Skewed],
) -> None:
    slow, fast = client(-13 * HOUR), client(12 * HOUR)
    tokens = [take(slow), take(fast)]
    with pytest.raises(QuorumUnavailable, match="more than a day ahead of the clock here"):
        slow.acquire("r", fencing=True)
    slow.release(slow.acquire("r"))  # it is the token that it cannot have, not the lock
    slow.skew = 0  # it is set right
    tokens += [take(slow), take(fast)]
    assert tokens == sorted(set(tokens))


def test_clock_that_steps_back_by_more_than_a_day_continues_its_own_tokens(
    client: Callable[..., Redlock],
) -> None:
    one = client(30 * HOUR)
    tokens = [take(one)]
    one.skew = 0
    tokens += [take(one), take(one)]
    assert tokens == sorted(set(tokens))
