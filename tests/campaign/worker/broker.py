"""The broker of a campaign: Redis, or RabbitMQ with classic or quorum queues.

Workers reach it over a link each, which can be cut and reset; the feeder reaches it itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from celery_redlock.server import LocalServer, free_port
from tests.support import rabbitmq

BROKERS = ("redis", "rabbitmq", "quorum")
VISIBILITY = 15
"""Seconds after which Redis delivers again what a dead worker had; longer than any body."""


class RedisBroker:
    """A broker that writes its messages to disk, so that they survive a `kill`.

    Attributes:
        at_once: It gives back at once what a dead connection had.
        conf: What the app's configuration needs for it.
    """

    at_once = False

    def __init__(self) -> None:
        self._server = LocalServer(config=("--appendonly", "yes", "--appendfsync", "everysec"))
        self.conf: dict[str, Any] = {
            "broker_transport_options": {
                "visibility_timeout": VISIBILITY,
                "unacked_restore_interval": 2,
                "unacked_restore_throttle": 1,
                "unacked_mutex_expire": 5,  # one killed in its search blocks others
            }
        }

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def url(self) -> str:
        return self.url_at(self.port)

    def url_at(self, port: int) -> str:
        """Return its URL through a link."""
        return f"redis://127.0.0.1:{port}/0"

    @property
    def pid(self) -> int:
        return self._server.pid

    def kill(self) -> None:
        self._server.kill()

    def start(self) -> None:
        self._server.start()

    def __enter__(self) -> RedisBroker:
        self._server.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop()

    def messages(self) -> tuple[int, int]:
        """Return the number of waiting messages, and that of unacknowledged ones."""
        with contextlib.closing(redis.Redis.from_url(self.url)) as client:
            queues = [b"celery", *client.keys("only-*")]
            return sum(int(client.llen(q)) for q in queues), int(client.hlen("unacked"))

    def holds(self, ids: set[str]) -> set[str]:
        """Return the ids of which it has a message."""
        with contextlib.closing(redis.Redis.from_url(self.url)) as client:
            raw = [*client.lrange("celery", 0, -1), *client.hvals("unacked")]
        texts = [text.decode(errors="replace") for text in raw]
        return {one for one in ids if any(one in text for text in texts)}


class RabbitBroker:
    """With classic queues, or with quorum queues, a topic exchange and delayed delivery.

    Args:
        quorum: The latter, as Celery recommends.
    """

    at_once = True
    pid = 0  # its threads are many

    def __init__(self, *, quorum: bool) -> None:
        self._stack = contextlib.ExitStack()
        self._directory = Path()
        self.port = 0
        self.conf = {
            "broker_transport_options": {"confirm_publish": True},
            "control_queue_ttl": 60.0,
        }
        if quorum:
            self.conf |= {
                "task_default_queue_type": "quorum",
                "task_default_exchange_type": "topic",
                "broker_native_delayed_delivery_queue_type": "quorum",
            }

    @property
    def url(self) -> str:
        return self.url_at(self.port)

    def url_at(self, port: int) -> str:
        """Its URL, through a link."""
        return f"amqp://guest:guest@127.0.0.1:{port}//"

    def __enter__(self) -> RabbitBroker:
        reason = rabbitmq.missing()
        assert not reason, reason
        self._directory = Path(tempfile.mkdtemp(prefix="redlock-rabbitmq-"))
        self.port = free_port()
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def kill(self) -> None:
        self._stack.close()

    def start(self) -> None:
        server = rabbitmq._spawn(self._directory, self.port, self._stack)
        assert rabbitmq._answers(self.port, server), "RabbitMQ does not start"
        # Its name server's port changes with every start.
        environ = Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
        self._environment = dict(line.decode().split("=", 1) for line in environ if b"=" in line)

    def messages(self) -> tuple[int, int]:
        """Return the number of waiting messages, and that of unacknowledged ones."""
        waiting = unacked = 0
        for name, ready, pending in self._queues():
            if name == "celery" or name.startswith(("only-", "celery_delayed")):
                waiting, unacked = waiting + ready, unacked + pending
        return waiting, unacked

    def holds(self, ids: set[str]) -> set[str]:
        """Return all ids if it has any message, because it does not show which.

        Whoever looks at a queue of RabbitMQ's takes the messages out of it.
        """
        return ids if sum(self.messages()) else set()

    def _queues(self) -> Iterator[tuple[str, int, int]]:
        program = shutil.which(
            "rabbitmqctl", path="/usr/lib/rabbitmq/bin" + os.pathsep + os.environ["PATH"]
        )
        assert program is not None
        columns = ["name", "messages_ready", "messages_unacknowledged"]
        text = subprocess.run(
            [program, "-q", "--no-table-headers", "list_queues", *columns],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=60.0,
            check=True,
        ).stdout
        for line in text.splitlines():
            name, ready, unacked = line.split("\t")
            yield name, int(ready), int(unacked)


def broker(kind: str) -> RedisBroker | RabbitBroker:
    """A broker of a kind, not started."""
    return RedisBroker() if kind == "redis" else RabbitBroker(quorum=kind == "quorum")
