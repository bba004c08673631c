"""The parent's half of the line protocol of `adapters/child.py`: start, ask in turns, end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environments import CACHE, ROOT, Unavailable, python_with

ADAPTERS = Path(__file__).parent / "adapters"


@dataclass(frozen=True)
class Entry:
    """Who takes part: an adapter, and the package it wants an environment of its own for."""

    name: str
    label: str
    adapter: str
    requirement: str | None = None


BARE = Entry("bare", "bare limit: raw sockets, one poll loop", "bare.py")
OURS = Entry("ours", "celery_redlock.Redlock", "ours.py")
LOCK = Entry("lock", "the same by lock(), kept alive", "ours_lock.py")
FENCED = Entry("fenced", "the same, fencing=True", "ours_fenced.py")
CONNLOOP = Entry("connloop", "same loop over redis-py's Connection", "connloop.py")
FIELD = (
    BARE,
    CONNLOOP,
    OURS,
    LOCK,
    FENCED,
    Entry("redlock-ng", "redlock-ng 2.0.4", "redlock_ng.py", "redlock-ng==2.0.4"),
    Entry("redlock-py", "redlock-py 1.0.8", "redlock_py.py", "redlock-py==1.0.8"),
    Entry("pottery", "pottery 3.0.1", "pottery_redlock.py", "pottery==3.0.1"),
    Entry("redis-lock", "redis-py Lock, ONE node", "redis_lock.py"),
)


class Gone(Exception):
    """The contestant has ended, or has not answered in time and was ended."""


class Contestant:
    """A running adapter."""

    def __init__(self, entry: Entry, urls: Sequence[str]) -> None:
        self.entry = entry
        python = python_with(entry.requirement) if entry.requirement else Path(sys.executable)
        self._log = CACHE / "log" / f"{entry.name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, ADAPTERS / entry.adapter, *urls],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )
        try:
            self.answer(60.0)
        except Gone as gone:
            raise Unavailable(str(gone)) from None

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, command: str, timeout: float = 60.0) -> dict[str, Any]:
        """Send one command and return the answer.

        Raises:
            Gone: there is no answer, and will be none: the process is ended.
        """
        self.tell(command)
        return self.answer(timeout)

    def tell(self, command: str) -> None:
        """Send one command; its answer must be asked for before the next."""
        assert self._process.stdin
        try:
            self._process.stdin.write(f"{command}\n".encode())
            self._process.stdin.flush()
        except OSError as error:
            raise Gone(f"{self.entry.name}: {error}") from None

    def answer(self, timeout: float = 60.0) -> dict[str, Any]:
        """The answer to what was told.

        Raises:
            Gone: there is none, and will be none: the process is ended.
        """
        assert self._process.stdout
        line = b""
        if select.select([self._process.stdout], [], [], timeout)[0]:
            line = self._process.stdout.readline()
        if not line:
            self.close()
            lines = self._log.read_text().strip().splitlines()
            raise Gone(f"{self.entry.name}: {lines[-1] if lines else 'never returned'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()  # an adapter holds nothing worth a farewell
        self._process.wait()


@contextlib.contextmanager
def field(urls: Sequence[str], entries: Sequence[Entry] = FIELD) -> Iterator[list[Contestant]]:
    """Run the contestants, those peers that can run here; say which cannot, and why."""
    with contextlib.ExitStack() as stack:
        running = []
        for entry in entries:
            try:
                contestant = Contestant(entry, urls)
            except Unavailable as why:
                if entry.requirement is None:
                    raise  # it is ours, or the limit: no peer whose package could not be had
                print(f"skipped: {entry.label}: {why}", flush=True)
                continue
            stack.callback(contestant.close)
            running.append(contestant)
        yield running
