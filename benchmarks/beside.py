"""What other libraries do at the events of the README's table, against what it says of them.

Each library in an environment of its own, with a worker and beats of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.environments import ROOT, Unavailable, python_with
from benchmarks.stats import table
from celery_redlock.server import start_servers

FIELD = (
    ("ours", "celery_redlock", None),
    ("once", "celery-once 3.0", "celery-once==3.0.1"),
    ("singleton", "celery-singleton 0.3", "celery-singleton==0.3.1"),
    ("lock", "`redis.lock()` in the body", None),
)


def measure() -> dict[str, dict[str, str]]:
    """Return what each does, by the row of the table; or why it could not be seen."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip([label for _, label, _ in FIELD], pool.map(_of_one, FIELD), strict=True))


def _of_one(one: tuple[str, str, str | None]) -> dict[str, str]:
    kind, _label, requirement = one
    try:
        python = python_with(requirement, "packaging") if requirement else Path(sys.executable)
    except Unavailable as error:
        return {"unavailable": str(error)}
    count = 4 if kind == "ours" else 2
    with start_servers(count) as (*nodes, broker), tempfile.TemporaryDirectory() as place:
        environment = {
            **os.environ,
            "BESIDE_KIND": kind,
            "BESIDE_NODES": " ".join(node.url for node in nodes),
            "BESIDE_BROKER": broker.url,
            "BESIDE_DIRECTORY": place,
            "BESIDE_PID": str(nodes[0].pid),
            "PYTHONPATH": str(ROOT),
        }
        command = [str(python), "-m", "benchmarks.beside_app"]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if run.returncode:
        return {"unavailable": run.stderr.strip().splitlines()[-1][:200]}
    found: dict[str, str] = json.loads(run.stdout)
    return found


def said() -> dict[str, dict[str, str]]:
    """Return what the README says, by library and row."""
    lines = (ROOT / "README.md").read_text("utf-8").partition("## Beside others\n")[2].splitlines()
    rows = [[*map(str.strip, line.split("|")[1:-1])] for line in lines if line.startswith("|")]
    (_, *heads), _rule, *rest = rows
    return {head: {row: cells[n] for row, *cells in rest} for n, head in enumerate(heads)}


def show(figures: dict[str, dict[str, str]]) -> str:
    readme, rows = said(), []
    for label, of_one in figures.items():
        for row, found in of_one.items():
            told = readme[label].get(row, "")
            rows.append([label, row, found[:60], "" if found == told else f"README: {told}"])
    return table(["library", "at this", "it", "otherwise told"], rows)
