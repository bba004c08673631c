"""Faults of this campaign. Each act is a generator: it yields seconds to wait, then heals."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Mapping

from tests.campaign.publishing.stage import TTL
from tests.campaign.worker.acts import Acts, LinkActs
from tests.campaign.worker.crew import Steps
from tests.campaign.worker.node_acts import NodeActs
from tests.campaign.worker.worker_acts import WorkerActs
from tests.support.network import REQUESTS

PURGE = "purge"
START = 60.0
"""Seconds for a program to start and to end, on a machine that is busy."""
PAUSED = "a node stops while two have no vote"
WARM, COLD, KILL = "worker restart, warm", "worker restart, cold", "worker kill -9"


class PublishingActs(NodeActs, LinkActs, WorkerActs):
    """Faults of nodes, of links of workers, of workers, and of the queue."""

    TRACKS: Mapping[str, Mapping[str, int]] = {
        "nodes": {"stop_one": 3, "forget": 2, "stop_in_guard": 2},
        "network": {"delay": 1, "reset": 1, "cut_producer": 2},
        "processes": {
            "warm_all": 4,
            "cold_all": 1,
            "warm": 2,
            "cold": 1,
            "kill_worker": 1,
            "purge_idle": 0,
        },
        "load": {},
    }

    act = Acts.act

    def stop_one(self) -> Steps:
        """SIGSTOP a node for a while."""
        node = self.choose.choice(self.stage.nodes)
        with self.chronicle.fault("node stop", nodes=self._numbers([node])):
            try:
                node.pause()
                yield self.choose.uniform(0.3, 2.0)
            finally:
                node.resume()

    def forget(self) -> Steps:
        """kill -9 a node that comes back empty, at once."""
        node = self.choose.choice(self.stage.nodes[2:])
        with self.chronicle.fault("node kill, back empty", nodes=self._numbers([node])):
            node.kill()
            node.start()
            yield 1.5 * TTL  # another that forgets meanwhile would be one too many

    def stop_in_guard(self) -> Steps:
        """Stop a third node for a moment while two that were killed have no vote."""
        two, third = self.stage.nodes[2:4], self.stage.nodes[4]
        with self.chronicle.fault("node kill, back empty", nodes=self._numbers(two)):
            for node in two:
                node.kill()
                node.start()
            yield 0.3
            third.pause()
            try:
                # Ends before the node goes on, which then answers what a beat has asked it.
                with self.chronicle.fault(PAUSED, nodes=self._numbers([*two, third])):
                    for number in range(4):
                        self.stage.call("plain", f"n{number}")
                    yield 0.6
            finally:
                third.resume()
            yield 1.5 * TTL

    def reset(self) -> Steps:
        """Reset all present connections in the middle of a reply.

        A later worker is not affected.
        """
        yield from super().reset()
        for worker in self.stage.workers:
            for link in worker.links:
                link.breaks = 0

    def cut_producer(self) -> Steps:
        """Cut a producer off from a majority of nodes, which its workers still reach."""
        producer = self.choose.choice(self.stage.producers)
        links = producer.links[: len(producer.links) // 2 + 1]
        with self.chronicle.fault("producer cut"):
            try:
                for link in links:
                    link.held = {REQUESTS}
                yield self.choose.uniform(0.5, 1.5)
            finally:
                for link in links:
                    link.held = set()

    def warm_all(self) -> Steps:
        """End all workers at once, as for a new release, and start them again."""
        yield from self._deploy(WARM, signal.SIGTERM)

    def cold_all(self) -> Steps:
        """End all workers at once in the middle of their bodies, and start them again."""
        yield from self._deploy(COLD, signal.SIGQUIT)

    def _deploy(self, kind: str, number: int, meanwhile: Iterable[float] = ()) -> Steps:
        workers = [worker for worker in self.stage.workers if worker.ready]
        with contextlib.ExitStack() as stack:
            for worker in workers:
                stack.enter_context(self.chronicle.fault(kind, worker, pid=worker.pid))
            try:
                self._ended.update(workers)
                for worker in workers:
                    worker.signal(number)
                for _look in range(200):
                    if not any(worker.alive for worker in workers):
                        break
                    yield 0.1
                yield from meanwhile
            finally:
                for worker in workers:
                    self._again(worker)
            for worker in workers:
                yield from self._up(worker)

    def purge_idle(self) -> Steps:
        """Purge the queue while no worker runs."""
        yield from self._deploy(WARM, signal.SIGTERM, self._purge())
        yield 2.0

    def _purge(self) -> Steps:
        yield 1.5
        with self.chronicle.fault(PURGE):
            purger = self.stage.purger(by_command=self.choose.random() < 0.5)
            try:
                while purger.poll() is None:
                    yield 0.1
            finally:
                assert purger.wait(START) == 0, "the purge failed: see purge.log"
