"""A campaign over ZooKeeper: holders under faults of servers, of sessions and of themselves.

    python -m tests.campaign.worker.zookeeper SECONDS SEED

Servers are stopped and killed, one, two or all;
sessions are ended; holders are killed and stopped. Then no two bodies of one key have relied on
their locks at the same time, fencing tokens grow, and after each fault a key is granted again.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
from celery import Celery

from celery_redlock.runtime.clock import monotonic
from celery_redlock.server import LocalServer
from tests.support.wait import wait_until
from tests.support.zookeeper import LocalZooKeeper

TTL = 5.0
HOLDERS = 4
EVERY_S = 0.3
"""Seconds between two tasks for the worker."""
HEALED_S = 6 * TTL
"""Seconds after a fault within which some key is granted again: a session lasts two ttls."""


class Span(NamedTuple):
    """The time in which a body relied on a lock."""

    begin: float
    end: float
    fence: int
    where: str


class Campaign:
    """Servers, holders, and what is done to them.

    Args:
        seed: The seed of all choices.
        path: A directory for the holders' logs.
    """

    def __init__(self, seed: int, path: Path) -> None:
        self.choose = random.Random(seed)
        self.servers = LocalZooKeeper(3, TTL)
        self.path = path
        self.faults: dict[str, int] = {}
        self.broker = LocalServer()
        self._holders: dict[int, subprocess.Popen[bytes]] = {}
        self._worker: subprocess.Popen[bytes] | None = None
        self._started = 0
        self._over = threading.Event()

    def run(self, seconds: float) -> list[str]:
        """Run for so many seconds; return what was wrong."""
        wrong = []
        with self.servers, self.broker:
            feeder = threading.Thread(target=self._feed)
            try:
                for number in range(HOLDERS):
                    self._start(number)
                self._start_worker()
                feeder.start()
                wait_until(lambda: [*self.path.glob("body-*.log")], 60.0, "tasks run")
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    time.sleep(self.choose.uniform(0.5, 2.0))
                    name = self.choose.choice(ACTS)
                    self.faults[name] = self.faults.get(name, 0) + 1
                    getattr(self, f"_{name}")()
                    if not self._granted_since(monotonic()):
                        wrong.append(f"nothing was granted within {HEALED_S:g} s after: {name}")
            finally:
                self._over.set()
                for holder in self._holders.values():
                    holder.kill()
                    holder.wait()
                self._end_worker()
                feeder.join()
        return wrong + judge(self.path)

    def _start(self, number: int) -> None:
        self._started += 1
        path = self.path / f"{number}-{self._started}.log"
        path.touch()
        command = [sys.executable, "-m", "tests.campaign.worker.zookeeper_holder", self.servers.url]
        self._holders[number] = subprocess.Popen([*command, str(path), str(self._started)])

    def _start_worker(self) -> None:
        environment = {
            **os.environ,
            "CAMPAIGN_BROKER": self.broker.url,
            "CAMPAIGN_NODES": self.servers.url,
            "CAMPAIGN_LOGS": str(self.path),
        }
        module = "tests.campaign.worker.zookeeper_tasks"
        command = [sys.executable, "-m", "celery", "-A", module, "worker", "-P", "prefork"]
        with (self.path / "worker.out").open("ab") as log:
            self._worker = subprocess.Popen(
                [*command, "-c", "2"], env=environment, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def _end_worker(self) -> None:
        if self._worker is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._worker.pid, signal.SIGKILL)
            self._worker.wait()

    def _feed(self) -> None:
        """Send tasks, until the campaign is over."""
        choose = random.Random()
        with Celery(broker=self.broker.url, set_as_current=False) as app:
            while not self._over.wait(EVERY_S):
                arguments = choose.choice(("a", "b", "c")), choose.uniform(0.0, 1.0)
                app.send_task("body", arguments, expires=10.0, ignore_result=True)

    def _children(self) -> list[psutil.Process]:
        assert self._worker is not None
        return psutil.Process(self._worker.pid).children()

    def _granted_since(self, since: float) -> bool:
        until = time.monotonic() + HEALED_S
        while time.monotonic() < until:
            for path in self.path.glob("*.log"):
                begun = [
                    line.split() for line in path.read_text().splitlines() if " begin " in line
                ]
                if begun and float(begun[-1][0]) > since:
                    return True
            time.sleep(0.1)
        return False

    # -- Faults; each heals before it returns

    def _server(self) -> None:
        (one,) = self.choose.sample(self.servers.members, 1)
        self._away([one], self.choose.uniform(0.3, 2 * TTL))

    def _servers(self) -> None:
        some = self.choose.sample(self.servers.members, self.choose.choice((2, 3)))
        self._away(some, self.choose.uniform(0.3, 3 * TTL))

    def _away(self, members: list[object], seconds: float) -> None:
        kills = self.choose.random() < 0.5
        for member in members:
            (member.kill if kills else member.pause)()  # type: ignore[attr-defined]
        time.sleep(seconds)
        for member in [] if kills else members:
            member.resume()  # type: ignore[attr-defined]
        self.servers.start()

    def _session(self) -> None:
        os.kill(self.choose.choice(list(self._holders.values())).pid, signal.SIGUSR1)
        time.sleep(0.5)

    def _holder(self) -> None:
        number = self.choose.randrange(HOLDERS)
        self._holders[number].kill()
        self._holders[number].wait()
        self._start(number)

    def _child(self) -> None:
        if children := self._children():
            self.choose.choice(children).kill()

    def _all_of_worker(self) -> None:
        self._end_worker()
        self._start_worker()

    def _stop_child(self) -> None:
        for child in self._children()[:1]:
            child.suspend()
            time.sleep(self.choose.uniform(0.5, 4 * TTL))
            child.resume()

    def _pause(self) -> None:
        pid = self.choose.choice(list(self._holders.values())).pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.choose.uniform(0.5, 4 * TTL))
        os.kill(pid, signal.SIGCONT)


ACTS = ("server", "servers", "session", "holder", "pause", "child", "all_of_worker", "stop_child")


def judge(path: Path) -> list[str]:
    """Return what is wrong in the logs of all holders."""
    wrong: list[str] = []
    spans = spans_in(path, wrong)
    for name, found in spans.items():
        found.sort()
        for one, other in itertools.pairwise(found):
            if other.begin < one.end:
                wrong.append(f"{name}: {one} and {other} overlap")
            if other.fence <= one.fence:
                wrong.append(f"{name}: {other} has no greater fencing token than {one}")
    return wrong


def spans_in(path: Path, wrong: list[str]) -> dict[str, list[Span]]:
    """Return the times in which each key was relied on; errors are added to `wrong`."""
    spans: dict[str, list[Span]] = {}
    for log in sorted(path.glob("*.log")):
        begun: tuple[float, str, int] | None = None
        ended = 0.0  # when its session was ended before its time
        for line in log.read_text().splitlines():
            at, what, name, *rest = line.split(" ")
            if what == "begin":
                begun = float(at), name, int(rest[0])
            elif what == "end" and begun is not None:
                end = min(float(rest[0]), ended) if ended > begun[0] else float(rest[0])
                span = Span(begun[0], end, begun[2], log.name)
                spans.setdefault(name, []).append(span)
                begun = None
            elif what == "ended":
                ended = float(at)
            elif what == "error" and name != "LeaseLost":
                wrong.append(f"{log.name}: {line}")
        if begun is not None:  # killed: it relied on it for a moment at least
            spans.setdefault(begun[1], []).append(Span(begun[0], begun[0], begun[2], log.name))
    return spans


def main() -> None:
    """Run a campaign of so many seconds."""
    seconds, seed = float(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory() as directory:
        campaign = Campaign(seed, Path(directory))
        wrong = campaign.run(seconds)
        spans = spans_in(Path(directory), [])
        bodies = sum(map(len, spans.values()))
        tasks = sum(span.where.startswith("body") for some in spans.values() for span in some)
        print(
            f"seed {seed}, {seconds:g} s: {bodies} bodies, {tasks} of them of tasks, faults"
            f" {campaign.faults}"
        )
        print("\n".join(wrong) or "nothing is wrong")
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
