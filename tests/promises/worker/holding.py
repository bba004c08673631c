"""Strains that a lock must outlive: a body that sleeps, computes, keeps the GIL or is stopped.

Each lasts 2 x ttl. As data, like the endings: the tests check it, and `make endings` prints it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.promises.worker.ending import VERSION, Stage, until
from tests.promises.worker.scenarios import POOLS
from tests.support.cluster import Cluster
from tests.support.monitor import Monitor
from tests.support.worker import Worker

TTL = 1.5
"""Ttl of `strained`; seconds."""
BODY = 3.5
PAUSE = 2 * TTL


@dataclass(frozen=True)
class Setup:
    """A pool, and the extender of its leases."""

    name: str
    pool: str
    conf: Mapping[str, Any] = field(default_factory=dict)
    loses: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Strain:
    """The work or fault of a body, for 2 x ttl."""

    name: str
    kind: str
    act: Callable[[Stage], None] = lambda stage: None
    since: tuple[int, int] = (5, 4)
    ends: bool = False
    """True if it ends the worker."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Held:
    """Observations of a strained body.

    Attributes:
        held: Whether nobody else had the lock while the body lived, and nobody called it lost.
        kept_by: Who extended it.
        noticed_by: Who noticed that it was lost.
    """

    held: bool
    kept_by: str
    noticed_by: str


def stop(stage: Stage) -> None:
    pid = stage.run.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        until(time.monotonic() + PAUSE)
    finally:
        os.kill(pid, signal.SIGCONT)


def soft_shutdown(stage: Stage) -> None:
    stage.worker.process.send_signal(signal.SIGQUIT)
    stage.worker.ended()


SOFT = {"worker_soft_shutdown_timeout": PAUSE}
STRAINS = (
    Strain("sleep", "one sleep"),
    Strain("Python loop", "loop"),
    Strain("C call that keeps the GIL", "gil"),
    Strain("SIGSTOP", "sleep", stop),
    Strain("soft shutdown", "sleep", soft_shutdown, since=(5, 5), ends=True),  # the last
)
PAUSED = ("C call that keeps the GIL", "SIGSTOP")
"""Strains that stop every thread of a process."""
PROCESS = {"redlock_keeper": "process"}
SETUPS = [
    Setup("prefork", "prefork"),
    *(Setup(pool, pool, loses=PAUSED) for pool in POOLS[1:-1]),
    Setup("gevent", "gevent", loses=("Python loop", *PAUSED)),
    *(Setup(f'{pool}, `redlock_keeper="process"`', pool, PROCESS) for pool in POOLS[1:]),
]


def strained_by() -> list[Strain]:
    """Return the strains that this Celery can bear."""
    return [strain for strain in STRAINS if strain.since <= VERSION]


def bear(strain: Strain, cluster: Cluster, monitor: Monitor, worker: Worker, key: str) -> Held:
    """Put a body to it; what became of its lock."""
    stage = Stage(cluster, monitor, worker, key)
    stage.begin("strained", BODY, strain.kind, quiet=True, queue=worker.queue)
    strain.act(stage)
    entered = stage.contender.has_it()
    if strain.act is not soft_shutdown:
        cluster.state(stage.sent, 20.0)
    run = stage.run
    lost = [one.pid for one in cluster.lines("lost", f"k:{key}")]
    held = not lost and entered > run.end
    if held:  # else the strain was none
        assert run.end - run.begin > 0.9 * PAUSE
    noticed = {stage.process(pid) for pid in lost}
    return Held(held, _names(map(stage.process, stage.extenders())), _names(noticed))


def _names(processes: Any) -> str:
    return " and ".join(sorted(set(processes)))
