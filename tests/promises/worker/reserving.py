"""Tasks under a reservation, declared on the workers' app and on the one that sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import redis
from celery import Celery

from celery_redlock import SingletonTask
from celery_redlock.config.checks import SCOPES
from celery_redlock.messages.reservation import UNSENT_TTL_S
from celery_redlock.protocol.values import Owner
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

NAME = "tests.promises.worker.tasks"


def declare(app: Celery, body: Callable[..., Any]) -> dict[str, Any]:
    """Declare a task for each scope, with one key and body; some are acknowledged late.

    Not shared: several apps of one test process have them, and each finalizes its own.

    Args:
        app: Whose tasks they are.
        body: What they do, given the task, its key, seconds, and how to end.
    """
    tasks = {}
    for scope in SCOPES:
        for name, options in (
            (scope, {}),
            (f"{scope}_late", {"acks_late": True, "reject_on_worker_lost": True}),
            (f"{scope}_sent_again", {"retry_on_worker_lost": True, "default_retry_delay": 0.2}),
        ):

            def run(self: Any, key: str, seconds: float = 0.05, then: str = "return") -> Any:
                again = self.request.delivery_info.get("redelivered")
                return body(self, key, seconds, "return" if again else then)

            tasks[name] = app.task(
                base=SingletonTask,
                shared=False,  # with the apps of other modules' tests
                bind=True,
                name=f"{NAME}.{name}",
                lock_key="k:{key}",
                lock_scope=scope,
                max_retries=3,
                **options,
            )(run)

    def short(self: Any, key: str) -> Any:
        return body(self, key, 0.05, "return")

    tasks["until_succeeded_skip"] = app.task(
        base=SingletonTask,
        shared=False,
        bind=True,
        name=f"{NAME}.until_succeeded_skip",
        lock_key="k:{key}",
        lock_scope="until_succeeded",
        lock_on_conflict="skip",
    )(short)
    return tasks


class Reservations:
    """The sender's tasks, and what the nodes hold for them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.tasks = declare(cluster.app, lambda *_args: None)
        self._nodes = [redis.Redis.from_url(node.url) for node in cluster.nodes]

    def close(self) -> None:
        for node in self._nodes:
            node.close()

    def __getattr__(self, name: str) -> Any:
        return self.tasks[name]

    def tokens(self, key: str) -> list[str]:
        """Return the token of the reservation on each node that has one."""
        held = [node.get(f"redlock:k:{key}#reserved") for node in self._nodes]
        return [token.decode() for token in held if isinstance(token, bytes)]

    def of(self, key: str) -> str:
        """The task that has it, by a quorum; empty if none has."""
        return self._owner(self.tokens(key))

    def _owner(self, tokens: list[str]) -> str:
        ids = [owner.task_id for token in tokens if (owner := Owner.of(token))]
        quorum = len(self._nodes) // 2 + 1
        return next((one for one in ids if ids.count(one) >= quorum), "")

    def left(self, key: str) -> float:
        """Return the seconds until it expires, on the node that keeps it longest."""
        return max(node.pttl(f"redlock:k:{key}#reserved") for node in self._nodes) / 1000

    def forget(self, key: str, *, lock: bool = False) -> None:
        """Delete it on all nodes, and the body's lock if asked, as if expired or taken."""
        for node in self._nodes:
            node.delete(f"redlock:k:{key}#reserved", *[f"redlock:k:{key}"] * lock)

    def kept(self, key: str, task: Any) -> None:
        """Check that the task still has the reservation."""
        tokens = self.tokens(key)
        assert self._owner(tokens) == task.id, f"{task.id} has it on these nodes: {tokens}"

    def lasts(self, key: str, *, everywhere: bool = False) -> None:
        """Wait until a majority of nodes, or each, keeps it longer than for an unsent message."""
        enough = len(self._nodes) if everywhere else len(self._nodes) // 2 + 1

        def lasting() -> bool:
            left = [node.pttl(f"redlock:k:{key}#reserved") for node in self._nodes]
            return sum(one > 1000 * UNSENT_TTL_S for one in left) >= enough

        wait_until(lasting, 3.0, f"the reservation of {key} lasts")

    def freed(self, key: str, within: float = 3.0) -> None:
        def seen() -> object:
            left = [node.pttl(f"redlock:k:{key}#reserved") for node in self._nodes]
            return f"{self.tokens(key)}, ms left on each node: {left}"

        what = f"the reservation of {key} is freed"
        wait_until(lambda: not self.tokens(key), within, what, seen=seen)


def replace_and_restart(cluster: Cluster, tasks: dict[str, Any], key: str, queue: str) -> None:
    """Replace calls under each scope, restart the only worker before they are due: the last runs.

    The worker that is started then was not asked to revoke the others.
    """
    scopes = ("until_executing", "until_and_while_executing", "until_executed")
    sent: dict[str, list[Any]] = {scope: [] for scope in scopes}
    with cluster.worker("-c", "2", queue=queue) as worker:
        for _ in range(3):
            for scope, calls in sent.items():
                one = tasks[scope].apply_async(
                    (f"{key}-{scope}",),
                    countdown=4.0,
                    queue=queue,
                    lock={"on_duplicate": "replace"},
                )
                calls.append(one)
        wait_until(lambda: worker.text.count(" received") == 9, 10.0, "all are received")
        worker.terminate()
        worker.ended()
    with cluster.worker("-c", "2", queue=queue):
        for scope, calls in sent.items():
            assert cluster.state(calls[-1], 20.0) == "SUCCESS"
            for one in calls[:-1]:
                cluster.state(one, 20.0)
            ran = [run.task for run in cluster.runs(f"{key}-{scope}")]
            assert ran == [calls[-1].id], f"{scope}: of {[one.id for one in calls]} the last runs"
