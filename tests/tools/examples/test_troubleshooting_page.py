"""docs/troubleshooting.md: each command prints what the page shows, after the steps before it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_redlock import Redlock
from celery_redlock.server import LocalServer, start_servers
from tests.support.nodes import make_known
from tests.support.recipes import ROOT, celery
from tests.support.wait import wait_until

pytestmark = pytest.mark.worker

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
APP, *_ = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
WORK = """
def work(name):
    import pathlib, time
    pathlib.Path(f"begun-{name}").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.02)
"""

VARIES = {
    pattern: pattern
    for pattern in (
        r"\[[-\d]+ [\d:,]+:",
        r"ForkPoolWorker-\d",
        r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
        r"token [0-9a-f]{8}",
        r"(?<=~)[0-9a-f]{12}",
        r"(?<=pid )\d+",
        r"\b[\d.]+ s\b",
        r"(?<=\()\d(?= nodes)",
        r"(?<=3/3 )[\d. ]+",
    )
}
"""Patterns of what differs from run to run, and of what may stand there instead."""
VARIES |= {
    r"web-1 \d+ ": r"\S+ \d+ ",
    r"web-1": r"\S+",
    r"10\.0\.0\.\d:6379": r"127\.0\.0\.1:\d+",
}
VARYING = re.compile("|".join(f"({part})" for part in VARIES))


def pattern_of(line: str) -> str:
    """A pattern for a line of the page as another run prints it."""
    spaced, end, parts = " ".join(line.split()), 0, []
    for found in VARYING.finditer(spaced):
        assert found.lastindex is not None
        parts += [re.escape(spaced[end : found.start()]), [*VARIES.values()][found.lastindex - 1]]
        end = found.end()
    return "".join([*parts, re.escape(spaced[end:])])


class Lab:
    """A directory with the page's `shop.py`, whose bodies go on until a file `go` is there."""

    def __init__(self, directory: Path, nodes: list[LocalServer], broker: LocalServer) -> None:
        self.directory = directory
        text = APP.replace("redis://10.0.0.9:6379/0", broker.url).replace("5.0", "1.0")
        urls = [node.url for node in nodes]
        text, count = re.subn(r"\[f\"redis.*\]$", repr(urls), text, flags=re.M)
        assert count == 1
        text, count = re.subn(r"(def (\w+)\(\w+\)): \.\.\.", r"\1: work('\2')", text)
        assert count == 3
        (directory / "shop.py").write_text(WORK + text)
        names: dict[str, Any] = {"__name__": "shop"}
        exec(WORK + text, names)
        self.app: Any = names["app"]

    def call(self, name: str, *args: Any) -> Any:
        Redlock.from_app(self.app).connect(10.0)  # the page shows all nodes, not only a quorum
        return self.app.tasks[f"shop.{name}"].delay(*args)

    def begun(self, name: str) -> None:
        wait_until((self.directory / f"begun-{name}").exists, 30.0, f"{name} is at work")

    def run(self, commands: str) -> str:
        """Return the output of commands of the page, run by a shell in this directory."""
        path = [str(Path(sys.executable).parent), os.environ["PATH"]]
        done = subprocess.run(
            ["bash", "-c", commands],
            cwd=self.directory,
            env={**os.environ, "PATH": os.pathsep.join(path), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.stdout + done.stderr

    def shows(self, command: str, **given: str) -> str:
        """Run a command of the page until it prints the lines below it, in their order.

        A claim that `ls` lists ends shortly before the next one begins.
        """
        found = re.search(
            rf"^```sh\n({re.escape(command)}.*?)^```$.*?^```text\n(.*?)^```$", PAGE, re.M | re.S
        )
        assert found, command
        commands, expected = found[1], found[2].replace("every-5s", "every-1s")
        for name, value in given.items():
            assert name in commands
            commands = commands.replace(name, value)
        printed = ""

        def is_shown() -> bool:
            nonlocal printed
            printed = self.run(commands)
            lines = iter([" ".join(line.split()) for line in printed.splitlines()])
            return all(
                any(re.search(pattern, seen) for seen in lines)
                for pattern in map(pattern_of, expected.splitlines())
            )

        wait_until(is_shown, 10.0, f"this is shown:\n{expected}", seen=lambda: printed)
        return printed


@pytest.fixture
def lab(servers: list[LocalServer], server: LocalServer, tmp_path: Path) -> Iterator[Lab]:
    make_known(servers)
    lab = Lab(tmp_path, servers[:3], server)
    yield lab
    lab.app.close()


WORKER = ("worker", "-c", "2", "-l", "INFO", "--without-gossip", "--without-mingle")


def test_troubleshooting_shows_that_nodes_just_started_have_no_vote(
    server: LocalServer, tmp_path: Path
) -> None:
    with start_servers(3) as started:
        lab = Lab(tmp_path, started, server)
        lab.shows("celery -A shop redlock ls\n")
        lab.app.close()


def test_troubleshooting_shows_a_skipped_task_and_the_keys_of_two_calls(lab: Lab) -> None:
    with celery(lab.directory, "worker", *WORKER) as worker:
        worker.said(" ready.", 60.0)
        lab.call("charge", 7)
        lab.begun("charge")
        skipped = lab.call("remind", 7)
        wait_until(skipped.ready, 30.0, "it is skipped")
        lab.shows("celery -A shop result", TASK_ID=skipped.id)
        lab.shows("grep 'is skipped'")
        lab.shows("celery -A shop redlock explain shop.charge")
        lab.shows("grep -E 'tasks are locked on")
        (lab.directory / "go").touch()


def test_troubleshooting_shows_the_call_that_a_duplicate_is_of(lab: Lab) -> None:
    first, second = lab.call("rebuild", 3), lab.call("rebuild", 3)
    assert first.id == second.id
    assert first.id in lab.shows("celery -A shop redlock explain shop.rebuild")


def test_troubleshooting_shows_the_lock_of_a_killed_worker_until_its_ttl_is_over(lab: Lab) -> None:
    with celery(lab.directory, "worker", *WORKER) as worker:
        worker.said(" ready.", 60.0)
        lab.call("charge", 11)
        lab.begun("charge")
        worker.kill()
    left = [
        float(re.findall(r"([\d.]+) s left", lab.shows("celery -A shop redlock show"))[0])
        for _ in range(2)
    ]
    assert 30.0 > left[0] > left[1] > 0.0


def test_troubleshooting_shows_why_a_beat_sends_nothing(
    lab: Lab, servers: list[LocalServer]
) -> None:
    beat_of = ("beat", "-l", "INFO", "--pidfile=", "-s")
    with celery(lab.directory, "beat", *beat_of, str(lab.directory / "one")) as beat:
        beat.said("each tick is sent by one beat", 60.0)
        with celery(lab.directory, "other", *beat_of, str(lab.directory / "two")):
            beat.said("was sent by", 60.0)
        before = len(beat.text)
        wait_until(lambda: "is a duplicate" in beat.text[before:], 60.0, "it sends a duplicate")
        lab.shows("celery -A shop redlock ls --kind tick")
        for node in servers[:2]:
            node.pause()
        try:
            beat.said("held back until there is one", 60.0)
            lab.shows("grep -E 'held back")
        finally:
            for node in servers[:2]:
                node.resume()
