"""Fencing tokens on the nodes, and clients whose clocks differ."""

from __future__ import annotations

import redis

from celery_redlock import (
    Redlock,
)

HOUR = 3600 * 1_000_000


class Skewed(Redlock):
    """A client whose wall clock is off."""

    skew = 0

    def __init__(self, nodes: list[str], ttl: float) -> None:
        super().__init__(nodes, ttl=ttl)
        right = self.client.wall
        self.client.wall = lambda: right() + self.skew  # type: ignore[method-assign]


def fences(admins: list[redis.Redis]) -> list[int]:
    return [int(admin.get("redlock:r#fence") or 0) for admin in admins]


def take(client: Redlock) -> int:
    lease = client.acquire("r", wait=2.0, fencing=True)
    assert client.release(lease)
    assert lease.fencing_token is not None
    return lease.fencing_token
