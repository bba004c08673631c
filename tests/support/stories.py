"""Events of the demonstration, as its journals hold them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def event(what: str, at: float, pid: int = 1, **facts: object) -> Event:
    return {"what": what, "at": at, "pid": pid, **facts}


def sent(task: str, order: int = 1) -> Event:
    return event("sent", 0.0, task=task, order=order)


def body(
    task: str, begin: float, end: float | None, *, pid: int = 10, order: int = 1
) -> Iterator[Event]:
    yield event("enter", begin, pid, order=order, task=task, seconds=1.0)
    if end is not None:
        yield event("exit", end, pid, order=order, task=task)


def node(at: float, index: int, up: bool) -> Event:
    return event("node", at, node=index, up=up)


FIVE_UP = [node(0.0, index, True) for index in range(5)]


def plant(directory: Path, *events: Event) -> subprocess.CompletedProcess[str]:
    with open(directory / "planted.journal", "a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    command = [sys.executable, "-m", "celery_redlock.demo.checker", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)
