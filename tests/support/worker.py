"""A worker process, and the pools that it may have."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pytest_celery import CeleryTestWorker

from tests.support import bodies, forked
from tests.support.containers import LocalProcess, LocalWorker
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

ROOT = Path(__file__).parents[2]


def pool(name: str) -> Any:
    """A pool as a parameter of tests; they are skipped where it is not installed."""
    missing = name == "gevent" and importlib.util.find_spec(name) is None
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"{name} is not installed"))


OFTEN = ("prefork", "threads", "gevent")
"""A process, a thread, a greenlet: what `make test` has where all pools promise the same."""


def often(name: str) -> Any:
    """Return a parameter as `pool`.

    Pools that resemble one of `OFTEN` are left to `make test-all`.
    """
    marks = [*pool(name).marks, *([] if name in OFTEN else [pytest.mark.slow])]
    return pytest.param(name, marks=marks)


class Worker(CeleryTestWorker):
    """A `celery worker` process: one of pytest-celery's nodes, without a container around it."""

    __hash__ = object.__hash__  # pytest-celery compares nodes, and forgets this

    def __init__(
        self,
        cluster: Cluster,
        arguments: tuple[str, ...] = (),
        conf: Mapping[str, Any] = {},
        queue: str = "celery",
    ) -> None:
        name = uuid.uuid4().hex[:8]
        self.queue = queue
        environment = {
            **os.environ,
            "TEST_CONF": json.dumps({**cluster.conf, **conf}),
            bodies.VARIABLE: cluster.log,
            "PYTHONPATH": str(ROOT),
            "C_FORCE_ROOT": "1",  # Celery's leave to take pickles as root: ours alone arrive
        }
        command = forked.celery(cluster.tasks, "worker", *forked.QUIET)
        command += ["-n", f"{name}@test", "-Q", queue, *(arguments or ("-c", "3"))]
        self.output = cluster.path / f"worker-{name}.log"
        process = LocalProcess(command, output=self.output, env=environment, cwd=ROOT)
        super().__init__(LocalWorker(process), cluster.app)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The worker's main process."""
        return self.container.process

    @property
    def text(self) -> str:
        """All it has printed."""
        return self.output.read_text(errors="replace")

    def said(self, words: str, timeout: float = 10.0) -> None:
        """Wait until it has logged `words`."""
        wait_until(lambda: words in self.text, timeout, f"the worker says {words!r}", every=0.01)

    def terminate(self) -> None:
        """Ask for a warm shutdown."""
        self.process.send_signal(signal.SIGTERM)

    def ended(self, timeout: float = 60.0) -> int:
        """Wait for its end; its return code.

        A child that ends a task as its worker stops waits up to 30 s for its parent (billiard).
        """
        return self.process.wait(timeout)


def handlers_raised_nothing(worker: Worker) -> None:
    """Check that no signal handler raised; Celery only logs it. A time limit may interrupt one."""
    raised = re.findall(r"Signal handler .* raised: (?!SoftTimeLimitExceeded).*", worker.text)
    assert not raised, "one of ours has raised"
