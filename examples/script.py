"""The lock without Celery: for cron jobs, scripts, consoles.

python script.py        # with a Redis on this machine; for more than one see orders.py
"""

from __future__ import annotations

import os
import threading

from celery_redlock import NotAcquired, Redlock, ResourceHeld

nodes = os.environ.get("REDLOCK_NODES", "redis://localhost:6379/1").split(",")
redlock = Redlock(nodes, ttl=5.0)


def block() -> None:
    """Lock a block, the usual way: extended while the block runs, and freed when it ends."""
    with redlock.lock("stock", wait=2.0) as lease:  # wait for it up to 2 seconds
        print(f"block: ours for {lease.remaining():.0f} s and more")
        lease.ensure()  # right before a write; raises LeaseLost if the lock is lost


def by_hand() -> None:
    """Lock step by step: nothing is extended automatically."""
    lease = redlock.try_acquire("stock")
    if lease is None:
        print("by hand: somebody has it")
        return
    try:
        print(f"by hand: {redlock.holder('stock')}")
        longer = redlock.extend(lease)  # a new lease; the old one does not change
        print(f"by hand: extended: {longer.deadline > lease.deadline}")
        print(f"by hand: a second one gets {redlock.try_acquire('stock')}")
    finally:
        print(f"by hand: held to the end: {redlock.release(lease)}")
    print(f"by hand: now held by {redlock.holder('stock')}")


def contest() -> None:
    """Let one thread wait for another's lock, and a third attempt fail without waiting."""
    has_it, may_go = threading.Event(), threading.Event()

    def slow() -> None:
        with redlock.lock("stock"):
            has_it.set()
            may_go.wait(10)

    thread = threading.Thread(target=slow)
    thread.start()
    has_it.wait(10)
    try:
        redlock.acquire("stock")
    except ResourceHeld as refusal:
        print(f"contest: refused, it is held by {refusal.holder}")
    threading.Timer(0.3, may_go.set).start()
    with redlock.lock("stock", wait=5.0):  # woken by the release, not by polling
        print("contest: had it after the other")
    thread.join()


if __name__ == "__main__":
    try:
        block()
        by_hand()
        contest()
    except NotAcquired as refusal:  # held by another, or too few nodes answered
        raise SystemExit(f"no lock: {refusal}") from None
