"""The example of periodic tasks: two beats and a worker, as its reader runs them; one is killed."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest
import redis

from celery_redlock.server import LocalServer
from tests.support import forked
from tests.support.example import EXAMPLES, worker
from tests.support.wait import wait_until

EVERY = 2.0
"""The interval of the example's entries, in seconds."""
PAUSED = """
import sys
from datetime import timedelta
sys.path.append(sys.argv[2])
from beat import app
from celery.beat import PersistentScheduler
scheduler = PersistentScheduler(app, schedule_filename=sys.argv[1])
scheduler.schedule["close the books"].last_run_at -= timedelta(hours=1)
scheduler.close()
"""
"""Makes the schedule file of a beat that has not run for an hour: no need to wait for a minute."""


class Beat:
    """A `celery -A beat beat` of the example's docstring."""

    def __init__(self, environment: dict[str, str], directory: Path, name: str) -> None:
        self.begun = time.time()
        self.log = directory / f"{name}.log"
        schedule = str(directory / f"{name}.schedule")
        (directory / "pause.py").write_text(PAUSED)
        pause = (str(directory / "pause.py"), schedule, str(EXAMPLES))
        code, said = forked.run(*pause, cwd=directory, env=environment)
        assert code == 0, said
        command = [sys.executable, "-m", forked.MODULE, "-A", "beat", "beat", "--loglevel", "INFO"]
        command += ["--pidfile=", "-s", schedule]
        with open(self.log, "wb") as output:
            self.process = forked.start(command, cwd=EXAMPLES, env=environment, output=output)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def sent(self, entry: str) -> list[float]:
        """Return when the log says that it sends this entry; seconds since the epoch."""
        lines = re.findall(rf"\[(.*?): INFO.*Sending due task {entry} ", self.log.read_text())
        return [datetime.strptime(line, "%Y-%m-%d %H:%M:%S,%f").timestamp() for line in lines]


@pytest.fixture
def beats(environment: dict[str, str], tmp_path: Path) -> Iterator[list[Beat]]:
    with contextlib.ExitStack() as stack:
        both = []
        for name in ("first", "second"):
            both.append(Beat(environment, tmp_path, name))
            stack.callback(both[-1].kill)
        yield both


def test_example_beats_send_each_tick_once_and_miss_no_dead_beat(
    environment: dict[str, str], servers: list[LocalServer], beats: list[Beat], tmp_path: Path
) -> None:  # fmt: skip
    begin = min(beat.begun for beat in beats)

    def kept() -> bool:
        """Return True if the last tick's claim is kept: its sender has ended its turn."""
        quorum = 0
        for node in servers:
            with redis.Redis(port=node.port) as client:
                keys = client.keys("redlock:beat:*fetch*")
                quorum += any(client.pttl(key) > EVERY / 2 * 1000 for key in keys)
        return quorum >= 3

    def sent(entry: str) -> list[float]:
        return sorted(moment for beat in beats for moment in beat.sent(entry))

    def received(task: str) -> int:
        return len(re.findall(rf"Task beat\.{task}\[\S+\] received", log.read_text()))

    def was_refused(beat: Beat) -> bool:
        return "fetch mail (every-2s) " in beat.log.read_text()

    with worker("beat", environment, tmp_path / "log") as log:
        wait_until(lambda: len(sent("fetch mail")) >= 2, 30, "two ticks")
        wait_until(lambda: any(map(was_refused, beats)), 10, "one beat saw the other send")
        assert [beat.process.poll() for beat in beats] == [None, None]

        so_far = len(sent("fetch mail"))
        wait_until(lambda: len(sent("fetch mail")) > so_far, 20, "one of them sends once more")
        last = max(beats, key=lambda beat: max(beat.sent("fetch mail"), default=0.0))
        (other,) = (beat for beat in beats if beat is not last)
        wait_until(
            lambda: received("fetch_mail") == len(sent("fetch mail")), 10, "the message has come"
        )
        wait_until(kept, 10, "its claim is kept")
        last.kill()
        before = len(other.sent("fetch mail"))
        wait_until(lambda: len(other.sent("fetch mail")) >= before + 2, 20, "the other goes on")
        wait_until(lambda: log.read_text().count("index: end") >= 2, 20, "the index is built")
        assert other.process.poll() is None
        other.kill()
        end = time.time()

    # An interval, through the death of a beat: neither twice nor left out.
    gaps = [after - before for before, after in pairwise(sent("fetch mail"))]
    assert all(EVERY / 2 < gap < EVERY * 2 for gap in gaps), gaps
    # A due time: the one that was missed in both beats' pause, and perhaps a full minute since.
    minutes = int(end // 60) - int(begin // 60)
    assert 1 <= received("close_books") <= 1 + minutes
    # The pair: ticks that met a run are skipped, and runs follow each other.
    told = log.read_text()
    runs = re.findall(r"index: (begin|end)", told)
    assert runs[:4] == ["begin", "end", "begin", "end"]
    assert all(one != two for one, two in pairwise(runs)), runs
    assert re.search(
        r"beat\.rebuild_index\[\S+\] is skipped: index is held by beat.rebuild_index", told
    )
