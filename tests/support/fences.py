"""Fencing tokens on the nodes, and clients whose clocks differ."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import redis

from celery_redlock import Redlock

HOUR = 3600 * 1_000_000


class Skewed(Redlock):
    """A client whose wall clock is off."""

    skew = 0

    def __init__(self, nodes: list[str], ttl: float) -> None:
        super().__init__(nodes, ttl=ttl)
        right = self.client.wall
        self.client.wall = lambda: right() + self.skew  # type: ignore[method-assign]


@contextlib.contextmanager
def skewed(nodes: Iterable[Any], skew: int) -> Iterator[Skewed]:
    """A client of servers whose wall clock is so many microseconds ahead."""
    with contextlib.closing(Skewed([node.url for node in nodes], ttl=5.0)) as client:
        client.skew = skew
        yield client


def fences(admins: list[redis.Redis]) -> list[int]:
    return [int(admin.get("redlock:r#fence") or 0) for admin in admins]


def take(client: Redlock) -> int:
    lease = client.acquire("r", wait=2.0, fencing=True)
    assert client.release(lease)
    assert lease.fencing_token is not None
    return lease.fencing_token
