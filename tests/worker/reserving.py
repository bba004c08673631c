"""Tasks under a reservation, declared on the workers' app and on the one that sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery

from celery_redlock import SingletonTask
from celery_redlock.options import SCOPES

NAME = "tests.worker.tasks"


def declare(app: Celery, body: Callable[..., Any]) -> dict[str, Any]:
    """One task per scope, with the same key and body, and some that are acknowledged late.

    Args:
        app: Whose tasks they are.
        body: What they do, given the task, its key, seconds, and how to end.
    """
    tasks = {}
    for scope in SCOPES:
        for name, options in (
            (scope, {}),
            (f"{scope}_late", {"acks_late": True, "reject_on_worker_lost": True}),
        ):

            def run(self: Any, key: str, seconds: float = 0.05, then: str = "return") -> Any:
                again = self.request.delivery_info.get("redelivered")
                return body(self, key, seconds, "return" if again else then)

            tasks[name] = app.task(
                base=SingletonTask,
                bind=True,
                name=f"{NAME}.{name}",
                lock_key="k:{key}",
                lock_scope=scope,
                max_retries=3,
                **options,
            )(run)
    return tasks
