"""Calls tasks for a while, by seed.

    python -m tests.campaign.publishing.producer NAME SEED SECONDS

A line `call` before each call; behind it `gave`, with the id that it was given, or `refused`.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import kombu

from celery_redlock.server import free_port
from tests.campaign.publishing import project
from tests.campaign.publishing.project import what_of
from tests.campaign.worker.project import app, pen

REPLACING = (project.debounced, project.settled, project.begun)
ONCE = (project.once, project.surely, project.succeeded, project.expired)
KEYS = 3
"""Keys of each producer alone, and as many that all producers share."""
QUORUM = app.conf.get("task_default_queue_type") == "quorum"
SPOILT = ("argument", "serializer", "broker", *["countdown"] * QUORUM)
"""Why a call cannot be published; RabbitMQ delays for whole seconds."""


class Producer:
    """Makes calls, and writes them down.

    Args:
        name: What the numbers of its calls begin with.
        seed: Of all choices.
    """

    def __init__(self, name: str, seed: str) -> None:
        self._name = name
        self._choose = random.Random(f"{seed}/{name}")
        self._count = 0
        self._nowhere = kombu.Connection(f"redis://127.0.0.1:{free_port()}/0", connect_timeout=1.0)

    def call(
        self, task: Any, key: str, countdown: float = 0.0, seconds: Any = 0.05, spoilt: str = ""
    ) -> None:
        """Call a task, with a body of some seconds; `spoilt` is one of `SPOILT`."""
        self._count += 1
        number, what = f"{self._name}-{self._count}", what_of(task.name, key)
        options: dict[str, Any] = {"countdown": countdown or None}
        if spoilt == "argument":
            seconds = object()
        elif spoilt == "serializer":
            options["serializer"] = "nonesuch"
        elif spoilt == "broker":
            options |= {"connection": self._nowhere, "retry": False}
        elif spoilt == "countdown":
            options["countdown"] = 0.5
        if task is project.failing:
            options["link_error"] = project.compensate.s(key, f"{number}!")
        pen.write("call", "", number, what, "", None, 0.0, False, countdown)
        try:
            result = task.apply_async((key, number, seconds), **options)
        except Exception as error:
            pen.write("refused", "", number, what, type(error).__name__)
        else:
            pen.write("gave", result.id, number, what)

    def run(self, seconds: float) -> None:
        """Call one thing after the other, until the time is over."""
        acts = {self.replace: 3, self.repeat: 2, self.wait: 4, self.fail: 1}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._choose.choices([*acts], [*acts.values()])[0]()
            time.sleep(self._choose.uniform(0.05, 0.3))

    def key(self) -> str:
        """Return one of its own keys, or of those of all."""
        return f"{self._choose.choice((self._name, 'all'))}{self._choose.randrange(KEYS)}"

    def replace(self) -> None:
        """Call a task that replaces queued calls, a few times; the last call may fail."""
        task, key = self._choose.choice(REPLACING), self.key()
        countdown = float(self._choose.choice((0, 1, 2)))
        for _call in range(self._choose.choice((1, 2, 3))):
            self.call(task, key, countdown)
            time.sleep(self._choose.uniform(0.02, 0.4))
        if self._choose.random() < 0.3:
            self.call(task, key, countdown, spoilt=self._choose.choice(SPOILT))

    def repeat(self) -> None:
        """Call what may be queued once, a few times."""
        task, key = self._choose.choice(ONCE), self.key()
        countdown = float(self._choose.choice((0, 0, 1)))
        for _call in range(self._choose.choice((1, 2, 3))):
            # A body that is over before the reservation of its message has been made to last.
            self.call(task, key, countdown, seconds=self._choose.choice((0.0, 0.0, 0.1)))
            time.sleep(self._choose.uniform(0.0, 0.1))

    def wait(self) -> None:
        """Call a task that waits for its turn."""
        key = self.key()
        for _call in range(self._choose.choice((1, 2))):
            self.call(project.plain, key)

    def fail(self) -> None:
        """Call what fails, while others want the key of its callback."""
        key = self.key()
        self.call(project.plain, key, seconds=1.5)
        time.sleep(0.1)
        self.call(project.failing, key)


if __name__ == "__main__":
    Producer(sys.argv[1], sys.argv[2]).run(float(sys.argv[3]))
