"""The Celery application of `capacity.py`: tasks that cost a node different things."""

from __future__ import annotations

import os
import time

from benchmarks.application import application
from celery_redlock import locked

app = application(
    "benchmarks.capacity_app",
    redlock_restart_guard="off",
    redlock_node_timeout=3.0,  # on a busy machine, too
)

_log = os.open(os.environ["BENCH_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def note() -> None:
    os.write(_log, b".")


@app.task(name="locked")
@locked("locked:<number>")
def one(number: int) -> None:
    note()


@app.task(name="reserved")
@locked("reserved:<number>", scope="until_executed")
def reserved(number: int) -> None:
    note()


@app.task(name="paced")
@locked("paced:<number>", rate="10/s")
def paced(number: int) -> None:
    note()


@app.task(name="in_turn")
@locked("in_turn")
def in_turn(number: int) -> None:
    note()
    time.sleep(0.005)  # so that the others wait
