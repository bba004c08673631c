"""What `import celery_redlock` adds to a program that has imported celery and redis."""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median

from benchmarks.environments import CACHE, ROOT
from benchmarks.stats import table

# `import celery` alone is lazy and loads next to nothing: a program with an app has loaded more.
BEFORE = {
    "import celery, redis": "import celery, redis",
    "from celery import Celery; import redis": "from celery import Celery; import redis; Celery",
}


def measure(times: int) -> dict[str, float]:
    """Return the median time in seconds by what was imported before.

    With compiled bytecode, as an installed package has it; the first import makes it.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(CACHE / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    seconds: dict[str, list[float]] = {name: [] for name in BEFORE}
    for number in range(times + 1):
        for name, before in BEFORE.items():
            code = f"""
import time
{before}
start = time.perf_counter()
import celery_redlock
print(time.perf_counter() - start)
"""
            run = subprocess.run(
                [sys.executable, "-c", code],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                check=True,
            )
            if number:
                seconds[name].append(float(run.stdout))
    return {name: median(values) for name, values in seconds.items()}


def show(figures: dict[str, float]) -> str:
    rows = [[name, f"{seconds * 1000:.1f}", "<= 15"] for name, seconds in figures.items()]
    return table(["import celery_redlock, after", "ms", "target"], rows)
