"""Faults of an etcd cluster of three. Each act is a generator: it waits, then heals."""

from __future__ import annotations

import contextlib

from celery_redlock.testing.etcd import LocalEtcd, Member
from tests.campaign.worker.crew import Crew, Steps
from tests.campaign.worker.feeder import RESOURCES
from tests.campaign.worker.stage import TTL
from tests.support import etcd


class EtcdNodeActs(Crew):
    """Faults of etcd, one at a time. Without a leader, the cluster needs a second or two."""

    @property
    def _cluster(self) -> LocalEtcd:
        (cluster,) = self.stage.nodes
        assert isinstance(cluster, LocalEtcd)
        return cluster

    def _some(self, many: int) -> list[Member]:
        return self.choose.sample(self._cluster.members, many)

    def _paused(self, members: list[Member], seconds: float, what: str) -> Steps:
        with self._fault(what):
            try:
                for member in members:
                    member.pause()
                yield seconds
            finally:
                for member in members:
                    member.resume()
                self._cluster.start()  # waits until all serve

    def _kill(self, many: int, longest: float, what: str) -> Steps:
        """kill -9 so many members while bodies run and others wait.

        They are back at once or later.
        """
        wanted = self.choose.sample(RESOURCES, 3)
        yield from self._busy(*wanted, seconds=2 * TTL)
        self._contend(*wanted)
        seconds = self.choose.choice((0.0, self.choose.uniform(0.0, longest)))
        members = self._some(many)
        with self._fault(what):
            try:
                for member in members:
                    member.kill()
                yield seconds
            finally:
                self._cluster.start()

    def pause_member(self) -> Steps:
        """SIGSTOP of one, be it the leader."""
        wanted = self.choose.sample(RESOURCES, 3)
        yield from self._busy(*wanted, seconds=2 * TTL)
        self._contend(*wanted, many=3)
        yield from self._paused(self._some(1), self.choose.uniform(0.3, 3 * TTL), "member stop")

    def kill_member(self) -> Steps:
        """kill -9 of one, be it the leader; back at once or later."""
        yield from self._kill(1, 2 * TTL, "member kill -9")

    def pause_server(self) -> Steps:
        """SIGSTOP of all."""
        self._contend(self.choose.choice(RESOURCES), many=3)
        seconds = self.choose.uniform(0.3, 1.5 * TTL)
        yield from self._paused(self._some(3), seconds, "server stop")

    def kill_server(self) -> Steps:
        """kill -9 of all."""
        yield from self._kill(3, TTL, "server kill -9")

    def lose_majority(self) -> Steps:
        """Pause two members for less than a ttl, or for more, while bodies run."""
        seconds, kind = yield from self._majority_lost("two of three")
        yield from self._paused(self._some(2), seconds, kind)

    def deafen(self) -> Steps:
        """Delete all keys that listeners have put with a lease, so no notification reaches them."""
        self._contend(self.choose.choice(RESOURCES), many=5)
        yield 0.2
        with self._fault("listeners gone"), contextlib.suppress(Exception):
            start = b"redlock:#line:"
            etcd.ask(
                self._cluster, "kv/deleterange", key=etcd.text(start), range_end=etcd.above(start)
            )
        yield 0.0
