from __future__ import annotations

from child import Pair, serve

from benchmarks.connloop import ConnectionLock


def connect(urls: list[str]) -> Pair:
    lock = ConnectionLock(urls)
    return (
        lambda resource: lock.acquire(resource.encode()),
        lambda resource, token: lock.release(resource.encode(), token),
    )


serve("connloop", connect)
