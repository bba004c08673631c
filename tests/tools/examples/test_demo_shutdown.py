"""A signal ends the demonstration soon, but never while a process is being started or removed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from celery_redlock.demo.display import Display
from celery_redlock.demo.processes import NODES, SIGNALS, Stage, note_signals


@pytest.fixture
def came() -> Iterator[list[int]]:
    before = {name: signal.getsignal(name) for name in SIGNALS}
    yield note_signals()
    for name, handler in before.items():
        signal.signal(name, handler)


def stage(directory: Path, came: list[int]) -> Stage:
    """Return a stage whose servers need not run."""
    servers: Any = [SimpleNamespace(url=f"redis://127.0.0.1:{n + 1}") for n in range(NODES + 1)]
    return Stage(directory, servers[:NODES], servers[NODES], Display(), came)


@pytest.mark.parametrize("name", SIGNALS)
def test_signal_ends_the_next_wait_of_the_demo_with_its_exit_code(
    name: signal.Signals, came: list[int], tmp_path: Path
) -> None:
    it = stage(tmp_path, came)
    signal.raise_signal(name)
    started = "the process whose pid is noted"  # nothing is interrupted outside of a wait
    with pytest.raises(SystemExit) as exit_:
        it.elapse(10.0)
    assert exit_.value.code == 128 + name and started


def test_second_signal_does_not_disturb_the_removal(came: list[int], tmp_path: Path) -> None:
    removed = []
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(SystemExit) as exit_:
        try:
            stage(tmp_path, came).elapse(10.0)
        finally:
            signal.raise_signal(signal.SIGTERM)
            removed.append("everything")
    assert removed and exit_.value.code == 128 + signal.SIGINT
