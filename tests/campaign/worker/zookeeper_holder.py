"""A process of the ZooKeeper campaign: it takes locks, and writes when it relied on them.

A line is `begin NAME FENCE`, `end NAME UNTIL`, with the clock that leases are counted by in front.
UNTIL is the time until which the body relied on the lock. SIGUSR1 ends the session on the server.
"""

from __future__ import annotations

import logging
import random
import signal
import sys
import threading
from functools import partial
from typing import Any, TextIO

from kazoo.client import KazooClient

from celery_redlock import HeldLease, NotAcquired, Redlock
from celery_redlock.runtime.clock import monotonic

LONGEST_S = 2.0


def expire(redlock: Redlock, log: TextIO) -> None:
    """Close the session from another connection.

    The server ends it before its time, so what the body relied on until it notices is no fault.
    """
    connection = redlock.client.driver.nodes[0].connection
    client: Any = connection and connection.store._client
    if client is None or client.client_id is None:
        return
    hosts = ",".join(f"{host}:{port}" for host, port in client.hosts)
    thief = KazooClient(hosts=hosts, client_id=client.client_id, timeout=10.0)
    try:
        thief.start(3.0)
        log.write(f"{monotonic():.6f} ended x\n")
    except Exception:
        return
    finally:
        thief.stop()
        thief.close()


def rely(held: HeldLease, name: str, seconds: float, log: TextIO) -> None:
    """Rely on a lock for some seconds, or until it is lost, and write so."""
    pause = threading.Event()
    until = min(monotonic(), held.lease.deadline)
    log.write(f"{until:.6f} begin {name} {held.fencing_token}\n")
    end = monotonic() + seconds
    try:
        while monotonic() < end and not held.lost:
            pause.wait(0.01)
            deadline = held.lease.deadline  # before the time: a stop may come between
            until = max(until, min(monotonic(), deadline))
    finally:
        log.write(f"{monotonic():.6f} end {name} {until:.6f}\n")


def main() -> None:
    """Take and release locks until the process is ended."""
    url, path, seed = sys.argv[1:]
    logging.basicConfig(level=logging.CRITICAL)
    choose, redlock = random.Random(seed), Redlock([url])
    pause = threading.Event()
    with open(path, "a", buffering=1) as log:
        ending = partial(threading.Thread, target=expire, args=[redlock, log])
        signal.signal(signal.SIGUSR1, lambda *_: ending().start())
        while True:
            name = choose.choice(("a", "b", "c"))
            try:
                with redlock.lock(name, wait=1.0, fencing=True) as held:
                    rely(held, name, choose.uniform(0.0, LONGEST_S), log)
            except NotAcquired:
                pass
            except Exception as error:
                log.write(f"{monotonic():.6f} error {type(error).__name__} {error}\n")
            pause.wait(choose.uniform(0.0, 0.05))


if __name__ == "__main__":
    main()
