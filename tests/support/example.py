"""Running the programs of examples/ as a user would."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support import forked
from tests.support.wait import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextlib.contextmanager
def worker(
    example: str, environment: dict[str, str], log: Path, directory: Path = EXAMPLES
) -> Iterator[Path]:
    """The `celery -A <example> worker` of its docstring, and its log.

    It asks no others how they are, which takes a second, and in the end it is killed.
    """
    command = [sys.executable, "-m", forked.MODULE, "-A", example, "worker", "--loglevel", "INFO"]
    with open(log, "wb") as output:
        process = forked.start(
            [*command, "--concurrency", "4", "--without-mingle"],
            cwd=directory,
            env=environment,
            output=output,
        )
    try:
        wait_until(lambda: " ready." in log.read_text(), 20, "the worker to be ready")
        yield log
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
