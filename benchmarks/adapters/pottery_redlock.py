from __future__ import annotations

from typing import Any

from child import Pair, serve
from pottery import Redlock
from redis import Redis


def connect(urls: list[str]) -> Pair:
    masters = {Redis.from_url(url) for url in urls}

    def acquire(resource: str) -> Any:
        # The key is the object's, so that a lock a task needs an object a task.
        lock = Redlock(key=resource, masters=masters, auto_release_time=10)
        return lock if lock.acquire(blocking=False) else None

    return acquire, lambda resource, lock: lock.release()


def waiting(urls: list[str]) -> Pair:
    masters = {Redis.from_url(url) for url in urls}

    def acquire(resource: str) -> Any:
        lock = Redlock(key=resource, masters=masters, auto_release_time=10)
        return lock if lock.acquire(timeout=30) else None

    return acquire, lambda resource, lock: lock.release()


serve("pottery", connect, waiting)
