from __future__ import annotations

from child import Pair, serve
from redlock import Redlock


def connect(urls: list[str]) -> Pair:
    redlock = Redlock(urls)
    return (
        lambda resource: redlock.lock(resource, 10_000),
        lambda resource, lock: redlock.unlock(lock),
    )


def waiting(urls: list[str]) -> Pair:
    redlock = Redlock(urls, retry_count=150)  # of 0.2 s each
    return (
        lambda resource: redlock.lock(resource, 10_000),
        lambda resource, lock: redlock.unlock(lock),
    )


serve("redlock_py", connect, waiting)
