"""What loading this library adds to a program: importing it, and declaring one task with it."""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median

from benchmarks.environments import CACHE, ROOT
from benchmarks.stats import table

PRODUCER = """
from celery import Celery
app = Celery("producer", broker="redis://127.0.0.1:6379/0")
app.connection_for_write().transport, app.conf.task_default_queue
"""
PLAIN = """
@app.task
def work(number): ...
work.name
"""
SINGLETON = """
from celery_redlock import SingletonTask
app.conf.redlock_nodes = [f"redis://127.0.0.1:{port}/0" for port in range(6380, 6385)]
@app.task(base=SingletonTask, lock_key="{number}")
def work(number): ...
work.name
"""
# `import celery` alone is lazy and loads next to nothing: a program with an app has loaded more.
PROGRAMS = {
    "import celery, redis": ("import celery, redis", "", "import celery_redlock"),
    "from celery import Celery; import redis": (
        "from celery import Celery; import redis; Celery", "", "import celery_redlock"
    ),
    "a producer declares a SingletonTask": (PRODUCER, PLAIN, SINGLETON),
}  # fmt: skip
"""What is loaded before; then without this library, and with it."""


def measure(times: int) -> dict[str, float]:
    """Return the median of the seconds of CPU it adds, by program.

    With compiled bytecode, as an installed package has it; the first import makes it. Loading is
    nothing but computing, so what else the machine does is not counted. Garbage is collected
    before: a full collection walks all that Celery has loaded, which takes longer than to load
    this, and would fall to whichever import happens to be the one after which it is due.
    """
    added: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for number in range(times + 1):
        for name, (before, without, with_it) in PROGRAMS.items():
            seconds = _seconds(before, with_it) - _seconds(before, without)
            if number:
                added[name].append(seconds)
    return {name: median(values) for name, values in added.items()}


def _seconds(before: str, code: str) -> float:
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(CACHE / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    parts = [
        "import gc, time", before, "gc.collect()", "start = time.process_time()", code,
        "print(time.process_time() - start)",
    ]  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(parts)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    return float(run.stdout)


def show(figures: dict[str, float]) -> str:
    rows = [[name, f"{seconds * 1000:.1f}"] for name, seconds in figures.items()]
    return table(["celery_redlock adds to", "ms"], rows)
