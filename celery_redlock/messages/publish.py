"""Wrap `Task.apply_async`, once for all tasks, and `Celery.send_task`.

For a task that reserves its key, `publication.py` does the rest. For a task whose scope reserves
nothing, `apply_async` behaves as before. `send_task` does not know the task, and refuses `lock=`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

from celery.app.base import Celery
from celery.app.task import Task

from ..config.options import TASK
from ..config.task_lock import PER_CALL, lock_of
from ..protocol.errors import ConfigurationError
from .revokes import note_revokes

__all__ = ["wrap"]

_POSITIONAL = ("producer", "link", "link_error", "shadow")
"""The parameters of `apply_async` that may also be given by position, after the task's id."""


@functools.cache
def _publish() -> Any:
    """Import the code for reservations when the first one is needed, and return `publish`.

    The round to the nodes takes longer than the import.
    """
    from .publication import publish

    return publish


def _before_purge(app: Any) -> tuple[int, bool]:
    """Purge the queues of an app, and release the reservations; see `purge_first`."""
    from .purge import purge_first  # imported here, because producers do not purge

    purged = [purge_first(app, queue) for queue in app.amqp.queues.consume_from]
    return sum(gone for gone, _ in purged), any(more for _, more in purged)


def wrap(task_class: Any = Task) -> None:
    """Wrap `apply_async` and `send_task`, and note the revokes of this process. Idempotent."""
    note_revokes(_before_purge)
    if "celery.bin.purge" in sys.modules:
        from .purge import wrap_command

        wrap_command()
    _wrap_send_task()
    original = task_class.apply_async
    if getattr(original, "__redlock__", False):
        return

    @functools.wraps(original)
    def apply_async(
        self: Any,
        args: Any = None,
        kwargs: Any = None,
        task_id: Any = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        lock = lock_of(self)
        stamped = "lock" not in options or _is_stamp("lock", options)
        if lock is None:
            if not stamped:
                raise ConfigurationError(
                    f"{self.name} takes no lock, so there is nothing that lock= could change for"
                    " one call of it: give it SingletonTask as its base, or @locked"
                )
            return original(self, args, kwargs, task_id, *rest, **options)
        for name in options:
            if name.startswith("lock_") and name[5:] in TASK and not _is_stamp(name, options):
                raise ConfigurationError(
                    f"{self.name}: no call reads {name}; one call can be given"
                    f" lock={{{', '.join(map(repr, PER_CALL))}: ...}}, the others are declared with"
                    " the task"
                )
        given = None if stamped else options.pop("lock")
        if self.app not in lock.published_on:
            lock.check_app(self.app, self.name)  # its settings may have changed since it was bound
            lock.published_on.add(self.app)
        again = _is_reserved(options.get("headers"))
        if given is None and not again and lock.scope == "while_executing":
            return original(self, args, kwargs, task_id, *rest, **options)
        options.update(zip(_POSITIONAL, rest, strict=False))
        return _publish()(
            self,
            lock,
            given,
            arguments=(args, kwargs),
            task_id=task_id,
            options=options,
            original=original,
        )

    apply_async.__redlock__ = True  # type: ignore[attr-defined]
    task_class.apply_async = apply_async


def _wrap_send_task() -> None:
    """Refuse `lock=` of a message that is sent by the name of its task; nothing would read it."""
    original: Any = Celery.send_task
    if getattr(original, "__redlock__", False):
        return

    @functools.wraps(original)
    def send_task(self: Celery, name: str, *rest: Any, **options: Any) -> Any:
        if "lock" in options and not _is_stamp("lock", options):
            raise ConfigurationError(
                f"{name} is sent by its name, and only the task itself can read lock=: import the"
                " task in this program, and call its apply_async"
            )
        return original(self, name, *rest, **options)

    send_task.__redlock__ = True  # type: ignore[attr-defined]
    Celery.send_task = send_task  # type: ignore[method-assign, assignment]


def _is_reserved(headers: Any) -> bool:
    """Return True if a message's headers contain a reservation: it is sent again."""
    if not isinstance(headers, Mapping):
        return False
    from .headers import RESERVATION  # imported here, because most programs give no headers

    return RESERVATION in headers


def _is_stamp(name: str, options: Mapping[str, Any]) -> bool:
    """Return True if an option is a stamp: Celery copies them from a message, under any name."""
    stamped = options.get("stamped_headers")
    return isinstance(stamped, (list, tuple, set, frozenset, str, dict)) and name in stamped
