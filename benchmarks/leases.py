"""Many leases kept alive in one process: CPU, memory, threads, and that none was lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from redis import Redis

from benchmarks.environments import ROOT
from benchmarks.stats import paired_ratio, table

LABELS = {"bare": "bare limit: one pipeline per node", "ours": "celery_redlock"}


def _held_on_a_quorum(urls: Sequence[str], count: int) -> int:
    """Ask the nodes, not the holder."""
    votes: Counter[str] = Counter()
    for url in urls:
        with Redis.from_url(url, decode_responses=True) as client:
            keys = client.scan_iter(match="*keep:*", count=5000)
            votes.update({key[key.index("keep:") :] for key in keys})
    return sum(votes[f"keep:{number}"] > len(urls) // 2 for number in range(count))


def _keep(kind: str, urls: Sequence[str], count: int, seconds: float) -> dict[str, Any]:
    for url in urls:
        with Redis.from_url(url) as client:
            client.flushall()
    command = [sys.executable, "-m", "benchmarks.keep", kind, str(count), str(seconds), *urls]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        try:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the process keeping leases ({kind}) has failed")
            figures: dict[str, Any] = json.loads(line)
            figures["held_on_a_quorum"] = _held_on_a_quorum(urls, count)
        finally:
            process.kill()
    return {**figures, "count": count, "seconds": seconds}


def measure(
    urls: Sequence[str], kinds: Sequence[str], count: int, seconds: float, rounds: int
) -> dict[str, Any]:
    """Return what `count` leases cost over `seconds`, and what acquiring them did, by kind.

    They are acquired in all rounds, in turns, and kept in the last one.
    """
    acquiring: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for number in reversed(range(rounds)):
        figures = {kind: _keep(kind, urls, count, 0 if number else seconds) for kind in kinds}
        for kind, figure in figures.items():
            acquiring[kind].append([figure["acquiring"]])
    for kind, figure in figures.items():
        figure["acquiring_ratio"] = paired_ratio(acquiring[kind], acquiring[kinds[0]])
    return figures


def show(figures: dict[str, Any]) -> str:
    rows = []
    for kind, f in figures.items():
        memory = "?" if f["memory"] is None else f"{f['memory'] / 2**20:.1f}"
        held = f"{f['held']} / {f['held_on_a_quorum']}"
        acquiring = [f"{f['acquiring']:.1f}", f"{f['acquiring_ratio']:.2f}"]
        row = [LABELS[kind], f"{f['cpu_share']:.2%}", memory, str(f["threads"]), held, *acquiring]
        rows.append(row)
    count = next(iter(figures.values()))["count"]
    head = [f"{count} leases kept, ttl 10 s", "CPU of a core", "MiB more", "threads more"]
    return table([*head, "held: own view / nodes", "acquiring, s", "x bare"], rows)
