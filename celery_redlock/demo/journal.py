"""What happened, written down by those it happened to.

Every process appends to a file of its own, one line per event, each line one `write()`: a line is
there or it is not, whoever is killed when. Times are CLOCK_MONOTONIC, which all processes of a
machine share.

The events: `sent`, `wait` (a charge was refused its lock, and waits in its child), `away` (it
waited too long, and was sent again for later), `enter`, `exit`, `failed` (a body that raised),
`kill` (of a pool child), `node` (up or down), `ready` (the worker), `beat` (up or killed), `tick`
(the periodic job ran; with the time at which, and the beat by which, its message was sent).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Journal", "Reader"]

SUFFIX = ".journal"


class Journal:
    """Writes the events of this process into a directory that others share."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._pid = 0
        self._file = -1

    def write(self, what: str, at: float | None = None, **facts: Any) -> None:
        """Append one event.

        Args:
            what: Its kind.
            at: When, in seconds of CLOCK_MONOTONIC; now if None.
            **facts: What else there is to know.
        """
        at = time.monotonic() if at is None else at
        if self._pid != os.getpid():  # at first, and in a pool child: its own file
            self._pid = os.getpid()
            path = self._directory / f"{self._pid}{SUFFIX}"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        line = json.dumps({"what": what, "at": at, "pid": self._pid, **facts})
        os.write(self._file, line.encode() + b"\n")


class Reader:
    """Reads what all processes have written; again and again, each time only what is new."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._offsets: dict[Path, int] = {}

    def new(self) -> list[dict[str, Any]]:
        """The events that were written since the last call, by time."""
        events = []
        for path in self._directory.glob(f"*{SUFFIX}"):
            events += list(self._read(path))
        return sorted(events, key=lambda event: float(event["at"]))

    def _read(self, path: Path) -> Iterator[dict[str, Any]]:
        with open(path, "rb") as file:
            file.seek(self._offsets.get(path, 0))
            for line in file:
                if line.endswith(b"\n"):
                    self._offsets[path] = self._offsets.get(path, 0) + len(line)
                    yield json.loads(line)
