from __future__ import annotations

from child import Extension, Pair, serve

from benchmarks.bare import BareLock
from benchmarks.bare_waiter import BareWaiter


def connect(urls: list[str]) -> Pair:
    lock = BareLock(urls)
    return (
        lambda resource: lock.acquire(resource.encode()),
        lambda resource, token: lock.release(resource.encode(), token),
    )


def waiting(urls: list[str]) -> Pair:
    waiter = BareWaiter(urls)
    return (
        lambda resource: waiter.wait(resource.encode(), 30.0),
        lambda resource, token: waiter.give(resource.encode(), token),
    )


def extending(urls: list[str], names: list[str]) -> Extension:
    lock = BareLock(urls, ttl=60.0)
    requests = []
    for name in names:
        token = lock.acquire(name.encode())
        assert token
        requests.append(lock.extend_request(name.encode(), token))
    lock.settle()
    return lambda: lock.extend_all(requests)


serve("bare", connect, waiting, extending=extending)
