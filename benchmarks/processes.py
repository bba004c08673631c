"""Processes of a measurement: workers, a module on its own, what they cost and where they run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import redis

from benchmarks.environments import CACHE, ROOT

PROC = Path("/proc")
TTL = 10.0
"""Of the locks in Celery applications. They run under the restart guard that every user has, and a
node that has just been started has no vote for a ttl: with the default the waiting takes longer."""


@contextlib.contextmanager
def worker(application: str, name: str, **environment: str) -> Iterator[int]:
    """Run a prefork worker with two children; give the id of its session, that of its process."""
    command = [sys.executable, "-m", "celery", "-A", f"benchmarks.{application}", "worker"]
    command += ["-P", "prefork", "-c", "2", "-l", "WARNING", "-n", f"{name}@localhost"]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    log = CACHE / "log" / f"worker-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield process.pid
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.terminate()
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(condition: Callable[[], Any], seconds: float, what: str, pause: float = 0.001) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {seconds} s; see {CACHE / 'log'}")
        time.sleep(pause)


def consume(app: Any, queue: str, workers: int = 1) -> None:
    """Tell the workers to consume a queue; return when all have said that they do."""
    app.control.add_consumer(queue, reply=True, timeout=5.0, limit=workers)


def cancel(app: Any, queue: str, workers: int = 1) -> None:
    app.control.cancel_consumer(queue, reply=True, timeout=5.0, limit=workers)


def in_a_process(module: str, *arguments: Any, **environment: str) -> Any:
    """Call the module's `measure` in a process that has this in its environment."""
    with subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{module}", json.dumps(arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
    ) as process:
        try:
            output, _ = process.communicate()
        finally:
            process.terminate()  # where it still runs: it has a worker to end first
            process.wait()
    if process.returncode:
        raise RuntimeError(f"benchmarks.{module}: exit code {process.returncode}")
    return json.loads(output)


def answer(measure: Callable[..., Any]) -> None:
    """Be the process that `in_a_process` has started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print(json.dumps(measure(*json.loads(sys.argv[1]))))
    except KeyboardInterrupt:
        sys.exit(130)


def settle(urls: Iterable[str]) -> None:
    """Wait until the restart guard gives each node its vote."""

    def uptime(url: str) -> int:
        with redis.Redis.from_url(url) as client:
            info: Any = client.info("server")
        return int(info["uptime_in_seconds"])

    for url in urls:
        until(lambda: uptime(url) > TTL + 1, 3 * TTL, f"{url} is settled", 0.2)  # noqa: B023


def cpu(session: int) -> float:
    """Seconds of CPU that all processes of a session have used so far; NaN without a /proc."""
    ticks = 0
    for path in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else math.nan


@contextlib.contextmanager
def pinned(pids: Sequence[int], cores: int) -> Iterator[None]:
    """Have these processes, all their threads, share so many cores, where the system can do it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return

    def pin(where: Sequence[int]) -> None:
        for pid in pids:
            for thread in (PROC / str(pid) / "task").iterdir():
                os.sched_setaffinity(int(thread.name), where)

    every = sorted(os.sched_getaffinity(0))
    pin(every[:cores])
    try:
        yield
    finally:
        pin(every)
