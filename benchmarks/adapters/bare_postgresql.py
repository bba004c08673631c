from __future__ import annotations

from child import Extension, Pair, serve

from benchmarks.bare_postgresql import BarePostgres


def connect(urls: list[str]) -> Pair:
    lock = BarePostgres(urls[0])
    return lock.acquire, lock.release


def waiting(urls: list[str]) -> Pair:
    lock = BarePostgres(urls[0])
    return lambda resource: lock.wait(resource, 30.0), lock.give


def extending(urls: list[str], names: list[str]) -> Extension:
    lock = BarePostgres(urls[0], ttl=60.0)
    held = {name: lock.acquire(name) or "" for name in names}
    return lambda: lock.extend(held)


serve("bare", connect, waiting, extending=extending)
