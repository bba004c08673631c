"""The stage of `tests.campaign.worker`, with producers: each has a slow way to one node."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from tests.campaign.worker import stage, stores
from tests.campaign.worker.journal import Pen
from tests.support import forked
from tests.support.network import Link
from tests.support.program import Program

TTL = 4.0
"""Seconds. Of the locks, and thus for which a node that was just started has no vote."""
POOLS: dict[str, tuple[str, ...]] = {"one": ("-c", "2"), "threads": ("-P", "threads", "-c", "4")}
"""The workers, and what they are started with."""
DELAYS = (0.01, 0.1)
"""Seconds that each producer's way to one node takes, there and back each."""


class Stage(stage.Stage):
    """With producers. As of `tests.campaign.worker.stage.Stage`, whose arguments it takes."""

    project = "tests.campaign.publishing.project"

    def __enter__(self) -> Stage:
        super().__enter__()
        self._pen, self._sent = Pen(str(self.bodies), "nemesis"), 0
        self.producers = [
            self._stack.enter_context(Producer(self, number)) for number in range(len(DELAYS))
        ]
        return self

    def call(self, task: str, key: str) -> None:
        """Send a task that reserves nothing, from here, and write that down as a producer does."""
        self._sent += 1
        number, what = f"n-{self._sent}", f"{task}:{key}"
        self._pen.write("call", "", number, what)
        sent = self.app.send_task(f"{self.project}.{task}", args=(key, number, 0.05))
        self._pen.write("gave", sent.id, number, what)

    def purger(self, *, by_command: bool) -> subprocess.Popen[bytes]:
        """Start a program that purges the queue, by Celery's command or by a call."""
        program = f"from {self.project} import app; app.control.purge()"
        by_call = [sys.executable, "-c", program]
        command = [sys.executable, "-m", "celery", "-A", self.project, "purge", "-f"]
        conf = {**self.conf, "redlock_nodes": [node.url for node in self.nodes]}
        with open(self.path / "purge.log", "ab") as output:
            return forked.start_anew(
                command if by_command else by_call,
                cwd=stage.ROOT,
                env=self.environment("purger", conf),
                output=output,
            )

    def environment(self, name: str, conf: dict[str, Any]) -> dict[str, str]:
        """Return that of a process that runs the project."""
        return {
            **super().environment(name, conf),
            "TEST_MUTANT": "",
            "TEST_PLANTED": self.mutant,
        }


class Producer(Program):
    """A process that calls tasks. A context manager.

    Attributes:
        links: Its links to the nodes, in their order; the one by its number is slow.
    """

    def __init__(self, here: Stage, number: int) -> None:
        super().__init__(f"p{number}", here.path / f"producer-{number}.log")
        self._stage = here
        self._number = number
        self.links: list[Link] = []

    def __enter__(self) -> Producer:
        here = self._stage
        self.links = [
            here.network.link(node.port, f"{self.name}/{number}")
            for number, node in enumerate(here.nodes)
        ]
        self.links[self._number % len(self.links)].delay = DELAYS[self._number]
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()

    def start(self, seed: int, seconds: float) -> None:
        """Let it call tasks for some seconds."""
        here = self._stage
        nodes = zip(here.nodes, self.links, strict=True)
        conf = {
            **here.conf,
            "broker_url": here.broker.url,
            "redlock_nodes": [stores.url_at(node, link.port) for node, link in nodes],
        }
        command = [sys.executable, "-m", "tests.campaign.publishing.producer"]
        command += [self.name, str(seed), str(seconds)]
        self.begins()
        with open(self.output, "ab") as output:
            self.process = forked.start_anew(
                command, cwd=stage.ROOT, env=here.environment(self.name, conf), output=output
            )
