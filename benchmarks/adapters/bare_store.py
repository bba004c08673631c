from __future__ import annotations

from typing import Any

from child import Extension, Pair, serve

from benchmarks.bare_etcd import BareEtcd
from benchmarks.bare_postgresql import BarePostgres


def lock_at(urls: list[str], ttl: float = 10.0) -> Any:
    (url,) = urls
    if url.startswith("zookeeper"):
        from benchmarks.bare_zookeeper import BareZooKeeper  # its client may be missing

        return BareZooKeeper(url, ttl)
    return (BareEtcd if url.startswith("etcd") else BarePostgres)(url, ttl)


def connect(urls: list[str]) -> Pair:
    lock = lock_at(urls)
    return lock.acquire, lock.release


def waiting(urls: list[str]) -> Pair:
    lock = lock_at(urls)
    return lambda resource: lock.wait(resource, 30.0), lock.give


def extending(urls: list[str], names: list[str]) -> Extension:
    lock = lock_at(urls, ttl=60.0)
    held = {name: lock.acquire(name) or "" for name in names}
    return lambda: lock.extend(held)


serve("bare", connect, waiting, extending=extending)
