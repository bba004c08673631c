"""A hot key: many tasks wait for one lock, on two real workers; others are queued behind them.

Run by `__main__.py` as a process of its own, as `celery_rate.py` is.
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
from pathlib import Path
from statistics import median
from typing import Any

import redis

from benchmarks.environments import CACHE, ROOT
from benchmarks.stats import table

BODY = 0.02
"""Seconds that the body of a hot task lasts."""
LIMIT = 240.0


@contextlib.contextmanager
def _workers(log: Path, parking: bool) -> Iterator[None]:
    processes = []
    environment = {**os.environ, "BENCH_LOG": str(log), "BENCH_PARKING": "1" if parking else "0"}
    (CACHE / "log").mkdir(parents=True, exist_ok=True)
    try:
        for number in (1, 2):
            command = [sys.executable, "-m", "celery", "-A", "benchmarks.hot_app", "worker"]
            command += ["-P", "prefork", "-c", "2", "-l", "WARNING", "-n", f"hot{number}@localhost"]
            command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
            with (CACHE / "log" / f"hot-{number}.log").open("w") as file:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env=environment,
                        stdout=file,
                        stderr=file,
                        start_new_session=True,
                    )
                )
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _commands() -> float:
    """Commands that a node has served, on average."""
    nodes = os.environ["BENCH_NODES"].split()
    total = 0
    for url in nodes:
        with redis.Redis.from_url(url) as client:
            stats: Any = client.info("commandstats")
            ours = ("info", "client", "select", "hello", "auth")
            total += sum(
                one["calls"]
                for name, one in stats.items()
                if name.removeprefix("cmdstat_").partition("|")[0] not in ours
            )
    return total / len(nodes)


def _round(log: Path, queue: str, hot: int, others: int) -> dict[str, float]:
    """Have both workers do these tasks; the times that took, in seconds."""
    from benchmarks.hot_app import app

    log.write_bytes(b"")
    with app.producer_pool.acquire(block=True) as producer:
        for _ in range(hot):
            app.tasks["hot"].apply_async((BODY,), queue=queue, producer=producer)
        for number in range(others):
            app.tasks["other"].apply_async((number,), queue=queue, producer=producer)
    before, start = _commands(), time.monotonic()
    app.control.add_consumer(queue, reply=True, timeout=5.0, limit=2)
    deadline = start + LIMIT
    while log.read_bytes().count(b"\n") < hot + others:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{queue}: not within {LIMIT} s; see {CACHE / 'log'}")
        time.sleep(0.01)
    commands = _commands() - before
    app.control.cancel_consumer(queue, reply=True, timeout=5.0, limit=2)
    lines = [line.split() for line in log.read_text().splitlines()]
    begins = [float(begin) for kind, begin, _ in lines if kind == "hot"]
    ends = [float(end) for kind, _, end in lines if kind == "hot"]
    figures = {"commands": commands}
    if hot:
        figures["total"] = max(ends) - min(begins)
        figures["longest"] = max(begins) - start
        figures["waited"] = sum(begin - start for begin in begins)
    if others:
        figures["others"] = max(float(end) for kind, _, end in lines if kind == "other") - start
    return figures


def measure(rounds: int, hot: int, others: int, polling: bool) -> dict[str, Any]:
    """Medians, with parking and (if `polling`) without."""
    from benchmarks.hot_app import app

    found: dict[str, Any] = {"ideal": hot * BODY}
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        for parking in (True, False) if polling else (True,):
            with _workers(log, parking):
                deadline = time.monotonic() + 30
                while len(app.control.ping(timeout=0.5)) < 2:
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"the workers do not start; see {CACHE / 'log'}")
                name = f"{'parked' if parking else 'polling'}"
                _round(log, f"warm-up-{name}", 5, 100)
                alone, mixed, without = [], [], []
                for number in range(rounds if parking else 1):
                    alone.append(_round(log, f"alone-{name}-{number}", hot, 0))
                    without.append(_round(log, f"without-{name}-{number}", 0, others))
                    mixed.append(_round(log, f"mixed-{name}-{number}", hot, others))
            own = median(one["commands"] for one in without) / others * hot
            found[name] = {
                "total": median(one["total"] for one in alone),
                "longest": median(one["longest"] for one in alone),
                "others": median(one["others"] for one in mixed),
                "others_without": median(one["others"] for one in without),
                "slowdown": median(
                    one["others"] / two["others"] for one, two in zip(mixed, without, strict=True)
                ),
                "commands": median(one["commands"] / one["waited"] for one in alone),
                "commands_waiting": median(
                    max(0.0, one["commands"] - own) / one["waited"] for one in alone
                ),
                "commands_a_lock": own / hot,
                "rounds": {"alone": alone, "mixed": mixed, "without": without},
            }
    return found


def in_a_process(
    broker: str, nodes: Sequence[str], rounds: int, hot: int, others: int, polling: bool
) -> dict[str, Any]:
    """Run `measure` in a process that has these servers in its environment."""
    servers = {"BENCH_BROKER": broker, "BENCH_NODES": " ".join(nodes), "BENCH_LOG": os.devnull}
    command = [sys.executable, "-m", "benchmarks.hot", json.dumps([rounds, hot, others, polling])]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **servers}, stdout=subprocess.PIPE
    ) as process:
        try:
            output, _ = process.communicate()
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        raise RuntimeError(f"the hot key: exit code {process.returncode}")
    figures: dict[str, Any] = json.loads(output)
    return figures


def show(figures: dict[str, Any]) -> str:
    ideal = figures["ideal"]
    rows = []
    for title, figure, of, target in (
        ("all of one key, x ideal", "total", ideal, "<= 1.25"),
        ("longest wait, x ideal", "longest", ideal, "<= 3"),
        ("other tasks behind it, x without it", "slowdown", 1.0, "<= 1.3"),
        ("commands per node, waiting task and second", "commands_waiting", 1.0, "<= 2"),
        ("the same with the locks' own", "commands", 1.0, ""),
    ):
        values = [f"{figures[n][figure] / of:.2f}" for n in ("parked", "polling") if n in figures]
        rows.append([title, *values, *[""] * (2 - len(values)), target])
    return table([f"A hot key, ideal {ideal:g} s", "parked", "polling", "target"], rows)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print(json.dumps(measure(*json.loads(sys.argv[1]))))
    except KeyboardInterrupt:
        sys.exit(130)
