"""Common parts of all acts: their victims, and the tasks that they need."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator

from tests.campaign.worker.chronicle import Chronicle, Fault
from tests.campaign.worker.feeder import RESOURCES, Feeder
from tests.campaign.worker.journal import Line, Process, now
from tests.campaign.worker.stage import TTL, Stage, Worker

Steps = Generator[float, None, None]


class Crew:
    """The hands of a nemesis.

    Args:
        stage: What they act on.
        feeder: Publishes what an act needs: bodies to strike, and tasks that wait for their locks.
        chronicle: Where it is written down.
        choose: All choices are made with it.
    """

    def __init__(
        self, stage: Stage, feeder: Feeder, chronicle: Chronicle, choose: random.Random
    ) -> None:
        self.stage = stage
        self.feeder = feeder
        self.chronicle = chronicle
        self.choose = choose
        self._ended: set[Worker] = set()

    def _fault(self, what: str) -> contextlib.AbstractContextManager[Fault]:
        """Note a fault of a store that is one node."""
        return self.chronicle.fault(what, nodes=(0,))

    def _majority_lost(self, who: str) -> Generator[float, None, tuple[float, str]]:
        """Have bodies run; for how long, less than a ttl or more, it is to stand still, and its
        name."""
        long = self.choose.random() < 0.5
        seconds = TTL * (self.choose.uniform(1.5, 2.3) if long else self.choose.uniform(0.2, 0.8))
        yield from self._busy(*self.choose.sample(RESOURCES, 3), seconds=seconds + TTL)
        return seconds, f"{who} stop, {'more' if long else 'less'} than a ttl"

    def _contend(self, *resources: str, many: int = 2, seconds: float = 0.05) -> None:
        """Send tasks that wait for these keys."""
        for resource in resources:
            tasks = ("early", "late", *("reading", "writing") * self.feeder.is_read(resource))
            for _one in range(many):
                self.feeder.send(resource, seconds, task=self.choose.choice(tasks))

    def _busy(
        self, *resources: str, seconds: float, manner: str = "sleep"
    ) -> Generator[float, None, list[tuple[Process, Line]]]:
        """Start bodies of these keys, wait a little, and return those that run."""
        ids = set()
        for resource in resources:
            task = "reading" if self.feeder.is_read(resource) else "early"
            ids.add(self.feeder.send(resource, seconds, manner, task).id)
        found: list[tuple[Process, Line]] = []
        for _look in range(15):
            yield 0.1
            found = [one for one in self._running(prefork=False) if one[1].task in ids]
            if len(found) == len(ids):
                break
        return found

    def _running(self, *, prefork: bool) -> list[tuple[Process, Line]]:
        """Return the bodies that run now: the process and the last line of each."""
        found = []
        up = {worker.pid: worker for worker in self.stage.workers if worker.ready}
        for process, lines in self.stage.journal.read().items():
            worker = up.get(process.main)
            if worker is None or (prefork and not worker.prefork) or not lines:
                continue
            last = lines[-1]
            if last.kind in ("enter", "alive") and now() - last.at < 0.3 and process.alive():
                found.append((process, last))
        return found
