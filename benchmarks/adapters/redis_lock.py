"""redis-py's own Lock. It knows one node: it gets the first."""

from __future__ import annotations

from typing import Any

from child import Pair, serve
from redis import Redis


def connect(urls: list[str]) -> Pair:
    client = Redis.from_url(urls[0])

    def acquire(resource: str) -> Any:
        lock = client.lock(resource, timeout=10)  # an object a key
        return lock if lock.acquire(blocking=False) else None

    return acquire, lambda resource, lock: lock.release()


def waiting(urls: list[str]) -> Pair:
    client = Redis.from_url(urls[0])

    def acquire(resource: str) -> Any:
        lock = client.lock(resource, timeout=10)
        return lock if lock.acquire(blocking_timeout=30) else None

    return acquire, lambda resource, lock: lock.release()


serve("redis_lock", connect, waiting)
