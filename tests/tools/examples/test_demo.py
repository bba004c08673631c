"""The demonstration on real servers, worker and beats: it holds, and it leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest

from celery_redlock.demo.checker import Verdict
from celery_redlock.demo.journal import Journal, Story
from tests.support import etcd, postgres
from tests.support.nodes import TOKEN
from tests.support.wait import wait_until

MARK = "CELERY_REDLOCK_TEST_MARK"


class Demo:
    """A run of the demonstration: all its processes bear a mark, all its files lie in one place."""

    def __init__(self, directory: Path) -> None:
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self.directory = directory
        self.output = directory / "output"
        self._mark = uuid.uuid4().hex

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            MARK: self._mark,
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": os.getcwd(),
            **environment,
        }
        with open(self.output, "wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "celery_redlock.demo", *arguments],
                cwd=self.directory,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def processes(self) -> list[str]:
        """Return the processes of it that still run."""
        found = []
        for process in psutil.process_iter():
            try:
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get(MARK) == self._mark:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found

    def kill(self, process: subprocess.Popen[bytes], command: str) -> None:
        """`kill -9` its worker's main process, or one of its beats."""
        children = psutil.Process(process.pid).children()
        next(child for child in children if command in child.cmdline()).kill()

    def until_it_works(self) -> None:
        """Wait until children run bodies, so that there is something to be left behind."""

        def bodies() -> bool:
            return any(
                Story(Journal(path).new()).bodies for path in self.temporary.glob("redlock-demo-*")
            )

        wait_until(bodies, 60, "the first bodies")


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    yield Demo(tmp_path)


def test_demo_holds_in_under_a_minute_and_says_so(demo: Demo) -> None:
    process = demo.start("--out", "kept/here", "--keep")
    assert process.wait(timeout=120) == 0, demo.said()
    said = demo.said()
    assert "bodies of one order that overlapped .......... 0\n" in said
    assert "charges lost ................................. 0 of 200\n" in said
    assert "bodies killed in the middle .................. 2\n" in said
    assert "ticks sent twice ............................. 0\n" in said
    assert "ticks sent without a quorum .................. 0\n" in said
    timeline = demo.directory / "kept" / "here" / "demo-timeline.svg"
    assert str(timeline) in said
    assert "Traceback" not in said
    kept = [path.read_text("utf-8", "replace") for path in demo.directory.rglob("kept/**/*.*")]
    assert len(kept) > 2 and not any(TOKEN.search(text) for text in [said, *kept])

    story = Story(Journal(timeline.parent).new())
    assert {body.task for body in story.bodies} >= story.sent.keys()
    assert max(Verdict(story).blocked) < 1.0  # seconds; by its ttl alone it would be about three
    ((since, until),) = story.dark()
    assert until - since > 2
    assert [event for event in story.away if event["why"] == "no quorum"]

    ticks = Verdict(story).ticks
    ((dead, at),) = ticks.deaths.items()
    assert sorted(ticks.counts) == [1, 2]
    assert ticks.counts[dead] > 0  # it had sent some, and the other one went on
    assert sum(tick.sent > at for tick in story.ticks.values()) > 5

    texts = [text.text or "" for text in ElementTree.parse(timeline).iter() if text.text]
    assert sum(", pid " in text for text in texts) == len(story.bodies)

    assert demo.processes() == []
    assert list(demo.temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("store", [postgres, etcd], ids=["postgresql", "etcd"])
def test_demo_holds_over_one_server(demo: Demo, store: Any, request: pytest.FixtureRequest) -> None:
    store.require()
    temporary = Path(tempfile.mkdtemp())  # root's own server cannot come to pytest's
    temporary.chmod(0o755)
    arguments = ("--store", request.node.callspec.id, "--out", "kept", "--keep")
    process = demo.start(*arguments, TMPDIR=str(temporary))
    assert process.wait(timeout=120) == 0, demo.said()
    said = demo.said()
    assert "bodies of one order that overlapped .......... 0\n" in said
    assert "charges lost ................................. 0 of 200\n" in said
    assert "ticks sent twice ............................. 0\n" in said
    assert "is back, with all that it had committed" in said
    story = Story(Journal(demo.directory / "kept").new())
    _at_once, (since, until) = story.dark()
    assert until - since > 2
    assert demo.processes() == []
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("store", ["PostgreSQL", "etcd"])
def test_demo_without_the_server_of_its_store_says_what_to_install(demo: Demo, store: str) -> None:
    nowhere = {f"CELERY_REDLOCK_{store.upper()}": str(demo.directory)}
    process = demo.start("--store", store.lower(), **nowhere)
    assert process.wait(timeout=120) == 1
    assert f"No {store} server was found: install one (apt install" in demo.said()
    assert "Traceback" not in demo.said()


@pytest.mark.slow
def test_demo_without_locks_fails(demo: Demo) -> None:
    process = demo.start("--without-locks")
    assert process.wait(timeout=120) == 1
    said = demo.said()
    assert "bodies of one order that overlapped .......... 0\n" not in said
    assert re.search(r"overlap on order \d+ .*<-- FAILED", said)
    assert re.search(r"bodies started without a quorum \.+ [1-9]\d* +<-- FAILED", said)
    assert re.search(r"ticks sent twice \.+ [1-9]\d* +<-- FAILED", said)
    assert re.search(r"ticks sent without a quorum \.+ [1-9]\d* +<-- FAILED", said)
    assert re.search(r"^FAILED$", said, re.MULTILINE)
    for log in ("worker.log", "beat-1.log", "beat-2.log"):
        assert f"the last lines of {log}" in said
    assert demo.processes() == []


@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_demo_ended_by_a_signal_leaves_nothing(demo: Demo, name: str) -> None:
    """While it is still starting; that it may work, see where one of its processes dies."""
    process = demo.start()
    wait_until(lambda: list(demo.temporary.glob("*/worker.log")), 20, "a worker is being started")
    assert len(demo.processes()) > 6
    process.send_signal(signal.Signals[name])
    assert process.wait(timeout=120) == 128 + signal.Signals[name]
    assert demo.processes() == []
    assert list(demo.temporary.iterdir()) == []
    assert "Traceback" not in demo.said()


@pytest.mark.slow
def test_killed_demo_takes_its_processes_with_it(demo: Demo) -> None:
    process = demo.start()
    demo.until_it_works()
    process.kill()
    process.wait()
    wait_until(lambda: not demo.processes(), 10, "servers, worker and beats to be gone", every=0.1)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("worker", "worker has ended"),
        pytest.param("beat", "beat-1 has ended", marks=pytest.mark.slow),
    ],
)
def test_demo_whose_worker_or_beat_dies_fails_and_shows_its_log(
    demo: Demo, command: str, told: str
) -> None:
    process = demo.start("--out", "/proc/nowhere")
    demo.until_it_works()
    demo.kill(process, command)
    assert process.wait(timeout=120) == 1
    said = demo.said()
    assert told in said
    assert "verdict" in said and "no timeline: " in said
    assert "celery@" in said
    assert "beat: Starting" in said
    assert demo.processes() == []
    assert list(demo.temporary.iterdir()) == []


def test_demo_without_a_server_binary_says_what_to_do(demo: Demo) -> None:
    process = demo.start(CELERY_REDLOCK_SERVER="/nowhere/valkey-server")
    assert process.wait(timeout=120) == 1
    assert "CELERY_REDLOCK_SERVER" in demo.said()
    assert "Traceback" not in demo.said()
    assert list(demo.temporary.iterdir()) == []
