"""Canvases on real workers: all of one policy are published together, then each is looked at."""

from __future__ import annotations

import contextlib
import itertools
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery.exceptions import ChordError
from celery.result import AsyncResult

from celery_redlock import HeldLease
from celery_redlock.server import LocalServer
from tests.promises.canvas import tasks
from tests.promises.canvas.cells import Cell, Self
from tests.promises.canvas.tasks import SKIPPED, Policy, show
from tests.support import bodies
from tests.support.brokers import settings_of
from tests.support.cluster import Cluster
from tests.support.eyes import Server, eyes
from tests.support.wait import wait_until
from tests.support.worker import Worker

SOON = 15.0
"""Seconds within which everything comes out, on a machine that is busy: some wait for others."""
PARKED = 3.0
"""Seconds after which tasks that should wait, and have not said so, do that in the worker's main
process."""
LINGERS = 0.5
"""Seconds for which those that may be predecessors hold their key when they have ended."""
FAILED = "DuplicateTask"
"""Result of a canvas in which a duplicate is an error."""
NOWHERE = "nowhere"
"""A queue that no worker listens to, until the end."""

AROUND = ("nobody", "locked", "running", "queued", "done")
"""Holders of the key when a canvas is published: another program, or a call of the same task."""


def meets(policy: Policy, around: str) -> str:
    """Return the fate of a task that is published while another has its key.

    Returns:
        "runs", "waits" (for the other's end) or "duplicate".
    """
    if policy.scope == "while_executing":
        held = around in ("locked", "running")
        return "runs" if not held else "waits" if policy.on_conflict == "retry" else "duplicate"
    duplicate = {
        "until_executing": ("queued",),
        "until_executed": ("running", "queued"),
        "until_and_while_executing": ("queued",),
        "until_expired": ("running", "queued", "done"),
    }
    if around in duplicate[policy.scope]:
        return "duplicate"
    locks = policy.scope != "until_executing"
    return "waits" if around in ("locked", "running") and locks else "runs"


def expected(policy: Policy, cell: Cell, around: str) -> str:
    """Return the result of a canvas that is published while another has its key."""
    met = meets(policy, around)
    if met != "duplicate":
        return cell.comes.format(t=cell.ran)
    if cell.lone and policy.scope != "while_executing":
        if policy.on_duplicate == "existing":
            return "other"
        if policy.on_duplicate == "replace":
            return cell.ran if around == "queued" else "other"
    if policy.scope != "while_executing" and policy.on_duplicate == "raise":
        return FAILED
    return cell.comes.format(t=SKIPPED)


def expected_of_itself(policy: Policy, cell: Self) -> set[str]:
    """Return all possible results of a canvas with duplicates of its own."""
    found = set()
    for run in _who_may_run(policy, cell):
        if policy.on_duplicate == "raise" and set(run) != set(cell.ran):
            found.add(FAILED)
            continue
        texts: dict[str, str] = {}
        for name, text in cell.ran.items():
            texts[name] = text.format(**texts) if name in run else SKIPPED
        found.add(cell.comes.format(**texts))
    return found


def _who_may_run(policy: Policy, cell: Self) -> Iterator[str]:
    """Yield the tasks that may run: one of each stage at least.

    For a lasting claim the first only.
    """
    if (policy.scope, policy.on_conflict) == ("while_executing", "retry"):
        yield "".join(cell.stages)
    elif policy.scope == "until_expired" and not cell.one:
        yield from cell.stages[0]
    else:
        some = [
            ["".join(of) for n in range(len(stage)) for of in itertools.combinations(stage, n + 1)]
            for stage in cell.stages
        ]
        yield from map("".join, itertools.product(*some))


@dataclass
class Maker:
    """Makes the signatures of one canvas: see `cells.Maker`."""

    app: Any
    policy: Policy
    # Begins with a letter: a key of digits alone is written otherwise, since it is no number.
    key: str = field(default_factory=lambda: f"x{uuid.uuid4().hex[:12]}")
    soon: float = 0.2

    @property
    def task(self) -> Any:
        return self.app.tasks[f"{tasks.NAME}.{self.policy.name}"]

    def t(self, own: str = "a", **more: Any) -> Any:
        return self.task.s(key=self.key, own=own, **more)

    def p(self, own: str) -> Any:
        return self.app.tasks[f"{tasks.NAME}.plain"].s(own=own)

    def replaced(self, by: Any) -> Any:
        return self.app.tasks[f"{tasks.NAME}.replaced"].s(by=by)


class Play(Maker):
    """A canvas that was published."""

    def __init__(self, stage: Stage, policy: Policy, cell: Cell | Self, around: str) -> None:
        super().__init__(stage.app, policy, soon=stage.soon)
        self.stage = stage
        self.cell = cell
        self.around = around
        self.other: AsyncResult[Any] | None = None
        self.lease: HeldLease | None = None
        self.result: Any = None
        self.error: Exception | None = None
        self.lifted = 0.0

    def t(self, own: str = "a", **more: Any) -> Any:
        if isinstance(self.cell, Self):
            more.setdefault("lingers", LINGERS)
        return super().t(own, **more)

    # -- Its course ------------------------------------------------------------------------------

    @property
    def replaced_other(self) -> bool:
        """Return True if it replaces the other task, which must not run any more."""
        lone = isinstance(self.cell, Cell) and self.cell.lone
        queued = self.around == "queued" and meets(self.policy, "queued") == "duplicate"
        return lone and queued and self.policy.on_duplicate == "replace"

    @property
    def gate(self) -> Path:
        return self.stage.cluster.path / f"gate-{self.key}"

    def surround(self) -> None:
        """Give the key to another task or program."""
        if self.around == "locked":
            self.lease = self.stage.cluster.redlock.acquire(f"k:{self.key}", ttl=600.0)
        elif self.around == "running":
            self.other = self.t("other", until=str(self.gate)).apply_async()
        elif self.around == "queued":
            self.other = self.t("other").apply_async(queue=self.stage.nowhere)
        elif self.around == "done":
            self.other = self.t("other").apply_async()

    def surrounded(self) -> None:
        """Wait until the other has it."""
        if self.around == "running":
            self.stage.cluster.entered(self.key, timeout=SOON)
        elif self.around == "done":
            assert self.other is not None
            assert self.other.get(timeout=SOON) == "other"

    def publish(self) -> None:
        try:
            self.result = self.cell.publish(self)
        except Exception as error:
            self.error = error

    def lift(self) -> None:
        """End the other holder."""
        self.lifted = self.lifted or time.monotonic()
        self.gate.touch()
        if self.lease is not None:
            self.stage.cluster.redlock.release(self.lease)
            self.lease = None

    def wrong(self) -> str:
        """Return the fault of the result; empty if there is none."""
        if isinstance(self.cell, Self):
            allowed = expected_of_itself(self.policy, self.cell)
        else:
            allowed = {expected(self.policy, self.cell, self.around)}
        if allowed == {"other"}:  # the result of another, which comes to an end of its own
            assert self.other is not None
            right = self.error is None and self.result.id == self.other.id
            return "" if right else f"{self.result or self.error!r} is not the other's result"
        try:
            came = self.comes()
        except Exception as error:
            came = f"{error!r}, and not what was waited for"
        if came not in allowed:
            return f"{self.cell.name}, {self.around}: {came}, not {allowed}; {self.story()}"
        others = [self.other.id if self.other is not None else ""]
        runs = [run for run in self.stage.cluster.runs(self.key) if run.task not in others]
        if meets(self.policy, self.around) == "waits" and any(
            run.begin < self.lifted for run in runs
        ):
            return f"{self.cell.name}, {self.around}: ran while another had its lock"
        return ""

    def story(self) -> str:
        """Return the worker's lines about it, for a test that fails."""
        ids = {line.task for line in self.stage.cluster.lines(resource=f"k:{self.key}")}
        ids |= {str(getattr(one, "id", "")) for one in (self.result, self.other)} - {""}
        lines = self.stage.worker.text.splitlines()
        about = [line for line in lines if self.key in line or any(one in line for one in ids)]
        return "\n".join([f"key {self.key}, tasks {ids}", *about])

    def comes(self) -> str:
        """Return the result of the canvas."""
        try:
            if self.error is not None:
                raise self.error
            return show(self.result.get(timeout=SOON))
        except ChordError as error:
            if FAILED not in str(error):
                raise
            return FAILED
        except Exception as error:
            if type(error).__name__ != FAILED:
                raise
            return FAILED


class Stage:
    """A broker, a serializer, lock nodes and a worker; the app that sends to them.

    Args:
        url: Of a RabbitMQ; none where the broker is `store`, as the results' backend is.
        kind: Of its queues: see `tests.support.brokers`.
    """

    def __init__(
        self, nodes: Sequence[Server], store: LocalServer, path: Path, serializer: str,
        url: str = "", kind: str = "redis", acks: str = "early",
    ) -> None:  # fmt: skip
        self.queue = f"canvas-{serializer}-{kind}-{acks}"
        self.nowhere = f"{NOWHERE}-{self.queue}"
        # One in a chain is published later, and Celery fails where less than a second is left.
        self.soon = 5.0 if kind == "topic" else 0.2
        conf = settings_of(kind, url, self.queue, self.nowhere) if url else {}
        url = conf.pop("broker_url", "")
        self.cluster = Cluster(
            nodes,
            store,
            path,
            broker_url=url,
            tasks=tasks.NAME,
            task_serializer=serializer,
            result_serializer=serializer,
            accept_content=["json", serializer],
            task_acks_late=acks == "late",
            **{"task_default_queue": self.queue, **conf},
            test_log=str(path / "bodies.log"),
            redlock_retry_backoff=0.1,
            redlock_retry_backoff_max=0.2,
            redlock_node_timeout=1.0,  # 48 slots start at once: a late node is not a lost one
        )
        self.app = tasks.make_app(self.cluster.conf)
        self.waves: dict[str, list[Play]] = {}
        self.worker: Worker

    @contextlib.contextmanager
    def working(self, *arguments: str) -> Iterator[Stage]:
        try:
            with self.cluster.worker(*arguments, queue=self.queue) as self.worker:
                yield self
        finally:
            # Results outlive this, and would take leave of a server that is gone.
            self.app.backend.remove_pending_result = lambda result: result
            self.app.backend.result_consumer.stop()
            self.app.backend.client.close()
            self.app.close()
            self.cluster.close()

    def wave(self, name: str, policy: Policy, wanted: Sequence[tuple[Any, str]]) -> list[Play]:
        """Play canvases of one policy, all of them under way; the first call publishes them."""
        plays = self.waves.get(name)
        if plays is None:
            plays = [Play(self, policy, cell, around) for cell, around in wanted]
            self.waves[name] = plays
            for play in plays:
                play.surround()
            for play in plays:
                play.surrounded()
            for play in plays:
                play.publish()
            waiting = [play for play in plays if meets(policy, play.around) == "waits"]
            if waiting:
                self.refused(waiting)
            for play in waiting:
                play.lift()
        return plays

    def refused(self, plays: list[Play]) -> None:
        """Wait until all these were refused their locks; parked ones do not log it."""

        def all_said() -> bool:
            lines = [line for line in self.worker.text.splitlines() if " waits (" in line]
            return all(any(f"k:{play.key} " in line for line in lines) for play in plays)

        with contextlib.suppress(AssertionError):
            wait_until(all_said, PARKED, "the tasks wait for their locks", every=0.1)

    def listen_everywhere(self) -> None:
        """Let the worker take messages from the queue without a consumer, from now on."""
        said = self.app.control.add_consumer(self.nowhere, reply=True, timeout=SOON, limit=1)
        assert len(said) == 1

    def at_work(self) -> list[Any]:
        """Return the tasks that the worker has, running or not."""
        inspect = self.app.control.inspect(timeout=2.0, limit=1)
        answers = [inspect.active(), inspect.reserved(), inspect.scheduled()]
        assert all(answers)
        return [task for answer in answers for tasks in answer.values() for task in tasks]

    def check(self) -> None:
        """Check that no two bodies of a key overlapped, and that no task's body ran twice."""
        lines = self.cluster.lines()
        locks = {f"k:{play.key}" for play in self.played if play.policy.scope != "until_executing"}
        overlaps = bodies.overlaps(line for line in lines if line.resource in locks)
        assert overlaps == []
        replaced = {
            f"k:{play.key}" for play in self.played if isinstance(play.cell, Self) and play.cell.one
        }
        runs = [run for run in bodies.runs(lines) if run.resource not in replaced]
        twice = [task for task, count in Counter(run.task for run in runs).items() if count > 1]
        assert twice == []

    @property
    def played(self) -> list[Play]:
        return [play for plays in self.waves.values() for play in plays]

    def left(self) -> list[str]:
        """Return the names on the nodes that the canvases so far should not have left."""
        stays = {play.key for play in self.played if play.policy.scope == "until_expired"}
        found = []
        for node in self.cluster.nodes:
            with contextlib.closing(eyes(node)) as looks:
                try:
                    found += [name for name in looks.names() if name.startswith("redlock:k:")]
                except looks.blind as error:
                    found.append(str(error))
        return [
            name
            for name in found
            if not (name.endswith("#reserved") and name.split(":")[-1].split("#")[0] in stays)
        ]
