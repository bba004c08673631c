"""Real beats on real servers, and their messages, read straight from the broker's list."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis

from celery_redlock.server import LocalServer
from celery_redlock.testing.etcd import LocalEtcd
from celery_redlock.testing.postgresql import LocalPostgres
from tests.campaign.beat.oracle import Message
from tests.support import forked
from tests.support.program import Program
from tests.support.wait import wait_until

ROOT = Path(__file__).parents[2]
PROJECT = "tests.promises.beat.project"
KINDS = ("persistent", "redbeat", "django")
SCHEDULERS = {
    "persistent": "celery.beat:PersistentScheduler",
    "redbeat": "redbeat:RedBeatScheduler",
    "django": "tests.promises.beat.django_scheduler:SecondScheduler",
}
NO_MESSAGES = ("-c", "1", "-Q", "nobody")
"""A worker that takes no message."""
START = 30.0
"""Seconds for a beat to start, on a machine that is busy."""
TTL = 2.0
"""Seconds a claim is held while its message is being sent."""


class Site:
    """A scheduler with its app and a database of the broker to itself; beats are added to it.

    Args:
        kind: One of `KINDS`.
        nodes: The lock nodes.
        broker: The broker, and where redbeat has its entries.
        path: A directory of its own.
        entries: The names of its entries.
        **conf: More of the app's configuration.
    """

    def __init__(
        self,
        kind: str,
        nodes: Sequence[LocalServer | LocalPostgres | LocalEtcd],
        broker: LocalServer,
        path: Path,
        *,
        entries: tuple[str, ...] = ("tick", "interval"),
        **conf: Any,
    ) -> None:
        self.kind = kind
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        number = KINDS.index(kind)
        base = broker.url.rsplit("/", 1)[0]
        self.broker_url = f"{base}/{number}"
        self.conf: dict[str, Any] = {
            "broker_url": self.broker_url,
            "broker_connection_retry_on_startup": True,
            "redlock_nodes": [node.url for node in nodes],
            "redlock_restart_guard": "off",  # they have just been started
            "redlock_ttl": TTL,
            "redlock_beat": True,
            **conf,
        }
        if kind == "redbeat":
            self.conf |= {"redbeat_redis_url": f"{base}/{number + 8}", "redbeat_lock_key": None}
        self.environment = {
            "PYTHONPATH": str(ROOT),
            "TEST_KIND": kind,
            "TEST_MAIN": f"beats-{kind}-{path.name}",
            "TEST_EPOCH": str(int(time.time()) - 1),
            "TEST_MINUTE": str(int(time.time() // 60 - 1) % 60),  # the next is far away
            "TEST_ENTRIES": ",".join(entries),
        }
        self.beats: list[Beat] = []
        self.client = redis.Redis.from_url(self.broker_url)
        if kind == "django":
            self.environment["DJANGO_SETTINGS_MODULE"] = "tests.promises.beat.django_settings"
            self.environment["TEST_SQLITE"] = str(path / "beat.sqlite3")
            self.run("-m", "tests.promises.beat.django_setup", *entries)

    def run(self, *arguments: str, timeout: float = START) -> str:
        """Run a Python of this site's environment to its end; what it printed."""
        code, said = forked.run(
            *arguments, cwd=ROOT, env=self.variables(self.conf), timeout=timeout
        )
        assert code == 0, said
        return said

    def variables(self, conf: dict[str, Any], **more: str) -> dict[str, str]:
        conf = {name: value for name, value in conf.items() if value != "absent"}
        return {**os.environ, **self.environment, "TEST_CONF": json.dumps(conf), **more}

    def beat(self, *, start: bool = True, way: str = "beat", **variables: str) -> Beat:
        """Add a beat.

        Args:
            start: Start it.
            way: As of `Beat`.
            **variables: More of its environment.
        """
        beat = Beat(self, f"{self.kind}-{len(self.beats)}", way, variables)
        self.beats.append(beat)
        if start:
            beat.start()
        return beat

    def age(self, beat: Beat, entry: str, seconds: float) -> None:
        """Set an entry's last run to so long ago, for a beat that is not started."""
        last = str(time.time() - seconds)
        self.run("-m", "tests.promises.beat.age", self.kind, str(beat.schedule), entry, last)

    def messages(self, task: str) -> list[Message]:
        """All that was sent for a task, in the order in which it came to the broker."""
        raw = self.client.lrange("celery", 0, -1)[::-1]  # sent by LPUSH
        found = []
        for line in raw:
            headers = json.loads(line)["headers"]
            if headers["task"] == f"tests.promises.beat.{task}":
                found.append(
                    Message(
                        headers["beat_name"],
                        headers["beat_pid"],
                        headers["beat_asked"],
                        headers["beat_sent"],
                    )
                )
        return found

    def sent(self, task: str, count: int = 1, timeout: float = START) -> list[Message]:
        """Wait until at least so many messages of a task are there."""
        wait_until(
            lambda: len(self.messages(task)) >= count,
            timeout,
            f"{count} of {task} are sent",
            every=0.02,
        )
        return self.messages(task)

    def text(self) -> str:
        """All that all beats have printed."""
        return "".join(beat.text for beat in self.beats)

    def close(self) -> None:
        for beat in self.beats:
            beat.kill()
        self.client.close()


class Beat(Program):
    """A process with a beat in it, and the next one by the same name when it was killed.

    Args:
        site: Where it belongs.
        name: What it puts into its messages.
        way: "beat", "worker" (`celery worker -B`), "thread" (embedded in a script).
        variables: More of its environment.
    """

    def __init__(self, site: Site, name: str, way: str, variables: dict[str, str]) -> None:
        super().__init__(name, site.path / f"{name}.log")
        self.site = site
        self.way = way
        self.variables = variables
        self.conf = dict(site.conf)
        self.schedule = site.path / f"{name}.schedule"

    @property
    def ready(self) -> bool:
        """Return True if it has started, and is neither dead nor stopped."""
        return self.alive and not self.stopped and "beat: Starting..." in self.newest

    def start(self, *, forget: bool = False) -> None:
        """Start it with its old schedule file; `forget`: without."""
        if forget:
            for file in self.site.path.glob(f"{self.schedule.name}*"):
                file.unlink()
        self.begins()
        command = {
            "beat": forked.celery(PROJECT, "beat", "--pidfile="),
            "worker": forked.celery(PROJECT, "worker", "-B", *NO_MESSAGES, *forked.QUIET),
            "thread": [sys.executable, "-m", "tests.promises.beat.embedded"],
        }[self.way]
        command += ["-s", str(self.schedule), "--scheduler", SCHEDULERS[self.site.kind]]
        with open(self.output, "ab") as output:
            self.process = forked.start(
                command,
                cwd=ROOT,
                env=self.site.variables(self.conf, TEST_BEAT=self.name, **self.variables),
                output=output,
            )

    def started(self) -> None:
        """Wait until it is past its start."""

        def up() -> bool:
            assert self.alive, self.text
            return self.ready

        wait_until(up, START, f"{self.name} is ready", every=0.02)
