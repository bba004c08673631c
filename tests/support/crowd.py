"""A crowd of threads on one key with a limit."""

from __future__ import annotations

import threading
from collections.abc import Callable

from celery_redlock import Redlock
from tests.support.wait import wait_until


def at_most_three_are_inside(make: Callable[[], Redlock], *, threads: int, times: int) -> None:
    """Have threads, each with a lock of its own, enter so many times; never four of them at once.

    And three at once at some time: each waits inside for that.
    """
    inside, most, entered = 0, 0, 0
    counting = threading.Lock()

    def three() -> bool:
        return most == 3

    def work() -> None:
        nonlocal inside, most, entered
        redlock = make()
        for _ in range(times):
            with redlock.lock("pool", limit=3, wait=30.0) as lease:
                assert lease.resource == "pool"
                with counting:
                    inside, entered = inside + 1, entered + 1
                    most = max(most, inside)
                wait_until(three, 30.0, "three are inside")
                with counting:
                    inside -= 1

    crowd = [threading.Thread(target=work) for _ in range(threads)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    assert (most, entered, inside) == (3, threads * times, 0)
