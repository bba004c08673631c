from __future__ import annotations

from child import Pair, serve

from benchmarks.bare import BareLock


def connect(urls: list[str]) -> Pair:
    lock = BareLock(urls)
    return (
        lambda resource: lock.acquire(resource.encode()),
        lambda resource, token: lock.release(resource.encode(), token),
    )


serve("bare", connect)
