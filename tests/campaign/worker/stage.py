"""The stage of a campaign: nodes, a broker that remembers, real workers, links between.

Two of five Redis nodes write every change to disk and come back with all they knew; three come back
empty. Or the one node is a PostgreSQL database: see `stores.py`. Every worker reaches every node
over a link of its own. Results are kept on a server that nothing happens to: they are evidence.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from celery import Celery

from celery_redlock.server import LocalServer
from tests.campaign.worker import stores
from tests.campaign.worker.broker import broker as make_broker
from tests.campaign.worker.journal import Journal
from tests.support import forked
from tests.support.network import Link, Network
from tests.support.program import Program

ROOT = Path(__file__).parents[3]
PROJECT = "tests.campaign.worker.project"
TTL = 2.0
"""Seconds."""
BACKOFF_MAX = 1.0
"""Seconds until a task that met a held lock tries again, at most."""
HELPED = "threads"
"""The worker that has an extender process, which frees what it held when it is killed."""
POOLS: dict[str, tuple[str, ...]] = {
    "one": ("-c", "2"),
    "two": ("-c", "2", "--max-tasks-per-child", "60"),
    HELPED: ("-P", "threads", "-c", "4"),
}
"""The workers, and what they are started with. Children seldom end, as Celery itself may leave a
task for 5 s with one that has just done so; a mutant and a test of the supervisor see to that."""
MORE_POOLS: dict[str, tuple[str, ...]] = {
    **POOLS,
    "two": ("--autoscale", "3,1", "--max-tasks-per-child", "40"),
    "green": ("-P", "gevent", "-c", "6"),
}
"""Pools of a long campaign."""
SLOTS = {"one": 2, "two": 2, HELPED: 4, "green": 6}
"""Bodies that each worker runs at a time."""


class Stage:
    """Everything that is needed, started and, in the end, gone. A context manager.

    Args:
        path: For logs and journals.
        seed: Of the links' jitter.
        mutant: The bug to plant into the workers, or none.
        pools: The workers to start.
        broker: One of `BROKERS`.
        store: One of `STORES`.
        **conf: More of their configuration.

    Attributes:
        project: The module of the app that the workers run.
    """

    project = PROJECT

    def __init__(
        self,
        path: Path,
        seed: int,
        *,
        mutant: str = "",
        pools: dict[str, tuple[str, ...]] = POOLS,
        broker: str = "redis",
        store: str = "redis",
        **conf: Any,
    ) -> None:
        self.path = path
        self.bodies = path / "bodies"
        self.bodies.mkdir(parents=True)
        self.journal = Journal(self.bodies)
        self.mutant = mutant
        self.store = store
        self.nodes = stores.make_nodes(store)
        self.broker = make_broker(broker)
        # Which server stands behind each node's address, where it is not always the same one.
        self.standing: list[Any] = []
        self.results = LocalServer()
        self._given = conf
        self._seed = seed
        self._pools = pools
        self._stack = contextlib.ExitStack()
        self.workers: list[Worker] = []

    def __enter__(self) -> Stage:
        with contextlib.ExitStack() as stack:
            for server in (*self.nodes, self.results):
                stores.prepare(stack.enter_context(server))
            stack.enter_context(self.broker)
            self.conf: dict[str, Any] = {
                "broker_url": self.broker.url,
                "result_backend": self.results.url,
                "broker_connection_retry_on_startup": True,
                "broker_connection_max_retries": None,
                **self.broker.conf,
                "worker_prefetch_multiplier": 1,
                "worker_cancel_long_running_tasks_on_connection_loss": False,
                "redlock_ttl": TTL,
                "redlock_wait": 0.2,
                "redlock_retry_backoff": 0.2,
                "redlock_fencing": True,
                # One node is not guarded by default.
                **({} if self.store == "redis" else {"redlock_restart_guard": "uptime"}),
                "redlock_retry_backoff_max": BACKOFF_MAX,
                **self._given,
            }
            self.standing = list(self.nodes)
            self.app = Celery("tests.campaign.worker.sender", set_as_current=False)
            self.app.conf.update({**self.conf, "result_backend": None})
            self.network = network = stack.enter_context(Network())
            for name, arguments in self._pools.items():
                links = [
                    network.link(node.port, f"{self._seed}/{name}/{number}")
                    for number, node in enumerate(self.nodes)
                ]
                way = network.link(self.broker.port, f"{self._seed}/{name}/broker")
                worker = Worker(self, name, arguments, links, way)
                stack.callback(worker.kill)
                self.workers.append(worker)
                worker.start()
            self._stack = stack.pop_all()
        return self

    def producer(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a process that publishes: see `producer.py`. It ends with this one."""
        conf = {**self.conf, "redlock_nodes": [node.url for node in self.nodes]}
        environment = self.environment("producer", {**conf, "broker_url": self.broker.url})
        command = [sys.executable, "-m", "tests.campaign.worker.producer", *arguments]
        with open(self.path / "producer.log", "ab") as output:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def environment(self, name: str, conf: dict[str, Any]) -> dict[str, str]:
        """Return the environment of a process that runs the project."""
        return {
            **os.environ,
            "TEST_CONF": json.dumps(conf),
            "TEST_JOURNAL": str(self.bodies),
            "TEST_WORKER": name,
            "TEST_MUTANT": self.mutant,
            "PYTHONPATH": str(ROOT),
            "PYTHONFAULTHANDLER": "1",
        }

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self.app.close()


class Worker(Program):
    """A worker by one name; its process changes when it is restarted.

    Attributes:
        name: See `POOLS`.
        links: Its links to the nodes, in their order.
        way: Its link to the broker.
    """

    def __init__(
        self, stage: Stage, name: str, arguments: tuple[str, ...], links: list[Link], way: Link
    ) -> None:
        super().__init__(name, stage.path / f"worker-{name}.log")
        self.stage = stage
        self.links = links
        self.way = way
        self._arguments = arguments

    @property
    def prefork(self) -> bool:
        return "-P" not in self._arguments

    @property
    def ready(self) -> bool:
        """Return True if it takes tasks."""
        return self.alive and not self.stopped and " ready." in self.newest

    def start(self) -> None:
        self.begins()
        nodes = zip(self.stage.nodes, self.links, strict=True)
        urls = [stores.url_at(node, link.port) for node, link in nodes]
        conf = {**self.stage.conf, "redlock_nodes": urls}
        conf["broker_url"] = self.stage.broker.url_at(self.way.port)
        if self.name == HELPED:
            conf["redlock_keeper"] = "process"
        if self.name == "two":
            conf["worker_soft_shutdown_timeout"] = 1.0  # what is a cold shutdown elsewhere
        environment = self.stage.environment(self.name, conf)
        command = forked.celery(self.stage.project, "worker", *forked.QUIET)
        command += ["-n", f"{self.name}@faults", *self._arguments]
        command += ["-Q", f"celery,only-{self.name}"]
        with open(self.output, "ab") as output:
            # Mutants are planted, and traces begun, before others import what they change.
            self.process = forked.start_anew(command, cwd=ROOT, env=environment, output=output)

    def children(self, *, helper: bool = False) -> list[int]:
        """The pids of its pool's processes; or of its helper."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [
                child.pid
                for child in psutil.Process(self.pid).children(recursive=True)
                if ("celery_redlock.keepalive.sidecar" in child.cmdline()) is helper
            ]
        return []
