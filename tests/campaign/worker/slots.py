"""Times at which each worker of a campaign was connected, and had a free slot.

Judged from the accounts of workers and bodies, and from the faults; what is forgiven has its name
in `liveness.FORGIVEN`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.campaign.worker.chronicle import Fault
from tests.campaign.worker.feeder import Sent
from tests.campaign.worker.journal import Line, Process
from tests.campaign.worker.spans import Spans, fewer, union, without
from tests.campaign.worker.stage import TTL

SEEN = 0.2
"""Seconds by which the end of a key may be seen late: two looks of the sentry, and a busy core."""
CHILD_BACK = 5.0
"""Seconds until Celery has replaced a child that died, or has done as many tasks as it may, and has
given what it had been handed to another: billiard looks every five."""
EXITING = 1.0
"""Seconds that a child takes to end, once it has done as many tasks as it may."""
CONNECTED = 1.0
"""Seconds after a worker says that it consumes, until it does: its first round connects."""
LINKS_BACK = 2.0
"""Seconds after a quorum is back: connections are tried again after up to one, and so are keys."""
WOKEN = 2.0
"""Seconds after SIGCONT for overdue work, and to find that connections are dead."""

STOPS = ("child stop", "worker stop", "broker cut")
FORGETTING = ("node kill", "three of five forget", "node swapped", "node demoted", "clock stepped")
"""Faults after which a node has no vote for a ttl, by how they begin."""
UNLOCKED = ("probe", "fill")
"""Tasks that want no key."""
TAKES_A_SLOT = (*UNLOCKED, "skipping")
"""Tasks of which each attempt counts as work."""

Main = tuple[str, int]
"""A worker, as long as its main process lives: its name and pid."""


@dataclass
class WorkerLife:
    """One life of a worker."""

    connected: Spans = field(default_factory=list)
    connects: list[float] = field(default_factory=list)
    leaves: list[float] = field(default_factory=list)
    stopping: float = float("inf")
    died: float = float("inf")
    stops: Spans = field(default_factory=list)
    well: Spans = field(default_factory=list)
    free: Spans = field(default_factory=list)
    children_died: list[float] = field(default_factory=list)

    def dying(self, pooled: float | None, starved: Callable[[float, float], float]) -> Spans:
        """Return when messages for the pool may lie in the pipe of a dead child ("child").

        Of whose death Celery learns later, where it has to wait for a core.
        """
        if pooled is None:
            return []
        return union(
            (pooled, died + CHILD_BACK)
            for died in self.children_died
            if pooled - SEEN - starved(died, pooled) < died < pooled + EXITING
        )


def _died(process: Process, alive: Mapping[Process, float], until: float) -> float:
    """Return when it was last seen alive, if it is dead."""
    last = alive.get(process, 0.0)
    return last if last < until - 2.0 else float("inf")


def worker_lives(
    lines: Mapping[Process, Sequence[Line]], alive: Mapping[Process, float], until: float
) -> dict[Main, WorkerLife]:
    """Return the lives of all workers, with the times at which each was connected."""
    found: dict[Main, WorkerLife] = {}
    for process, of_one in lines.items():
        worker = found.setdefault((process.worker, process.main), WorkerLife())
        if process.pid != process.main:
            continue
        worker.died = _died(process, alive, until)
        since: float | None = None
        for line in of_one:
            if line.kind == "connected":
                since = line.at
                worker.connects.append(line.at)
            elif line.kind in ("disconnected", "stopping"):
                if since is not None:
                    worker.connected.append((since + CONNECTED, line.at))
                since = None
                if line.kind == "stopping":
                    worker.stopping = min(worker.stopping, line.at)
                else:
                    worker.leaves.append(line.at)
        if since is not None:
            worker.connected.append((since + CONNECTED, min(worker.died, until)))
        worker.connected = union(worker.connected)
    return found


def free_slots(
    main: Main,
    worker: WorkerLife,
    lines: Mapping[Process, Sequence[Line]],
    alive: Mapping[Process, float],
    ledger: Mapping[str, Sent],
    faults: Sequence[Fault],
    slots: Mapping[str, int],
    until: float,
    nodes: int,
) -> Spans:
    """Return when it had a free slot, and could use it."""
    taken: Spans = []
    kept: Spans = []
    for process, of_one in lines.items():
        if (process.worker, process.main) == main:
            died = _died(process, alive, until)
            taken += _work(of_one, ledger, min(died, until))
            kept += _kept_the_gil(of_one, ledger) if process.pid == process.main else []
            if process.pid != process.main and died < worker.died:
                taken.append((died, died + CHILD_BACK))  # "child"
                worker.children_died.append(died)
    stops = (
        (fault.begin, (until if fault.end is None else fault.end) + WOKEN)
        for fault in faults
        if fault.worker == main[0] and fault.kind.startswith(STOPS)  # "stopped"
    )
    worker.stops = union([*stops, *kept])
    hindered = [*worker.stops, *_without_quorum(main[0], faults, until, nodes)]
    worker.well = without(worker.connected, union(hindered))
    return fewer(taken, slots.get(main[0], 0), worker.well)


def _kept_the_gil(lines: Sequence[Line], ledger: Mapping[str, Sent]) -> Spans:
    """Return when a C call kept all threads of a process from running."""
    found: Spans = []
    begun: dict[int, float] = {}
    for line in lines:
        sent = ledger.get(line.task)
        if line.kind == "enter" and sent is not None and sent.manner == "gil":
            begun[line.thread] = line.at
        elif line.kind in ("exit", "done") and line.thread in begun:
            found.append((begun.pop(line.thread), line.at + SEEN))
    return found


def _work(lines: Sequence[Line], ledger: Mapping[str, Sent], end: float) -> Spans:
    """Return when the slots of a process were taken: it may have many, as threads."""
    found: Spans = []
    open_: dict[int, tuple[Line, bool]] = {}
    for line in lines:
        if line.kind == "got":
            sent = ledger.get(line.task)
            open_[line.thread] = line, sent is None or sent.task in TAKES_A_SLOT
        elif line.kind == "enter" and line.thread in open_:
            open_[line.thread] = open_[line.thread][0], True
        elif line.kind == "done" and line.thread in open_:
            got, works = open_.pop(line.thread)
            if works:
                found.append((got.at, line.at))
    found += ((got.at, end) for got, works in open_.values() if works)
    return found


def _without_quorum(worker: str, faults: Sequence[Fault], until: float, nodes: int) -> Spans:
    """Return when too few nodes answered this worker ("quorum")."""
    out: list[tuple[float, float, int]] = []
    for fault in faults:
        if fault.nodes and fault.worker in ("", worker):
            end = until if fault.end is None else fault.end
            end += 1.1 * TTL if fault.kind.startswith(FORGETTING) else 0.0
            out += ((fault.begin, end, node) for node in fault.nodes)
    edges = sorted({edge for begin, end, _node in out for edge in (begin, end)})
    found: Spans = []
    for begin, end in itertools.pairwise(edges):
        away = {node for a, b, node in out if a <= begin and b >= end}
        if len(away) > (nodes - 1) // 2:
            found.append((begin, end + LINKS_BACK))
    return union(found)
