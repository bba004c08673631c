"""The app of the canvas tests: a task for each policy, and the tasks around it.

The value of a task contains its arguments, so that the value at the end of a canvas shows what came
before: `c(b,~)` is what `c` made of what `b` returned and of another that was skipped.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery import Celery, Task

from celery_redlock import SingletonTask, Skipped
from tests.support.bodies import note

NAME = "tests.promises.canvas.tasks"
SKIPPED = "~"


@dataclass(frozen=True)
class Policy:
    """Lock options of a task."""

    scope: str = "while_executing"
    on_conflict: str = "retry"
    on_duplicate: str = "existing"

    @property
    def name(self) -> str:
        end = self.on_conflict if self.scope == "while_executing" else self.on_duplicate
        return f"{self.scope}_{end}"

    @property
    def options(self) -> dict[str, Any]:
        if self.scope == "while_executing":
            return {"lock_on_conflict": self.on_conflict}
        options = {"lock_scope": self.scope, "lock_on_duplicate": self.on_duplicate}
        return options | ({"lock_reserve_ttl": 600.0} if self.scope == "until_expired" else {})


RESERVING = ("until_executing", "until_executed", "until_and_while_executing", "until_expired")
POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy(on_conflict="retry"),
        Policy(on_conflict="skip"),
        *(
            Policy(scope, on_duplicate=duplicate)
            for scope in RESERVING
            for duplicate in ("existing", "raise", "skip", "replace")
            if (scope, duplicate) != ("until_expired", "replace")  # there is no such thing
        ),
    )
}


def show(value: Any) -> str:
    """Return the value of a task as it stands in the value of the next one."""
    if Skipped.of(value) is not None:
        return SKIPPED
    if isinstance(value, (list, tuple)):
        return ",".join(map(show, value))
    return str(value)


def said(own: str, given: tuple[Any, ...]) -> str:
    return f"{own}({show(given)})" if given else own


class Lingering(SingletonTask):
    """A task that can linger, with its lock, after its successor was published."""

    abstract = True

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: dict[str, Any]) -> None:
        time.sleep(kwargs.get("lingers", 0.0))


def make_app(conf: Mapping[str, Any]) -> Celery:
    """Return the app, the same for producers and workers."""
    app = Celery(NAME, set_as_current=False)
    app.conf.update(conf)

    for policy in POLICIES.values():

        @app.task(
            base=Lingering,
            bind=True,
            shared=False,
            name=f"{NAME}.{policy.name}",
            lock_key="k:{key}",
            **policy.options,
        )
        def locked(
            self: Task,
            *given: Any,
            key: str,
            own: str = "a",
            seconds: float = 0.02,
            until: str = "",
            becomes: Any = None,
            lingers: float = 0.0,
        ) -> str:
            run = uuid.uuid4().hex[:8]
            note("enter", f"k:{key}", self.request.id, run, path=app.conf.test_log)
            try:
                time.sleep(seconds)
                while until and not os.path.exists(until):
                    time.sleep(0.01)
            finally:
                note("exit", f"k:{key}", self.request.id, run, path=app.conf.test_log)
            if becomes is not None:
                return str(self.replace(app.signature(becomes)))
            return said(own, given)

    @app.task(shared=False, name=f"{NAME}.plain")
    def plain(*given: Any, own: str) -> str:
        return said(own, given)

    @app.task(bind=True, shared=False, name=f"{NAME}.replaced")
    def replaced(self: Task, *given: Any, by: Any) -> Any:
        """Another takes its place."""
        signature = app.signature(by)
        return self.replace(signature.clone(given) if given else signature)

    app.finalize()
    return app


if "TEST_CONF" in os.environ:
    app = make_app(json.loads(os.environ["TEST_CONF"]))
