"""Facts about the machine that the tests rely on: its stalls, and which programs are missing."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.support import machine, wanting
from tests.support.names import Patch
from tests.support.wait import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stalls(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Write the watcher's file: one stall of 0.4 s, from second 10 on."""
    path = tmp_path / "stalls"
    path.write_text("10.0 10.4\n")
    monkeypatch.setenv(machine.VARIABLE, str(path))
    return path


def test_in_time_is_as_strict_as_its_bound_without_a_stall(stalls: Path) -> None:
    machine.in_time(20.0, 20.9, 1.0, "it")
    with pytest.raises(AssertionError, match=r"it took 1\.100 s, and not less than 1\.0 s"):
        machine.in_time(20.0, 21.1, 1.0, "it")


def test_in_time_allows_longer_by_the_stalls_of_the_machine(stalls: Path) -> None:
    machine.in_time(9.5, 11.0, 1.0, "it")
    with pytest.raises(AssertionError, match=r"stood still for 0\.395 s"):
        machine.in_time(9.5, 13.0, 1.0, "it")


def test_watcher_of_the_machine_sees_that_it_was_stopped(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """The watcher is stopped as if the machine gave it no core."""
    path = tmp_path / "seen"
    begin = time.monotonic()
    monkeypatch.setenv(machine.VARIABLE, "")
    watcher = machine.watch(str(path))
    try:
        wait_until(path.exists, 30.0, "it watches")
        watcher.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        watcher.send_signal(signal.SIGCONT)
        wait_until(lambda: machine.stalled(begin) >= 0.15, 30.0, "it has seen that")
    finally:
        watcher.kill()
        watcher.wait()


def test_advice_names_every_program_that_tests_look_for() -> None:
    texts = {path: path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    for path, text in texts.items():
        for name in re.findall(r"which\(\"([\w.-]+)\"\)", text):
            assert name in wanting.PACKAGES, f"{path} looks for {name}"


def test_continuous_integration_installs_every_program_that_tests_look_for() -> None:
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    for name, packages in wanting.PACKAGES.items():
        missing = rf"(command -v {name} >/dev/null|\[ -e \S+/{name}\.jar \])"
        added = re.escape(f"packages+=({' '.join(packages)})")
        assert re.search(rf"{missing} \|\| {added}", script), name
