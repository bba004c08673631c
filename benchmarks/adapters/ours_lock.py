"""Ours by `lock()`, as most use it: a lock object each time, whose lease is kept alive."""

from __future__ import annotations

from typing import Any

from child import Pair, serve

from celery_redlock import Redlock


def connect(urls: list[str]) -> Pair:
    redlock = Redlock(urls, ttl=10, restart_guard="off")

    def acquire(resource: str) -> Any:
        lock = redlock.lock(resource)
        lock.acquire()
        return lock

    return acquire, lambda resource, lock: lock.release()


serve("ours_lock", connect)
