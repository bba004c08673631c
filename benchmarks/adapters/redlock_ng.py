from __future__ import annotations

from child import Pair, serve
from redlock import Redlock


def connect(urls: list[str]) -> Pair:
    redlock = Redlock(urls)
    return (
        lambda resource: redlock.acquire(resource, 10_000),
        lambda resource, lock: redlock.release(lock),
    )


def waiting(urls: list[str]) -> Pair:
    redlock = Redlock(urls)
    return (
        lambda resource: redlock.acquire(resource, 10_000, blocking=True),
        lambda resource, lock: redlock.release(lock),
    )


serve("redlock_ng", connect, waiting)
