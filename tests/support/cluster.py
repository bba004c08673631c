"""Real workers on real servers, and what a test asks of them."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import redis
from celery import Celery
from celery.backends.redis import RedisBackend
from celery.exceptions import DuplicateNodenameWarning
from celery.result import AsyncResult
from celery.states import READY_STATES

from celery_redlock import Redlock
from celery_redlock.server import LocalServer
from celery_redlock.testing.etcd import LocalEtcd
from celery_redlock.testing.postgresql import LocalPostgres
from tests.support import bodies
from tests.support.bodies import Line, Run
from tests.support.containers import READY as READY
from tests.support.machine import in_time
from tests.support.nodes import lock_url
from tests.support.wait import wait_until
from tests.support.worker import Worker

ROOT = Path(__file__).parents[2]
TASKS = "tests.promises.worker.tasks"
SOON = 1.0
"""Seconds within which a lock must be free after the end, or the death, of its body."""


class PolledBackend(RedisBackend):
    """Where results are asked for; nothing is subscribed to, so nothing outlives a test."""

    def on_task_call(self, producer: Any, task_id: str) -> None:
        pass

    def add_pending_result(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        return result


class Cluster:
    """Lock nodes, a broker, an app to send with, the bodies' log; workers are added to it.

    Args:
        nodes: The lock nodes: five of Redis, or a PostgreSQL database.
        broker: Where results are, and messages unless `broker_url` says otherwise.
        path: A directory for logs.
        broker_url: A broker that is no Redis: see `tests.support.rabbitmq`.
        tasks: The module of the app that the workers run.
        **conf: Settings of Celery and of the locks.
    """

    def __init__(
        self,
        nodes: Sequence[LocalServer | LocalPostgres | LocalEtcd],
        broker: LocalServer,
        path: Path,
        *,
        broker_url: str = "",
        tasks: str = TASKS,
        **conf: Any,
    ) -> None:
        self.nodes = nodes
        self.broker = broker
        self.queue = str(conf.get("task_default_queue", "celery"))
        self.log = str(path / "bodies.log")
        self.path = path
        self.tasks = tasks
        self.conf: dict[str, Any] = {
            "broker_url": broker_url or broker.url,
            "result_backend": broker.url,
            "broker_connection_retry_on_startup": True,
            "redlock_nodes": [lock_url(node) for node in nodes],
            "redlock_restart_guard": "off",  # they have just been started
            "redlock_node_timeout": 0.25,  # here and there: conftest.py has another default
            "redlock_wait": 0.1,
            "redlock_retry_backoff": 0.2,
            "redlock_retry_backoff_max": 0.5,
            "result_extended": True,
            **conf,
        }
        Path(self.log).touch()
        self._lines: list[Line] = []
        self._read = 0
        self._reading = threading.Lock()
        self.app = Celery("tests.promises.worker.sender", set_as_current=False)
        self.app.conf.update(self.conf)
        self.app.conf.result_backend = f"{__name__}:{PolledBackend.__name__}+{broker.url}"
        self.redlock = Redlock([lock_url(node) for node in nodes], ttl=30.0, restart_guard="off")
        self.client = redis.Redis.from_url(broker.url)

    def close(self) -> None:
        self.redlock.close()
        self.client.close()
        self.app.backend.client.close()
        self.app.close()

    # -- tasks ---------------------------------------------------------------------------------

    def signature(self, task: str, *args: Any, **kwargs: Any) -> Any:
        return self.app.signature(f"{self.tasks}.{task}", args=args, kwargs=kwargs)

    def send(self, task: str, *args: Any, **options: Any) -> AsyncResult[Any]:
        return self.app.send_task(f"{self.tasks}.{task}", args=args, **options)

    def result(self, sent: AsyncResult[Any], timeout: float = 10.0) -> Any:
        """Return the result of a task, or raise its exception."""
        self.state(sent, timeout)
        result = self.app.backend.get_task_meta(sent.id)["result"]
        if isinstance(result, BaseException):
            raise result
        return result

    def state(self, sent: AsyncResult[Any], timeout: float = 10.0) -> str:
        """The state a task ends in."""

        def done() -> str | None:
            state = str(self.app.backend.get_task_meta(sent.id, cache=False)["status"])
            return state if state in READY_STATES else None

        return str(wait_until(done, timeout, f"task {sent.id} is done", every=0.01))

    def accepted_by(self, sent: AsyncResult[Any]) -> int | None:
        """The pool child that has begun with a task, if one has."""
        active = self.app.control.inspect(timeout=0.3).active() or {}
        tasks = [task for of_one in active.values() for task in of_one]
        return next((task["worker_pid"] for task in tasks if task["id"] == sent.id), None)

    @contextlib.contextmanager
    def states(self) -> Iterator[dict[str, list[str]]]:
        """All states that tasks go through in this block, by id: the backend announces each."""
        seen: dict[str, list[str]] = {}

        def keep(message: Mapping[str, Any]) -> None:
            meta = json.loads(message["data"])
            seen.setdefault(meta["task_id"], []).append(meta["status"])

        with self.client.pubsub() as pubsub:
            pubsub.psubscribe(**{"*celery-task-meta-*": keep})
            pubsub.get_message(timeout=2.0)
            thread = pubsub.run_in_thread(sleep_time=0.05)
            try:
                yield seen
                # Earlier announcements have been read when this one has.
                self.client.publish("celery-task-meta-end", '{"task_id": "end", "status": ""}')
                wait_until(lambda: seen.pop("end", None), 5.0, "all states are read")
            finally:
                thread.stop()
                thread.join(5.0)

    def settled(self, timeout: float = 20.0) -> None:
        """Wait until no message is anywhere: none lost in a worker, none left in a queue.

        With greenlets, a Celery before 5.7 acknowledges when its loop next turns: in seconds.
        RabbitMQ does not show a client which messages others have not acknowledged, so the workers
        are asked.
        """
        redis_broker = self.conf["broker_url"] == self.broker.url
        wait_until(
            self._redis_is_empty if redis_broker else self._rabbitmq_is_empty,
            timeout,
            "every message is acknowledged",
            every=0.01,
            seen=lambda: self.client.hgetall("unacked"),
        )

    def _redis_is_empty(self) -> bool:
        return not self.client.llen(self.queue) and not self.client.hlen("unacked")

    def _rabbitmq_is_empty(self) -> bool:
        inspect = self.app.control.inspect(timeout=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DuplicateNodenameWarning
            )  # a busy worker may say it twice
            asked = [inspect.active(), inspect.reserved(), inspect.scheduled()]
        at_work = [task for answer in asked for tasks in (answer or {}).values() for task in tasks]
        return not at_work and not self.queued()

    def queued(self) -> int:
        """Return the messages in the queue; with RabbitMQ, those that no consumer has."""
        if self.conf["broker_url"] == self.broker.url:
            return int(self.client.llen(self.queue))
        with self.app.connection_for_read() as connection:
            declared = connection.default_channel.queue_declare(self.queue, passive=True)
            return int(declared.message_count)

    def unpark(self, count: int = 0) -> None:
        """Move the messages of the queue "parked", which no worker reads, to the workers' queue.

        The `count` oldest messages; 0: all.
        """
        while self.client.rpoplpush("parked", "celery") and count != 1:
            count -= 1

    # -- bodies --------------------------------------------------------------------------------

    def lines(self, kind: str | None = None, resource: str | None = None) -> list[Line]:
        with self._reading:
            new, self._read = bodies.read_on(self.log, self._read)
            self._lines += new
        return [
            line
            for line in self._lines
            if kind in (None, line.kind) and resource in (None, line.resource)
        ]

    def runs(self, key: str, task: AsyncResult[Any] | None = None) -> list[Run]:
        """The runs of bodies of `k:<key>`, perhaps only those of one task."""
        return [
            run
            for run in bodies.runs(self.lines(resource=f"k:{key}"))
            if task is None or run.task == task.id
        ]

    def entered(self, key: str, count: int = 1, timeout: float = 10.0) -> Run:
        """Wait for the n-th body of a resource."""
        wait_until(
            lambda: len(self.runs(key)) >= count, timeout, f"body {count} of {key} has begun"
        )
        return self.runs(key)[count - 1]

    def tell(self, key: str) -> None:
        """End a body of this key that waits for the test."""
        Path(f"{self.log}.{key}").touch()

    def check(self, since: float) -> None:
        """Check that no body that began after `since` overlapped another of its resource."""
        found = bodies.overlaps(self.lines())
        assert [(one, two) for one, two in found if two.begin > since] == []

    def contend(self, key: str, wait: float = 30.0, quiet: bool = False) -> Contender:
        return Contender(self, f"k:{key}", wait, quiet)

    def free(self, key: str, within: float = SOON) -> None:
        """The resource can be taken again."""
        begin = time.monotonic()
        self.redlock.release(self.redlock.acquire(f"k:{key}", wait=5 * within))
        if within:
            in_time(begin, time.monotonic(), within, "until it could be taken again")

    # -- workers -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def worker(self, *arguments: str, queue: str = "", **conf: Any) -> Iterator[Worker]:
        worker = Worker(self, arguments, conf, queue or self.queue)
        try:
            worker.ready()
            yield worker
        finally:
            worker.kill()


class Contender:
    """Another who wants the same lock, from now on, and writes into the same log when it has it.

    A quiet one does not write: where a lock may be lost, the oracle is not asked.
    """

    def __init__(self, cluster: Cluster, resource: str, wait: float, quiet: bool = False) -> None:
        self._cluster = cluster
        self._quiet = quiet
        self._resource = resource
        self._wait = wait
        self._error: BaseException | None = None
        self.entered: float | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        if not quiet:
            taken = cluster.redlock.try_acquire(resource) is None
            assert taken, "nobody holds it: the test is void"
        self._thread.start()

    def _run(self) -> None:
        run = uuid.uuid4().hex[:8]
        try:
            with self._cluster.redlock.lock(self._resource, wait=self._wait):
                note = (self._resource, "contender", run, self._cluster.log)
                if not self._quiet:
                    bodies.note("enter", *note)
                self.entered = time.monotonic()
                if not self._quiet:
                    bodies.note("exit", *note)
        except BaseException as error:
            self._error = error

    def has_it(self) -> float:
        """Wait until it has got the lock; when that was."""
        self._thread.join(self._wait + 2.0)
        if self._error is not None:
            raise self._error
        assert self.entered is not None
        return self.entered

    def gets_it(self, since: float | Callable[[], float]) -> None:
        """Check that it was granted the lock within a second after `since`."""
        self.has_it()
        assert self.entered is not None
        since = since() if callable(since) else since
        in_time(since, self.entered, SOON, "from the end of a body to the next holder")


def steal(cluster: Cluster, key: str) -> None:
    """Give the key to another on a majority, in mid-body, as no program should."""
    for node in cluster.nodes[:3]:
        with redis.Redis(port=node.port) as client:
            # In one step: in between, an extension would set it again, and count.
            assert client.set(f"redlock:k:{key}", "a thief", px=20_000, xx=True)
