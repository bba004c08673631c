"""Let an error callback that is a locked task wait for its turn, as any task does.

If a callback takes one argument, the id of the failed task, Celery sends it as a task. Any other
callback (`request, exc, traceback`, or `.si()` with two arguments of its own) it calls as a
function, in the process of the failed task. Then there is no message that could wait, and a refusal
would end as a line in the log. So it is called only if its lock is free; otherwise it is sent as a
task.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from celery.app.task import Context
from celery.canvas import Signature

from ..config.failure import pack
from ..config.task_lock import TaskLock, lock_of

__all__ = ["ErrorCallback", "taken", "wrap"]

logger = logging.getLogger("celery_redlock.task")


@dataclass(frozen=True)
class ErrorCallback:
    """A call of an error callback: its signature and its arguments."""

    signature: Any
    request: Any
    exc: BaseException
    traceback: object

    @property
    def task(self) -> Any:
        """The task that it calls."""
        return self.signature.type

    def send(self, why: BaseException) -> None:
        """Send it as a task of its own, because its lock is not free. Log an error if that fails.

        Args:
            why: The refusal.
        """
        # Imported here, because programs that only publish do not need them.
        from celery.exceptions import SoftTimeLimitExceeded
        from kombu import serialization

        from ..protocol.texts import event, printable
        from .conflict import send_patiently

        task, signature, failed = self.task, self.signature, self.request
        name = printable(f"{task.name}, the error callback of {failed.task}[{failed.id}],")
        # An id belongs to one task, but several tasks may have failed with this callback.
        options = {key: value for key, value in signature.options.items() if key != "task_id"}
        serializer = options.get("serializer") or task.serializer
        args = tuple(signature.args)
        if not signature.immutable:
            encodes = functools.partial(serialization.dumps, serializer=serializer)
            args = (*pack(failed, self.exc, self.traceback, encodes), *args)
            # Leave out the arguments of the failed task, because they may be secret.
            own = "".join(f", {value!r:.200}" for value in signature.args)
            about = printable(f"({failed.task}[{failed.id}], {type(self.exc).__name__}, ...{own})")
            options.setdefault("argsrepr", about)
        options["parent_id"] = failed.id
        options["root_id"] = failed.root_id or failed.id
        again = task.signature(args, dict(signature.kwargs), **options)
        try:
            sent = send_patiently(name, again.apply_async)
        except SoftTimeLimitExceeded:
            logger.error(
                "%s is LOST: a time limit struck while it was sent; %s",
                name,
                why,
                extra=event("errback_lost"),
            )
            raise
        except Exception as error:
            line = "%s is LOST: it cannot run now (%s), and cannot be sent as a task (%r)"
            logger.error(line, name, why, error, extra=event("errback_lost"))
        else:
            line = "%s waits, as task %s: %s"
            logger.info(line, name, printable(sent.id), why, extra=event("errback_waits"))


_current: ContextVar[ErrorCallback | None] = ContextVar("redlock_errback", default=None)


def taken(lock: TaskLock) -> ErrorCallback | None:
    """Return the error callback that is called with this lock, once; else None.

    Celery's stack of tasks is not enough: if a task class has a `__call__` that only calls `run`,
    the failed task stays on top.
    """
    callback = _current.get()
    if callback is None or lock_of(callback.task) is not lock:
        return None
    _current.set(None)  # calls by its body are not error callbacks
    return callback


def wrap(signature_class: Any = Signature) -> None:
    """Wrap `Signature.__call__` to note calls of error callbacks that are locked. Idempotent."""
    original: Callable[..., Any] = signature_class.__call__
    if getattr(original, "__redlock__", False):
        return

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_failure(args) or lock_of(self.type) is None or _is_eager(self.type.app, args[0]):
            return original(self, *args, **kwargs)
        before = _current.set(ErrorCallback(self, *args))
        try:
            return original(self, *args, **kwargs)
        finally:
            _current.reset(before)

    call.__redlock__ = True  # type: ignore[attr-defined]
    signature_class.__call__ = call


def _is_failure(args: tuple[Any, ...]) -> bool:
    """Return True if these are the arguments with which Celery calls an error callback."""
    return len(args) == 3 and isinstance(args[0], Context) and isinstance(args[1], BaseException)


def _is_eager(app: Any, request: Any) -> bool:
    """Return True if the failed task was called eagerly, so that nothing is sent."""
    eager = (request.delivery_info or {}).get("is_eager") or request.is_eager
    return bool(eager or app.conf.task_always_eager)
