"""The Celery application of `hot.py`: one hot key, and no-op tasks of other keys."""

from __future__ import annotations

import os
import time

from benchmarks.application import application
from benchmarks.processes import TTL
from celery_redlock import locked

app = application(
    "benchmarks.hot_app",
    redlock_ttl=TTL,
    redlock_parking=os.environ.get("BENCH_PARKING", "1") == "1",
)

_log = os.open(os.environ["BENCH_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def note(kind: str, begin: float) -> None:
    os.write(_log, f"{kind} {begin:.6f} {time.monotonic():.6f}\n".encode())


@app.task(name="hot")
@locked("hot")
def hot(seconds: float) -> None:
    begin = time.monotonic()
    time.sleep(seconds)
    note("hot", begin)


@app.task(name="other")
@locked("other:<number>")
def other(number: int) -> None:
    note("other", time.monotonic())
