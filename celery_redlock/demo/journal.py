"""What happened, written down by the processes that it happened to.

Every process appends to its own file, one line an event, each line one `write()`: a line is there
or it is not, whichever process is killed when. Times are CLOCK_MONOTONIC, which all processes of a
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
from pathlib import Path
from typing import Any

__all__ = ["Journal", "Reader"]


class Journal:
    """Writes the events of this process into a directory that others share."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)

    def write(self, what: str, at: float | None = None, **facts: Any) -> None:
        """Append one event; `at` is in seconds of CLOCK_MONOTONIC, now if None."""
        pid = os.getpid()  # asked each time: a pool child is a fork, and has its own file
        event = {"what": what, "at": time.monotonic() if at is None else at, "pid": pid, **facts}
        with open(self._directory / f"{pid}.journal", "ab", buffering=0) as file:
            file.write(json.dumps(event).encode() + b"\n")


class Reader:
    """Reads what all processes have written, each time only what is new."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._offsets: dict[Path, int] = {}

    def new(self) -> list[dict[str, Any]]:
        """Return the events that were written since the last call, by time."""
        events = []
        for path in self._directory.glob("*.journal"):
            with open(path, "rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole = [line for line in file if line.endswith(b"\n")]
            self._offsets[path] = self._offsets.get(path, 0) + sum(map(len, whole))
            events += [json.loads(line) for line in whole]
        return sorted(events, key=lambda event: float(event["at"]))
