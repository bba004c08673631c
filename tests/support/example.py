"""Running the programs of examples/ as a user would."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.wait import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextlib.contextmanager
def worker(
    example: str, environment: dict[str, str], log: Path, directory: Path = EXAMPLES
) -> Iterator[Path]:
    """The `celery -A <example> worker` of its docstring, and its log."""
    command = [sys.executable, "-m", "celery", "-A", example, "worker", "--loglevel", "INFO"]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*command, "--concurrency", "4"],
            cwd=directory,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: " ready." in log.read_text(), 20, "the worker to be ready")
        yield log
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
