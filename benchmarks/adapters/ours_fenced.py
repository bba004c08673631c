from __future__ import annotations

from child import Pair, serve

from celery_redlock import Redlock


def connect(urls: list[str]) -> Pair:
    # Servers that have just been started.
    redlock = Redlock(urls, ttl=10, fencing=True, restart_guard="off")
    return redlock.acquire, lambda resource, lease: redlock.release(lease)


serve("fenced", connect)
