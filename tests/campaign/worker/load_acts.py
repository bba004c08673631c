"""Faults of the broker, and load. Each act is a generator: it waits, then heals."""

from __future__ import annotations

import contextlib

from tests.campaign.worker.crew import Crew, Steps
from tests.campaign.worker.feeder import HOT, READ, RESOURCES, SELDOM_WRITTEN
from tests.campaign.worker.journal import now
from tests.campaign.worker.messages import ORPHAN
from tests.campaign.worker.stage import SLOTS
from tests.support.network import REPLIES, REQUESTS


class LoadActs(Crew):
    """Slots that are taken, keys that many want, connections to the broker that end."""

    def busy_slots(self) -> Steps:
        """Fill all slots of a worker with other tasks while many want one key.

        Messages for it lie in the shared queue, so the busy worker gets some of them too.
        """
        up = [worker for worker in self.stage.workers if worker.ready]
        if len(up) < 2:
            return
        worker = self.choose.choice(up)
        with self.chronicle.fault("slots taken") as fault:
            fault.kind = f"slots taken, {worker.name}"
            seconds = self.choose.uniform(2.5, 5.0)
            resource = self.choose.choice(RESOURCES[:HOT])
            self._contend(resource, many=4)
            for _slot in range(SLOTS[worker.name]):
                self.feeder.fill(worker.name, seconds)
            yield 0.3
            self._contend(resource, many=20)
            yield seconds

    def flood(self) -> Steps:
        """Send a great many short tasks for one key."""
        with self.chronicle.fault("flood"):
            self._contend(
                self.choose.choice(RESOURCES), many=self.choose.choice((100, 300)), seconds=0.02
            )
            yield 8.0

    def stream(self) -> Steps:
        """Send readers of one key, each before the last has ended, and a few writers between them.

        Only one writer for the key that nobody else writes: it waits for as long as readers pass
        it, and the readers behind it have no other writer to wait for.
        """
        resource = self.choose.choice(READ)
        if not self.feeder.is_read(resource):
            return
        with self.chronicle.fault("stream of readers"):
            for number in range(14):
                self.feeder.send(resource, 1.5, task="reading")
                if number == 3 or (resource != SELDOM_WRITTEN and number in (8, 13)):
                    # Its body runs until the next reader is sent.
                    self.feeder.send(resource, 0.5, task="writing")
                yield 0.4

    def restart_busy(self) -> Steps:
        """Stop a worker while one body runs long and many deliveries wait there."""
        self._contend(*self.choose.sample(RESOURCES, 2), many=12, seconds=0.3)
        for worker in self.stage.workers:
            self.feeder.fill(worker.name, 7.0)
        yield 0.3
        yield from self.warm()  # type: ignore[attr-defined]

    def drop_broker(self) -> Steps:
        """Drop the connections of one worker to its broker, or of all workers."""
        all_of_them = self.choose.random() < 0.3
        workers = self.stage.workers if all_of_them else [self.choose.choice(self.stage.workers)]
        self._contend(self.choose.choice(RESOURCES), many=8)
        yield 0.2
        with contextlib.ExitStack() as stack:
            for worker in workers:
                stack.enter_context(self.chronicle.fault("broker connections dropped", worker))
                worker.way.drops = True
            yield 0.2
        yield 2.0

    def cut_broker(self) -> Steps:
        """Cut one worker off from its broker, both ways or one."""
        worker = self.choose.choice(self.stage.workers)
        with self.chronicle.fault("broker cut", worker):
            try:
                worker.way.held = self.choose.choice(({REQUESTS, REPLIES}, {REQUESTS}, {REPLIES}))
                yield self.choose.uniform(0.5, 3.0)
            finally:
                worker.way.heal()
        yield 1.0

    def restart_broker(self) -> Steps:
        with self.chronicle.fault("broker restart"):
            try:
                self.stage.broker.kill()
                yield self.choose.uniform(0.0, 1.0)
            finally:
                self.stage.broker.start()
            yield 0.5

    def revoke_later(self) -> Steps:
        """Send tasks with an ETA, and revoke some before it."""
        resource = self.choose.choice(RESOURCES)
        with self.chronicle.fault("ETA tasks revoked"):
            sent = [self.feeder.later(resource, self.choose.uniform(1.5, 3.0)) for _n in range(4)]
            yield 0.5
            for one in sent[:2]:
                one.expected = "revoked"
                with contextlib.suppress(Exception):  # the broker may be away
                    self.stage.app.control.revoke(one.id)
            yield 3.0

    def kill_producers(self) -> Steps:
        """Kill producers anywhere in `delay()`; then a living one calls the same task."""
        with self.chronicle.fault("producer kill -9") as fault:
            for _time in range(3):
                process = self.stage.producer()
                fault.pid = process.pid
                try:
                    for _look in range(400):
                        if any(p.pid == process.pid for p in self.stage.journal.processes()):
                            break
                        yield 0.05
                    yield self.choose.uniform(0.1, 1.0)
                finally:
                    process.kill()
                    process.wait()
            yield ORPHAN + 0.5
            process = self.stage.producer("1")
            try:
                for _look in range(600):
                    if process.poll() is not None:
                        break
                    yield 0.05
            finally:
                process.kill()
                process.wait()
        yield 1.0

    def purge(self) -> Steps:
        """Purge the queue, as an operator may."""
        with self.chronicle.fault("purge"):
            with contextlib.suppress(Exception):
                self.stage.app.control.purge()
            until = now()
            for sent in self.feeder.waiting():
                if sent.at <= until and not sent.expected:
                    sent.expected = "purged"
            yield 0.5
