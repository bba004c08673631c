from __future__ import annotations

from typing import Any

from child import Extension, Pair, serve

from celery_redlock import Redlock
from celery_redlock.events import Listener, subscribe
from celery_redlock.protocol.errors import NotAcquired

counts = {"attempts": 0, "split": 0}


class Counter(Listener):
    """Counts the attempts, and those that failed though nobody else had a quorum."""

    def acquired(self, lease: object) -> None:
        counts["attempts"] += 1

    def held(self, resource: str, holder: Any) -> None:
        counts["attempts"] += 1
        counts["split"] += holder is None or holder.nodes < holder.quorum


def connect(urls: list[str]) -> Pair:
    redlock = Redlock(urls, ttl=10, restart_guard="off")  # servers that have just been started
    return redlock.acquire, lambda resource, lease: redlock.release(lease)


def waiting(urls: list[str]) -> Pair:
    redlock = Redlock(urls, ttl=10, restart_guard="off")

    def acquire(resource: str) -> Any:
        lock = redlock.lock(resource, wait=30)
        try:
            lock.acquire()
        except NotAcquired:
            return None
        return lock

    redlock.connect()
    subscribe(Counter())
    return acquire, lambda resource, lock: lock.release()


def extending(urls: list[str], names: list[str]) -> Extension:
    redlock = Redlock(urls, ttl=20, restart_guard="off")  # ZooKeeper keeps none longer
    leases = [redlock.acquire(name) for name in names]
    claims = [redlock.client.claims[lease.token] for lease in leases if lease]

    def extend() -> int:
        """As the watchdog does."""
        ballots = redlock.client.driver.extend(claims, 1.0)
        return sum(len(ballot.confirmed()) for ballot in ballots)

    return extend


def counted() -> dict[str, int]:
    told = dict(counts)
    counts.update(attempts=0, split=0)
    return told


serve("ours", connect, waiting, counted, extending)
