"""One publisher, in a process (and for a peer an environment) of its own: see `publishing.py`.

Publishes the same no-op task plainly and under a reservation, in turns, and prints the rates. No
worker takes the messages; between two turns they are deleted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import redis
from celery import Celery


def work(number: int) -> None:
    """No worker runs it."""


def ours(app: Celery, guard: str = "auto") -> Any:
    from celery_redlock import SingletonTask

    app.conf.update(
        redlock_nodes=os.environ["BENCH_NODES"].split(),
        redlock_ttl=10.0,  # of `processes.py`; a peer's environment has not what that imports
        redlock_restart_guard=guard,
    )
    return app.task(base=SingletonTask, name=f"reserved-{guard}", lock_scope="until_executing",
                    lock_key="{number}")(work)  # fmt: skip


def unguarded(app: Celery) -> Any:
    return ours(app, "off")


def bare(app: Celery, writes: int = 1) -> Any:
    from benchmarks.bare import BareLock

    ttl = 3600.0 if writes == 1 else 10.0
    plain, lock = app.tasks["plain"], BareLock(os.environ["BENCH_NODES"].split(), ttl)

    class Reserved:
        def delay(self, number: int) -> None:
            name = b"reserved-%d:%d" % (ttl, number)
            token = lock.acquire(name)
            assert token
            plain.delay(number)
            if writes == 2:
                lock.extend_unheard(name, token)

    return Reserved()


def twice(app: Celery) -> Any:
    return bare(app, writes=2)


def once(app: Celery) -> Any:
    from celery_once import QueueOnce

    url = os.environ["BENCH_NODES"].split()[0]
    app.conf.ONCE = {
        "backend": "celery_once.backends.Redis",
        "settings": {"url": url, "default_timeout": 3600},
    }
    return app.task(base=QueueOnce, name="reserved")(work)


def singleton(app: Celery) -> Any:
    from celery_singleton import Singleton

    app.conf.singleton_backend_url = os.environ["BENCH_NODES"].split()[0]
    return app.task(base=Singleton, name="reserved")(work)


def main(kind: str, rounds: int, size: int) -> None:
    app = Celery("publisher", broker=os.environ["BENCH_BROKER"])
    app.conf.update(task_ignore_result=True, task_default_queue=f"publisher-{kind}")
    tasks = {"plain": app.task(name="plain")(work), "reserved": globals()[kind](app)}
    app.finalize()
    client = redis.Redis.from_url(os.environ["BENCH_BROKER"])
    rates: dict[str, list[float]] = {name: [] for name in tasks}
    number = 0
    for turn in range(rounds + 1):  # the first is for warming up
        for name in sorted(tasks, reverse=bool(turn % 2)):
            task = tasks[name]
            start = time.perf_counter()
            for _ in range(size):
                number += 1
                task.delay(number)
            if turn:
                rates[name].append(size / (time.perf_counter() - start))
            client.delete(f"publisher-{kind}")
    print(json.dumps(rates))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
