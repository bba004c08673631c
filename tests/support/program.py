"""A program that a test starts, stops, freezes and kills, with all that it prints in a file."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.wait import wait_until


class Program:
    """A name, a file of output, and one process after the other.

    Attributes:
        name: Its name in messages.
        output: The file.
        process: Its newest process; None before the first.
        stopped: It, or a child, has been stopped (SIGSTOP) and not been woken.
        since: Where in the file the output of its newest process begins; bytes.
    """

    def __init__(self, name: str, output: Path) -> None:
        self.name = name
        self.output = output
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = False
        self.since = 0

    @property
    def pid(self) -> int:
        """Return the pid of its main process, which leads a session."""
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Return True if there is a process; it may be stopped."""
        return self.process is not None and self.process.poll() is None

    @property
    def text(self) -> str:
        """All that its processes have printed."""
        return self._printed(0)

    @property
    def newest(self) -> str:
        """Return the output of its newest process."""
        return self._printed(self.since)

    def _printed(self, since: int) -> str:
        with contextlib.suppress(FileNotFoundError), open(self.output, "rb") as file:
            file.seek(since)
            return file.read().decode(errors="replace")
        return ""

    def begins(self) -> None:
        """Mark where the next process's output begins; call it before each start."""
        self.since = self.output.stat().st_size if self.output.exists() else 0
        self.stopped = False

    def said(self, words: str, timeout: float = 10.0) -> str:
        """Wait until its newest process has logged these words; return the first such line."""

        def line() -> str | None:
            return next((line for line in self.newest.splitlines() if words in line), None)

        return str(wait_until(line, timeout, f"{self.name} says {words!r}", every=0.02))

    def signal(self, number: int) -> None:
        """Send a signal to its main process, if there is one."""
        if self.alive:
            os.kill(self.pid, number)

    def signal_all(self, number: int) -> None:
        """Send a signal to all its processes."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self) -> float:
        """Kill all its processes, as `kill -9` does; return when the main one was dead.

        Those of a main process that has ended before are killed too.
        """
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.process.wait(60.0)
        self.stopped = False
        return time.time()

    def terminate(self, timeout: float = 60.0) -> int:
        """Ask it to end, and wait; return its return code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout)

    def pause(self) -> None:
        """Freeze it (SIGSTOP)."""
        self.signal(signal.SIGSTOP)
        self.stopped = True

    def resume(self) -> None:
        """Let it go on (SIGCONT)."""
        self.signal(signal.SIGCONT)
        self.stopped = False


TTL = 1.0
"""Ttl of `short_ttl`; seconds."""


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
