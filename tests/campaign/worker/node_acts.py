"""Faults of nodes. Each act is a generator: it yields seconds to wait, then heals."""

from __future__ import annotations

import contextlib

import redis

from celery_redlock.server import LocalServer
from tests.campaign.worker.crew import Crew, Steps
from tests.campaign.worker.feeder import RESOURCES
from tests.campaign.worker.stage import TTL


class NodeActs(Crew):
    """Faults of nodes, one at a time."""

    def _numbers(self, nodes: list[LocalServer]) -> tuple[int, ...]:
        return tuple(sorted(self.stage.nodes.index(node) for node in nodes))

    def _some(self, count: int = 0) -> list[LocalServer]:
        return self.choose.sample(self.stage.nodes, count or self.choose.choice((1, 2)))

    def _command(self, node: LocalServer, *words: str | int) -> None:
        client = redis.Redis(port=node.port, socket_timeout=1.0)
        with contextlib.suppress(redis.RedisError):
            client.execute_command(*words)
        client.close()

    def pause_nodes(self, count: int = 0, seconds: float = 0.0, kind: str = "node stop") -> Steps:
        """SIGSTOP."""
        nodes = self._some(count)
        self._contend(self.choose.choice(RESOURCES), many=3)
        with self.chronicle.fault(kind, nodes=self._numbers(nodes)):
            try:
                for node in nodes:
                    node.pause()
                yield seconds or self.choose.uniform(0.3, 1.5 * TTL)
            finally:
                for node in nodes:
                    node.resume()

    def restart_with_memory(self) -> Steps:
        """kill -9; back with all that was written."""
        node = self.choose.choice(self.stage.nodes[:2])
        with self.chronicle.fault("node kill, back with memory", nodes=self._numbers([node])):
            try:
                node.kill()
                yield self.choose.choice((0.0, self.choose.uniform(0.0, TTL)))
            finally:
                node.start()

    def restart_empty(self) -> Steps:
        """kill -9; back empty, at once (it has no vote for a ttl) or after more than a ttl."""
        nodes = self.choose.sample(self.stage.nodes[2:], self.choose.choice((1, 2)))
        at_once = self.choose.random() < 0.7
        kind = "node kill, back empty " + ("at once" if at_once else "after a ttl")
        with self.chronicle.fault(kind, nodes=self._numbers(nodes)):
            try:
                for node in nodes:
                    node.kill()
                yield 0.0 if at_once else 1.1 * TTL
            finally:
                for node in nodes:
                    node.start()
        yield 1.1 * TTL  # another that forgets meanwhile would be one too many

    def client_pause(self) -> Steps:
        node = self.choose.choice(self.stage.nodes)
        with self.chronicle.fault("CLIENT PAUSE", nodes=self._numbers([node])):
            seconds = self.choose.uniform(0.1, TTL)
            self._command(node, "CLIENT", "PAUSE", int(seconds * 1000))
            yield seconds

    def client_kill(self) -> Steps:
        for node in self._some():
            with self.chronicle.fault("CLIENT KILL", nodes=self._numbers([node])):
                self._command(node, "CLIENT", "KILL", "TYPE", "normal")
        yield 0.0

    def script_flush(self) -> Steps:
        for node in self._some():
            with self.chronicle.fault("SCRIPT FLUSH", nodes=self._numbers([node])):
                self._command(node, "SCRIPT", "FLUSH")
        yield 0.0

    def flush(self) -> Steps:
        """FLUSHALL on a node: breaks a premise.

        Harmless alone to holders of more than three nodes.
        """
        node = self.choose.choice(self.stage.nodes)
        with self.chronicle.fault("FLUSHALL", nodes=self._numbers([node])):
            self._command(node, "FLUSHALL")
        yield 1.1 * TTL

    def lose_majority(self) -> Steps:
        """Lose the majority, for less than a ttl or for more."""
        seconds, kind = yield from self._majority_lost("majority")
        yield from self.pause_nodes(self.choose.choice((3, 4)), seconds, kind)

    def forget_one_of_three(self) -> Steps:
        """Kill two nodes for long; when they come back, empty, restart a third, empty, at once.

        A holder granted meanwhile had three votes, and now has two. Only the restart guard keeps
        the three nodes from granting its lock to another.
        """
        nodes = self.choose.sample(self.stage.nodes[2:], 3)
        wanted = self.choose.sample(RESOURCES, 4)
        with self.chronicle.fault("three of five forget, at once", nodes=self._numbers(nodes)):
            try:
                for node in nodes[:2]:
                    node.kill()
                yield 0.5 * TTL
                yield from self._busy(*wanted, seconds=2.5 * TTL)
                yield 0.6 * TTL
                self._contend(*wanted, many=3)
            finally:
                nodes[2].kill()
                for node in nodes:
                    node.start()
        yield 1.2 * TTL
