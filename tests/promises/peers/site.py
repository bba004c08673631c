"""A cluster whose sender has the tasks it sends, and a look at the keys they leave."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from celery_redlock import Redlock
from celery_redlock.server import LocalServer
from tests.promises.peers.project import define
from tests.support.cluster import SOON, Cluster
from tests.support.wait import wait_until


class Site(Cluster):
    def __init__(self, nodes: list[LocalServer], broker: LocalServer, path: Path) -> None:
        super().__init__(nodes, broker, path, tasks="tests.promises.peers.at_work")
        self.task = define(self.app, self.log)

    def close(self) -> None:
        Redlock.from_app(self.app).close()
        super().close()

    @contextlib.contextmanager
    def sender(self, **conf: Any) -> Any:
        """The tasks of another sender, with another configuration."""
        with Celery("tests.promises.peers.sender", set_as_current=False) as app:
            app.conf.update({**self.conf, **conf})
            yield define(app, self.log)
            Redlock.from_app(app).close()

    def taken(self, text: str) -> dict[tuple[int, bytes], bytes | None]:
        """All that lies on the nodes whose name holds `text`: locks and reservations, by node."""
        found = {}
        for node in self.nodes:
            with redis.Redis(port=node.port) as client:  # not as the user of the locks
                for name in client.scan_iter(count=1000):
                    # A place in the wait queue is neither.
                    if text.encode() in name and not name.endswith(b"#line"):
                        found[node.port, name] = client.get(name)
        return found

    def reserved(self, text: str) -> bool:
        """Return True if a quorum holds a reservation."""
        names = [name for _port, name in self.taken(text) if name.endswith(b"#reserved")]
        return len(names) > len(self.nodes) // 2

    def nothing_left(self, text: str, within: float = SOON, most: int = 0) -> None:
        """Wait until neither a lock nor a reservation is left on any node, or on `most` of them."""

        def is_so() -> bool:
            nodes = Counter(name for _port, name in self.taken(text))
            return max(nodes.values(), default=0) <= most

        wait_until(is_so, within, "nothing is left", every=0.02, seen=lambda: self.taken(text))

    def as_new(self, key: str, within: float = SOON, most: int = 0) -> None:
        """Check that nothing is left of a key, and that its next task is published and runs.

        Args:
            key: The key.
            within: Seconds to wait for that.
            most: On how many nodes something may be left: a body that was killed may not yet have
                been connected to all that its producer had asked.
        """
        self.nothing_left(key, within, most)
        runs = len(self.runs(key))
        sent = self.task.work.delay(key)
        assert self.result(sent) == "done"
        assert len(self.runs(key, sent)) == 1
        assert len(self.runs(key)) == runs + 1
        self.nothing_left(key, most=most)
        self.settled()
