"""The processes of the demonstration, and the operations on them.

One thread runs the demonstration. Whenever it waits for something, `Stage.until` reads the journal
and refreshes the display. There, and nowhere else, it also exits if a signal came: an exception
between the start of a process and the record of its pid would leave that process behind.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from celery import Celery

from celery_redlock import NotAcquired, Redlock
from celery_redlock.demo.display import Display
from celery_redlock.demo.journal import INTERVAL, Body, Journal, Story, Tick
from celery_redlock.server import LocalServer

if TYPE_CHECKING:
    from celery_redlock.testing.etcd import LocalEtcd
    from celery_redlock.testing.postgresql import LocalPostgres

__all__ = ["BEATS", "CHARGES", "NODES", "SIGNALS", "Stage", "note_signals"]

T = TypeVar("T")

NODES, CHILDREN, BEATS = 5, 4, 2
ORDERS, CHARGES = 10, 200
LONG = "charge-000"
"""A charge that takes longer than the ttl, so that its lock must be extended. It is sent first."""
SCRIPT_HOLDS_S = 0.12
"""Seconds that the script holds a lock: as long as a short charge takes."""
SCRIPT_ASKS_S = 0.1
"""Seconds until the plain script has surely been refused the lock; it takes a few milliseconds."""
TIME_LIMIT_S = 55.0
"""Seconds after which unfinished charges count as lost: the demonstration takes under a minute."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def note_signals() -> list[int]:
    """Only record Ctrl-C and similar signals from now on; return the list they go to."""
    came: list[int] = []
    for name in SIGNALS:
        signal.signal(name, lambda signum, _frame: came.append(signum))
    return came


class Stage:
    """The running processes, and the operations on them."""

    def __init__(
        self,
        directory: Path,
        nodes: Sequence[LocalServer | LocalPostgres | LocalEtcd],
        broker: LocalServer,
        display: Display,
        signals: list[int],
        *,
        locks: bool = True,
        late: float = 0.0,
    ) -> None:
        self.directory = directory
        self.nodes, self.broker = nodes, broker
        self.display = display
        self.story = Story()
        self._signals = signals
        self._journal = Journal(directory)
        self._began = time.monotonic()
        self._redlock = Redlock([node.url for node in self.nodes], ttl=3.0, restart_guard="off")
        self._locks, self._late = locks, late
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._down: set[int] = set()
        self.back = "without its memory" if len(nodes) > 1 else "with all that it had committed"

    def start_worker_and_beats(self) -> None:
        """Start a prefork worker and the beats; wait until it takes tasks and they tick."""
        self._journal.write("quorum", nodes=len(self.nodes) // 2 + 1, late=self._late)
        for index in range(len(self.nodes)):
            self._journal.write("node", node=index, up=True)
        worker = ["--pool", "prefork", "--concurrency", str(CHILDREN), "--queues", "celery,ticks"]
        worker += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        self._start("worker", "worker", *worker)
        for beat in range(1, BEATS + 1):
            schedule = self.directory / f"beat-{beat}-schedule"
            self._start(f"beat-{beat}", "beat", "--schedule", str(schedule), DEMO_BEAT=str(beat))
        self.until(lambda: self.story.ready, 20.0, "the worker to be ready")
        self.until(lambda: len(self.story.beats) == BEATS, 20.0, "the beats to be ready")

    def _start(self, name: str, command: str, *arguments: str, **environment: str) -> None:
        environment = {
            **os.environ,
            "DEMO_BROKER": self.broker.url,
            "DEMO_NODES": " ".join(node.url for node in self.nodes),
            "DEMO_JOURNAL": str(self.directory),
            "DEMO_LOCKS": "yes" if self._locks else "no",
            "TMPDIR": str(self.directory),  # the worker is killed in the end, and leaves its files
            **environment,
        }
        celery = [sys.executable, "-m", "celery", "-A", "celery_redlock.demo.app"]
        with open(self.directory / f"{name}.log", "wb") as log:
            # In a session of its own, so that Ctrl-C reaches only us, and we end it. If we die,
            # its stdin closes.
            self._processes[name] = subprocess.Popen(
                [*celery, command, "--loglevel", "INFO", *arguments],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop_worker_and_beats(self) -> None:
        """End the worker and all its children, and the beats, whatever they do."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def flood(self) -> None:
        """Send all charges."""
        dice = random.Random(CHARGES)
        charges = [f"charge-{n:03d}" for n in range(1, CHARGES)]
        dice.shuffle(charges)
        with Celery("flood", broker=self.broker.url, set_as_current=False) as app:
            for task in [LONG, *charges]:
                order = int(task[-3:]) % ORDERS + 1
                seconds = 4.0 if task == LONG else dice.uniform(0.12, 0.42)
                self._journal.write("sent", task=task, order=order)
                app.send_task("charge", (order, seconds), task_id=task, ignore_result=True)

    def kill_node(self, index: int) -> None:
        """Kill a server like `kill -9`. A Redis server loses its data."""
        at = time.monotonic()  # PostgreSQL answers nothing from here; all its processes end later
        self.nodes[index].kill()
        self._journal.write("node", at, node=index, up=False)
        self._down.add(index)
        of = len(self.nodes)
        up = of - len(self._down)
        what = f"{up} of {of} are left" if up > of // 2 else "no quorum: nothing may start"
        self.display.event(f"node {index + 1} is killed, {what}")

    def start_node(self, index: int) -> None:
        """Bring a server back; a Redis server is then empty."""
        self._journal.write("node", node=index, up=True)
        self.nodes[index].start()
        self._down.discard(index)
        self.display.event(f"node {index + 1} is back, {self.back}")

    def kill_child(self) -> None:
        """Kill a pool child (`kill -9`) in a body, while a plain script waits for its lock.

        Repeat it if the body had ended before the signal came.
        """
        while not self._kill_body():
            pass

    def _kill_body(self) -> bool:
        victim = self.until(self._victim, 10.0, "a body to be killed")
        script = threading.Thread(target=self._script, args=(victim.order,), daemon=True)
        script.start()
        self.elapse(SCRIPT_ASKS_S)
        if victim.ending == "running":
            self._journal.write("kill", child=victim.pid)
            os.kill(victim.pid, signal.SIGKILL)
            self.display.event(f"pool child {victim.pid} is killed in {victim.task}")
        self.until(lambda: not script.is_alive(), 12.0, "the plain script to have its turn")
        return victim.ending == "killed"

    def _victim(self) -> Body | None:
        """Return a body of a pool child with some time left, but not much."""
        now = time.monotonic()
        for body in self.story.running():
            if body.pid != os.getpid() and 0.2 < body.begin + body.seconds - now < 1.0:
                return body
        return None

    def _script(self, order: int) -> None:
        """Wait for the same lock as a plain script does, with `Redlock` and without Celery."""
        facts: dict[str, Any] = {"order": order, "task": f"script for order {order}"}
        with contextlib.suppress(NotAcquired), self._redlock.lock(f"order:{order}", wait=10.0):
            self._journal.write("enter", seconds=SCRIPT_HOLDS_S, **facts)
            time.sleep(SCRIPT_HOLDS_S)
            self._journal.write("exit", **facts)

    def kill_beat(self) -> None:
        """Kill the beat that has just sent a tick (`kill -9`); another must send the next one."""

        def just_sent() -> Tick | None:
            now = time.monotonic()
            tick = max(self.story.ticks.values(), key=lambda tick: tick.sent, default=None)
            return tick if tick and now - tick.sent < 0.6 * INTERVAL else None

        beat = self.until(just_sent, 10.0, "a tick").beat
        process = self._processes.pop(f"beat-{beat}")
        self._journal.write("beat", beat=beat, up=False)
        process.kill()
        process.wait()
        self.display.event(f"beat {beat} is killed, {BEATS - 1} is left")

    def until(self, condition: Callable[[], T | None], timeout: float, what: str) -> T:
        """Wait for a condition, and show events meanwhile.

        Raises:
            TimeoutError: It did not become true; also when the whole takes too long.
            RuntimeError: The worker or a beat has ended by itself.
            SystemExit: A signal has come.
        """
        deadline = min(time.monotonic() + timeout, self._began + TIME_LIMIT_S)
        while True:
            if self._signals:
                raise SystemExit(128 + self._signals[0])
            self.story.tell(self._journal.new())
            self.display.show(self.story, time.monotonic())
            result = condition()
            if result:
                return result
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited too long for {what}")
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} has ended")
            time.sleep(0.02)

    def work_on(self, charges: int) -> None:
        """Wait until this many more charges are done."""
        goal = min(len(self.story.done()) + charges, CHARGES)
        self.until(lambda: len(self.story.done()) >= goal, 15.0, f"{charges} more charges")

    def elapse(self, seconds: float) -> None:
        """Let time pass."""
        over = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= over, seconds + 1.0, "time to pass")
