"""Tasks published per second under a reservation, against the same without.

Each library in a process of its own, and each against its own plain `delay()`, turn by turn: what
counts is the ratio. The peers reserve on one Redis, the bare limit and we on five. The bare limit
stands there twice: a key that is reserved for long before its message is out stays so when the
producer is killed in between, so we write to the nodes twice, the second time for several messages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environments import ROOT, Unavailable, python_with
from benchmarks.processes import settle
from benchmarks.stats import table

FIELD = (
    ("ours", "until_executing, five nodes", None),
    ("unguarded", "the same, restart guard off", None),
    ("bare", "bare limit: acquire, then delay()", None),
    ("twice", "the same for 10 s, extended when it is out", None),
    ("once", "celery-once 3.0.1, ONE node", "celery-once==3.0.1"),
    ("singleton", "celery-singleton 0.3.1, ONE node", "celery-singleton==0.3.1"),
)


def measure(broker: str, nodes: Sequence[str], rounds: int, size: int) -> dict[str, Any]:
    """Return each library's median rates and the ratio of the two; or why there are none."""
    settle(nodes)
    servers = {"BENCH_BROKER": broker, "BENCH_NODES": " ".join(nodes)}
    figures: dict[str, Any] = {}
    for kind, _label, requirement in FIELD:
        try:
            python = python_with(requirement, "packaging") if requirement else Path(sys.executable)
        except Unavailable as error:
            figures[kind] = {"unavailable": str(error)}
            continue
        command = [str(python), "-m", "benchmarks.publisher", kind, str(rounds), str(size)]
        environment = {**os.environ, **servers, "PYTHONPATH": str(ROOT)}
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if run.returncode:
            figures[kind] = {"unavailable": run.stderr.strip().splitlines()[-1][:200]}
            continue
        rates = json.loads(run.stdout)
        pairs = zip(rates["reserved"], rates["plain"], strict=True)
        figures[kind] = {
            "plain": median(rates["plain"]),
            "reserved": median(rates["reserved"]),
            "ratio": median(reserved / plain for reserved, plain in pairs),
        }
    return figures


def show(figures: dict[str, Any]) -> str:
    rows = []
    for kind, label, _requirement in FIELD:
        of_one = figures[kind]
        if "unavailable" in of_one:
            rows.append([label, "", "", of_one["unavailable"][:60]])
        else:
            ratio = f"{of_one['ratio']:.2f}"
            rows.append([label, f"{of_one['reserved']:.0f}", f"{of_one['plain']:.0f}", ratio])
    return table(["publishing", "tasks/s", "plain", "x plain"], rows)
