"""The Celery application of `celery_rate.py`: the same no-op task plain and under two locks."""

from __future__ import annotations

import mmap
import os
import struct
from functools import cache

from billiard import current_process

from benchmarks.application import application
from benchmarks.bare import BareLock
from benchmarks.processes import TTL
from celery_redlock import locked

NODES = os.environ["BENCH_NODES"].split()

app = application(
    "benchmarks",
    redlock_ttl=TTL,
    redlock_restart_guard=os.environ.get("BENCH_GUARD", "auto"),
)


class Counter:
    """A count of the bodies that have run, for another process to read without a system call.

    A file mapped by all: each pool child adds in a slot of its own, the reader adds the slots.
    """

    SLOTS = 8

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * self.SLOTS)

    def add(self, slot: int) -> None:
        count = struct.unpack_from("q", self._map, 8 * slot)[0]
        struct.pack_into("q", self._map, 8 * slot, count + 1)

    def total(self) -> int:
        return sum(struct.unpack_from(f"{self.SLOTS}q", self._map))


@cache
def counter() -> Counter:
    return Counter(os.environ["BENCH_COUNTER"])


@cache
def bare_lock(pid: int) -> BareLock:
    return BareLock(NODES)


def count() -> None:
    counter().add(current_process().index)


@app.task(name="plain")
def plain(number: int) -> None:
    count()


@app.task(name="bare")
def bare(number: int) -> None:
    resource = b"bench:%d" % number
    lock = bare_lock(os.getpid())
    token = lock.acquire(resource)
    assert token
    try:
        count()
    finally:
        lock.release(resource, token)


@app.task(name="ours")
@locked("bench:<number>")
def ours(number: int) -> None:
    count()
