from __future__ import annotations

from child import Pair, serve

from celery_redlock import Redlock


def connect(urls: list[str]) -> Pair:
    redlock = Redlock(urls, ttl=10, restart_guard="off")  # servers that have just been started
    return redlock.acquire, lambda resource, lease: redlock.release(lease)


serve("ours", connect)
