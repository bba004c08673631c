"""Accounts that bodies write of themselves, and their reader. Shares no code with the library."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Return the seconds on the clock of all accounts."""
    return time.clock_gettime(CLOCK)


def start_time(pid: int) -> str:
    """Return when a process began, in the kernel's ticks; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def short(token: str) -> str:
    """Return a name for a token that releases nothing."""
    return hashlib.sha256(token.encode()).hexdigest()[:10]


class Line(NamedTuple):
    """A line of an account.

    Attributes:
        at: When; seconds.
        kind: What.
        thread: Which thread of the process writes.
        task: The task's id.
        run: Names one run of one body.
        resource: What it has locked.
        token: Names the lease's token.
        fence: Its fencing token, where there is one.
        valid: Until when the library says that the lease lasts; seconds.
        held: Whether the library says that it is held.
        more: How often the task had been retried; of `wrote`: whether that was accepted; of `sent`
            and `received`: when it is due, if that is later; seconds.
        shared: Of a body: it only reads, and others may beside it.
    """

    at: float
    kind: str
    thread: int
    task: str
    run: str = ""
    resource: str = ""
    token: str = ""
    fence: int | None = None
    valid: float = 0.0
    held: bool = False
    more: Any = None
    shared: bool = False


class Pen:
    """Writes the account of this process, whichever it is by now (a fork gets a file of its own).

    Args:
        path: A directory.
        worker: The worker's name.

    Attributes:
        main: The process that made it: the worker's main process.
    """

    def __init__(self, path: str, worker: str) -> None:
        self._path = path
        self._worker = worker
        self.main = os.getpid()
        self._pid = 0
        self._fd = -1
        self._lock = threading.Lock()

    def write(self, kind: str, task: str, *more: Any, at: float | None = None) -> None:
        """Write a line; `more` are the fields of `Line` from `run` on."""
        pid = os.getpid()
        if pid != self._pid:
            name = f"{self._worker}.{self.main}.{pid}.{start_time(pid)}.log"
            flags = os.O_APPEND | os.O_WRONLY | os.O_CREAT
            self._fd, self._pid = os.open(os.path.join(self._path, name), flags, 0o600), pid
        at = now() if at is None else at
        # Not the native id: greenlets share one.
        line = [round(at, 6), kind, threading.get_ident(), task, *more]
        os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")


@dataclass(frozen=True)
class Process:
    """The process that wrote a file.

    Attributes:
        worker: The worker's name.
        main: The pid of its main process at that time.
        pid: Its own.
        started: When it began, in the kernel's ticks.
    """

    worker: str
    main: int
    pid: int
    started: str

    @property
    def born(self) -> float:
        """When it began; seconds."""
        return int(self.started) / os.sysconf("SC_CLK_TCK")

    def alive(self) -> bool:
        return start_time(self.pid) == self.started


class Journal:
    """Reads all files of a directory, as they grow."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: dict[Path, int] = {}
        self.lines: dict[Process, list[Line]] = {}

    def read(self) -> dict[Process, list[Line]]:
        """All lines so far, by process, each in the order of writing."""
        for file in self._path.glob("*.log"):
            done = self._read.get(file, 0)
            if file.stat().st_size == done:
                continue
            with open(file, "rb") as stream:
                stream.seek(done)
                data = stream.read()
            whole = data.rfind(b"\n") + 1
            self._read[file] = done + whole
            lines = self.lines.setdefault(process_of(file), [])
            lines += (Line(*json.loads(line)) for line in data[:whole].splitlines())
        return self.lines

    def processes(self) -> Iterator[Process]:
        """Return all processes with a file; it may still be empty."""
        return (process_of(file) for file in self._path.glob("*.log"))


def process_of(file: Path) -> Process:
    """Return the process that wrote a file, by its name."""
    worker, main, pid, started = file.name.removesuffix(".log").rsplit(".", 3)
    return Process(worker, int(main), int(pid), started)
