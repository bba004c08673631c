"""Celery no-op tasks per second: a real prefork worker with two children, a real broker.

Run by `__main__.py` as a process of its own (`python -m benchmarks.celery_rate`), since the
application reads its servers from the environment when it is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from random import Random
from statistics import median
from typing import Any

from benchmarks.environments import CACHE, ROOT
from benchmarks.stats import table

LABELS = {"plain": "plain task", "bare": "bare limit around it", "ours": "@locked"}


@contextlib.contextmanager
def _worker(name: str) -> Iterator[None]:
    command = [sys.executable, "-m", "celery", "-A", "benchmarks.celery_app", "worker"]
    command += ["-P", "prefork", "-c", "2", "-l", "WARNING", "-n", "bench@localhost"]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    log = CACHE / "log" / f"worker-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.terminate()
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _until(condition: Any, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {seconds} s; see {CACHE / 'log'}")
        time.sleep(0.001)


def _round(name: str, queue: str, size: int) -> float:
    """Return tasks per second, from the first body that ran to the last.

    The messages wait in a queue of their own before the worker hears of it, so that publishing
    them takes nothing from working them off.
    """
    from benchmarks.celery_app import app, counter

    task = app.tasks[name]
    with app.producer_pool.acquire(block=True) as producer:
        for number in range(size):
            task.apply_async((number,), queue=queue, producer=producer)
    before = counter().total()
    app.control.add_consumer(queue, reply=True, timeout=5.0, limit=1)
    _until(lambda: counter().total() > before, 20, f"first task of {queue}")
    first, start = counter().total(), time.monotonic()
    _until(lambda: counter().total() >= before + size, 60, f"{size} tasks of {queue}")
    rate = (before + size - first) / (time.monotonic() - start)
    app.control.cancel_consumer(queue, reply=True, timeout=5.0, limit=1)
    return rate


def measure(names: Sequence[str], rounds: int, size: int) -> dict[str, Any]:
    """Return the median rates, and the ratios of `ours` to the others round by round."""
    from benchmarks.celery_app import app

    order = Random(1)
    rates: dict[str, list[float]] = {name: [] for name in names}
    with _worker(f"{len(os.environ['BENCH_NODES'].split())}-nodes"):
        _until(lambda: app.control.ping(timeout=0.5), 20, "the worker")
        for name in names:
            _round(name, f"warm-up-{name}", 100)
        for number in range(rounds):
            for name in order.sample(list(names), len(names)):
                rates[name].append(_round(name, f"{name}-{number}", size))
    figures: dict[str, Any] = {name: {"rate": median(r)} for name, r in rates.items()}
    for name, other in ((n, o) for n in names for o in names):
        pairs = zip(rates[name], rates[other], strict=True)
        figures[name][f"to_{other}"] = median(mine / its for mine, its in pairs)
    return figures


def in_a_process(
    broker: str, nodes: Sequence[str], names: Sequence[str], rounds: int, size: int
) -> dict[str, Any]:
    """Run `measure` in a process that has these servers in its environment."""
    with tempfile.NamedTemporaryFile() as counts:
        counts.write(bytes(4096))
        counts.flush()
        servers = {"BENCH_BROKER": broker, "BENCH_NODES": " ".join(nodes)}
        command = [sys.executable, "-m", "benchmarks.celery_rate"]
        with subprocess.Popen(
            [*command, json.dumps([names, rounds, size])],
            cwd=ROOT,
            env={**os.environ, **servers, "BENCH_COUNTER": counts.name},
            stdout=subprocess.PIPE,
        ) as process:
            try:
                output, _ = process.communicate()
            finally:
                process.terminate()  # where it still runs: it has a worker to end first
                process.wait()
    if process.returncode:
        raise RuntimeError(f"the Celery rates: exit code {process.returncode}")
    figures: dict[str, Any] = json.loads(output)
    return figures


def show(title: str, figures: dict[str, Any], target: str) -> str:
    rows = [
        [
            LABELS[name],
            f"{f['rate']:.0f}",
            f"{f['to_plain']:.2f}",
            f"{f['to_bare']:.2f}" if "to_bare" in f else "",
            target if name == "ours" else "",
        ]
        for name, f in figures.items()
    ]
    return table([f"Celery, {title}", "tasks/s", "x plain", "x bare", "target"], rows)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print(json.dumps(measure(*json.loads(sys.argv[1]))))
    except KeyboardInterrupt:
        sys.exit(130)
