"""Play one ending on a real worker, check what the lock must do there, and measure it.

Who freed a lock is taken from a node's MONITOR: the connection on which the token came that was
deleted is the one it was set on (the process of the body), or another one of the worker's.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import celery
from celery.result import AsyncResult
from celery.states import READY_STATES

from tests.support import bodies
from tests.support.bodies import Run
from tests.support.cluster import SOON, Cluster, Contender
from tests.support.machine import in_time
from tests.support.monitor import GONE, Monitor
from tests.support.wait import wait_until
from tests.support.worker import Worker

VERSION = tuple(int(part) for part in celery.__version__.split(".")[:2])

GEVENT_ENDS_TASKS = (5, 5)
"""The first Celery whose gevent pool can: revoke(terminate=True), `replace`."""

BODY, MAIN, KEEPER, TTL, NOBODY = "body's process", "main process", "keeper", "ttl", "never taken"

SLOW = 2.0
"""Seconds within which even the last node has received a release; far less than a ttl."""


@dataclass(frozen=True)
class Row:
    """Measurements of an ending."""

    freed: float | None
    by: str
    overlaps: int
    message: str


@dataclass(frozen=True)
class Ending:
    """One way in which a body ends, and the promises about it.

    Attributes:
        name: In words; what the table in the docs calls it.
        task, args, options: The message. Its body must last until a contender waits, some 0.3 s.
        act: Brings the ending about, once the body runs.
        state: The task's state in the end; several, parted by "or", where Celery has no rule.
        runs: How often its body must have begun in the end.
        by: Who may free the lock.
        within: Seconds after the body's last sign of life within which it must be free.
        pools: Where this ending exists.
        worker: Settings of a worker of its own, as it does not survive this; else it is shared.
        arguments: Of that worker's command line.
        since: The first Celery that has it.
        seldom: Pools on which only `make test-all` plays it: another ending, or another test, runs
            the same lines of ours.
        unacknowledged: Pools on which the broker has the message still, to deliver it again.
        played: Replaces the whole play, where no body runs or more than one worker is needed.
    """

    name: str
    task: str = "work"
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    act: Callable[[Stage], None] = lambda stage: None
    state: str = "SUCCESS"
    runs: int = 1
    by: tuple[str, ...] = (BODY,)
    within: float = SOON
    pools: tuple[str, ...] = ("prefork",)
    worker: Mapping[str, Any] | None = None
    arguments: tuple[str, ...] = ("-c", "2")
    since: tuple[int, int] = (5, 4)
    seldom: tuple[str, ...] = ()
    unacknowledged: tuple[str, ...] = ()
    played: Callable[[Stage, Ending], Row] | None = None

    def __str__(self) -> str:
        return self.name


class Stage:
    """Where an ending is played: a cluster, a worker, a key of its own."""

    def __init__(self, cluster: Cluster, monitor: Monitor, worker: Worker, key: str) -> None:
        self.cluster = cluster
        self.monitor = monitor
        self.worker = worker
        self.key = key
        self.sent: AsyncResult[Any]
        self.contender: Contender

    @property
    def run(self) -> Run:
        """Return the first body of the task, as far as it has come."""
        return self.cluster.runs(self.key, self.sent)[0]

    def begin(self, task: str, *args: Any, quiet: bool = False, **options: Any) -> None:
        """Send a task; when its body has begun, have another wait for its lock.

        Args:
            quiet: Whether the other's having it is no overlap.
        """
        self.sent = self.cluster.send(task, self.key, *args, **options)
        self.cluster.entered(self.key)
        self.contender = self.cluster.contend(self.key, quiet=quiet)

    def freed(self, within: float) -> float:
        """Wait until the contender has the lock; seconds since the body's last sign of life."""
        entered = self.contender.has_it()
        first = [run for run in self.cluster.runs(self.key, self.sent) if run.begin < entered]
        freed = entered - first[-1].end
        in_time(
            first[-1].end, entered, within, "from the body's last sign of life to its lock's end"
        )
        return freed

    def by(self) -> str:
        """Return the process that released the task's first lock."""
        resource, task = f"k:{self.key}", self.sent.id
        with contextlib.suppress(AssertionError):  # a quorum of other nodes may be faster
            wait_until(lambda: self.monitor.freed_by(resource, task), SLOW, "this node is told")
        pid = self.monitor.freed_by(resource, task)
        if pid == GONE:
            with contextlib.suppress(AssertionError):
                self.worker.said(f"freed k:{self.key}")
            lines = [one for one in self.worker.text.splitlines() if f"freed k:{self.key}" in one]
            if not lines:  # the main process may end before it has said so; a helper goes on
                assert self.worker.process.poll() is not None
                return MAIN
            (line,) = lines
            return KEEPER if "sidecar]" in line else MAIN
        return self.process(pid)

    def told(self) -> str:
        """Return the node's record of requests about the key, with the process of each."""
        mine = {os.getpid(): "test", self.worker.process.pid: "worker"}
        return "\n".join(
            f"{mine.get(pid, pid)} {source} {' '.join(words)[:200]}"
            for source, pid, words in self.monitor.about(f"k:{self.key}")
        )

    def extenders(self) -> set[int]:
        """The processes that extended the task's first lock."""
        return self.monitor.extended_by(f"k:{self.key}", self.sent.id)

    def process(self, pid: int | None) -> str:
        """Return the role of a process."""
        known = {None: TTL, self.worker.process.pid: MAIN, self.run.pid: BODY}
        return known.get(pid, KEEPER)

    def over(self, state: str, runs: int) -> str:
        """Wait until nothing of the message is left anywhere; how it ended, in words."""
        cluster = self.cluster
        if state in READY_STATES:
            cluster.state(self.sent, 15.0)
        cluster.settled(10.0)
        found = self.sent.state
        assert found in state.split(" or "), f"{found}, and not {state}"
        assert len(cluster.runs(self.key, self.sent)) == runs
        times = "not run" if not runs else "run once" if runs == 1 else f"run {runs} times"
        return f"{found}, {times}"

    def overlaps(self) -> int:
        return len(bodies.overlaps(self.cluster.lines(resource=f"k:{self.key}")))


def play(
    ending: Ending, cluster: Cluster, monitor: Monitor, pool: str, worker: Worker | None, key: str
) -> Row:
    """Bring an ending about on a pool, check the promises, and return the measurements.

    Args:
        worker: One that may be shared; None if the ending wants its own.
    """
    with _worker(ending, cluster, pool, worker) as worker:
        stage = Stage(cluster, monitor, worker, key)
        try:
            return _played(ending, stage, pool)
        except AssertionError:
            print(stage.worker.text[-4000:], stage.told(), sep="\n")
            raise


def _played(ending: Ending, stage: Stage, pool: str) -> Row:
    if ending.played is not None:
        return ending.played(stage, ending)
    stage.begin(ending.task, *ending.args, **ending.options)
    ending.act(stage)
    freed = stage.freed(ending.within + stage.monitor.longer * (TTL in ending.by))
    by = stage.by()
    assert by in ending.by, f"freed by the {by}"
    client = stage.cluster.client
    if pool in ending.unacknowledged:
        assert client.hlen("unacked") == 1
        client.delete("unacked", "unacked_index")
    message = stage.over(ending.state, ending.runs)
    if pool in ending.unacknowledged:
        message += ", will be delivered again"
    assert stage.overlaps() == 0
    stage.cluster.free(stage.key)
    return Row(freed, by, stage.overlaps(), message)


@contextlib.contextmanager
def _worker(ending: Ending, cluster: Cluster, pool: str, worker: Worker | None) -> Iterator[Worker]:
    if ending.worker is None:
        assert worker is not None
        yield worker
        return
    with cluster.worker("-P", pool, *ending.arguments, **ending.worker) as own:
        yield own


def begin_again(stage: Stage, **conf: Any) -> Any:
    """A worker that comes after one that has ended, for what that one left."""
    return stage.cluster.worker("-c", "2", **conf)


def until(moment: float) -> None:
    """Wait for a moment that belongs to what is tested."""
    wait_until(lambda: time.monotonic() >= moment, 60.0, "the time has come")
