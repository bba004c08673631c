"""What it takes to list ten thousand locks that five nodes hold, as `celery-redlock ls` does."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import redis

from benchmarks.environments import ROOT
from celery_redlock.protocol.values import Owner

OWNER = Owner("worker-1", 4242, "0a1b2c3d-0000-0000-0000-000000000000", task="shop.tasks.charge")


def _take(urls: Sequence[str], locks: int) -> None:
    tokens = [OWNER.token(os.urandom(16).hex(), time.time()) for _ in range(locks)]
    for url in urls:
        with redis.Redis.from_url(url) as client, client.pipeline(transaction=False) as pipeline:
            pipeline.flushdb()
            for number, token in enumerate(tokens):
                pipeline.set(f"redlock:shop.tasks.charge:order_id={number}", token, px=600_000)
            pipeline.execute()


def measure(urls: Sequence[str], rounds: int, locks: int = 10_000) -> dict[str, Any]:
    """Seconds from the shell's point of view: with the start of Python, and JSON of all of them."""
    _take(urls, locks)
    code = "from celery_redlock.cli import main; main()"
    command = [sys.executable, "-c", code, "--nodes", ",".join(urls), "ls", "--json"]
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        taken.append(time.perf_counter() - begun)
        if done.stdout.count('"held": true') != locks:
            raise RuntimeError("not all of them were listed")
    for url in urls:
        with redis.Redis.from_url(url) as client:
            client.flushdb()
    return {"locks": locks, "nodes": len(urls), "seconds": taken}


def show(figures: dict[str, Any]) -> str:
    """As text."""
    taken = figures["seconds"]
    return (
        f"Listing {figures['locks']} locks on {figures['nodes']} nodes with ls --json:"
        f" median {statistics.median(taken):.2f} s, slowest {max(taken):.2f} s (target < 3 s)"
    )
