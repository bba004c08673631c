"""Publishes tasks steadily, by seed, and keeps the ledger of what became of each."""

from __future__ import annotations

import json
import random
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis
from celery import Celery

from celery_redlock.server import LocalServer
from tests.campaign.worker.journal import now
from tests.campaign.worker.stage import PROJECT, TTL

RESOURCES = tuple(f"f{number}" for number in range(20))
HOT = 3
"""The first of them are wanted by a third of all tasks."""
READ = RESOURCES[HOT - 1 : HOT + 2]
"""Keys that some tasks only read, where the store has shared locks."""
SELDOM_WRITTEN = READ[-1]
"""The one of these that only acts write."""
RATE = 20.0
"""Tasks a second, while not too many wait."""
WAITING = 70
"""Nothing is published while so many tasks are not done."""
PROBE = 0.5
"""Seconds between two no-ops."""
DONE = ("SUCCESS", "FAILURE", "REVOKED")


def only(worker: str) -> str:
    """Return the name of the queue that no other worker reads."""
    return f"only-{worker}"


@dataclass
class Sent:
    """A task that was published.

    Attributes:
        at: When; seconds.
        certain: The broker has confirmed it.
        state: Its last known state.
        error: What it failed with.
        result: What it returned.
        eta: When it is due, if that is later; seconds.
        expected: Why it may be lost or revoked, if it may: "purged", "revoked".
    """

    id: str
    task: str
    resource: str
    seconds: float
    manner: str
    at: float
    options: dict[str, Any] = field(default_factory=dict)
    certain: bool = False
    state: str = "PENDING"
    error: str = ""
    result: Any = None
    eta: float = 0.0
    expected: str = ""

    @property
    def done(self) -> bool:
        return self.state in DONE


def _locked(sent: Sent) -> tuple[Any, ...]:
    return sent.resource, sent.seconds, sent.manner


ARGUMENTS: dict[str, Callable[[Sent], tuple[Any, ...]]] = {
    "probe": lambda _sent: (),
    "fill": lambda sent: (sent.seconds,),
}
"""Arguments of the tasks without a key."""


class Feeder:
    """Publishes from `start` to `stop`.

    Args:
        app: To send with.
        results: Where results are.
        seed: Of all choices.
        rate: Tasks a second.
        reads: Some tasks only read.
    """

    def __init__(
        self,
        app: Celery,
        results: LocalServer,
        seed: int,
        rate: float = RATE,
        *,
        reads: bool = False,
    ) -> None:
        self.ledger: dict[str, Sent] = {}
        self.held_back = 0
        self.rate = rate
        self.reads = reads
        self._app = app
        self._results = redis.Redis.from_url(results.url)
        self._random = random.Random(f"{seed}/feed")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)
        self._prober = threading.Thread(target=self._probe, name="prober", daemon=True)
        self._lock = threading.Lock()

    def start(self) -> None:
        self._thread.start()
        self._prober.start()

    def stop(self) -> None:
        """Publish no more."""
        self._over.set()
        self._thread.join(30.0)
        self._prober.join(30.0)

    def close(self) -> None:
        self.stop()
        self._results.close()

    def next(self) -> Sent:
        """Return the next task, by the seed."""
        choose = self._random
        hot = choose.random() < 0.33
        resource = choose.choice(RESOURCES[:HOT] if hot else RESOURCES[HOT:])
        dice = choose.random()
        if dice < 0.75:
            seconds = choose.uniform(0.005, 0.06)
        elif dice < 0.94:
            seconds = choose.uniform(0.06, 0.6)
        else:
            seconds = choose.uniform(0.6, 3 * TTL)
        task = choose.choices(("early", "late", "skipping"), (60, 32, 8))[0]
        if self.is_read(resource):
            task = choose.choices(("reading", "writing", task), (70, 15, 15))[0]
            task = "reading" if resource == SELDOM_WRITTEN else task
        manner = choose.choices(
            ("sleep", "loop", "stubborn", "raise", "retry", "gil", "_exit"), (70, 9, 8, 5, 5, 2, 1)
        )[0]
        options: dict[str, Any] = {}
        if manner == "gil":
            seconds = min(seconds, 1.5 * TTL)
        elif manner in ("sleep", "stubborn") and seconds > 0.8 and choose.random() < 0.35:
            options = {"soft_time_limit": choose.uniform(0.3, 0.7)}
            if choose.random() < 0.5 or manner == "stubborn":
                options = {"time_limit": choose.uniform(0.4, 0.8)}
        return Sent(str(uuid.uuid4()), task, resource, seconds, manner, now(), options)

    def send(
        self, resource: str, seconds: float, manner: str = "sleep", task: str = "early"
    ) -> Sent:
        """Send a task besides those of the seed, for an act that needs a body or a waiter."""
        sent = Sent(str(uuid.uuid4()), task, resource, seconds, manner, now())
        self.publish(sent)
        return sent

    def is_read(self, resource: str) -> bool:
        """Return True if some tasks only read the resource."""
        return self.reads and resource in READ

    def fill(self, worker: str, seconds: float) -> Sent:
        """Send an unlocked task that takes one slot of one worker."""
        options = {"queue": only(worker)}
        sent = Sent(str(uuid.uuid4()), "fill", "", seconds, "", now(), options)
        self.publish(sent)
        return sent

    def later(self, resource: str, countdown: float) -> Sent:
        """Send a task with an ETA."""
        sent = Sent(str(uuid.uuid4()), "late", resource, 0.05, "sleep", now())
        sent.options, sent.eta = {"countdown": countdown}, now() + countdown
        self.publish(sent)
        return sent

    def publish(self, sent: Sent) -> None:
        """Send a task to the broker, and add it to the ledger."""
        sent.at = now()
        with self._lock:
            self.ledger[sent.id] = sent
        try:
            self._app.send_task(
                f"{PROJECT}.{sent.task}",
                args=ARGUMENTS.get(sent.task, _locked)(sent),
                task_id=sent.id,
                **sent.options,
            )
            sent.certain = True
        except Exception as error:  # the broker is away: nobody knows whether it has it
            sent.error = f"{type(error).__name__} when published"

    def waiting(self) -> list[Sent]:
        """Return the tasks whose end is not known."""
        with self._lock:
            return [sent for sent in self.ledger.values() if not sent.done]

    def look(self, *, all_of_them: bool = False) -> None:
        """Read the ends of the tasks that are not done, or of all."""
        asked = list(self.ledger.values()) if all_of_them else self.waiting()
        for begin in range(0, len(asked), 200):
            some = asked[begin : begin + 200]
            answers = self._results.mget([f"celery-task-meta-{sent.id}" for sent in some])
            for sent, answer in zip(some, answers, strict=True):
                if answer is not None:
                    _enter(sent, json.loads(answer))

    def _probe(self) -> None:
        """Send a no-op now and then, to the queue of all other tasks."""
        while not self._over.wait(PROBE):
            self.publish(Sent(str(uuid.uuid4()), "probe", "", 0.0, "", now()))

    def _run(self) -> None:
        while not self._over.wait(self._random.expovariate(self.rate)):
            self.look()
            sent = self.next()
            if sum(one.task not in ARGUMENTS for one in self.waiting()) >= WAITING:
                self.held_back += 1
                continue
            self.publish(sent)
            if "time_limit" in sent.options:  # somebody waits for what will be killed
                self.send(sent.resource, 0.05)
            if sent.task == "reading":  # beside it
                self.send(sent.resource, max(sent.seconds, 0.1), task="reading")


def _enter(sent: Sent, meta: dict[str, Any]) -> None:
    sent.state = meta["status"]
    sent.result = meta["result"]
    if isinstance(sent.result, dict):
        sent.error = sent.result.get("exc_type", "")
