"""Write the arguments of an error callback into a message, and read them again.

Celery calls `callback(request, exc, traceback, *own)` in the process of the failed task. If the
callback is sent as a task of its own, the first three arguments are written as plain data, and
rebuilt before its key and its body see them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from celery.app.task import Context
from celery.utils.saferepr import saferepr

__all__ = ["FailedRequest", "key_arguments", "pack", "unpack"]

FAILED = "redlock_failed"
"""Key in the first argument of such a message, for the request of the failed task."""
_NOT_SENT = frozenset(
    ("callbacks", "errbacks", "chain", "chord", "options", "logfile", "loglevel", "time_start")
)
"""Fields of that request that a callback does not get. Some of them contain the messages that
Celery would send next, which may be of any size."""


class FailedRequest(Context):
    """The request of a failed task. In a key it is replaced by the id of that task."""

    def __json__(self) -> Any:
        return self.id


def pack(
    request: Context, exc: BaseException, traceback: object, encodes: Callable[[Any], Any]
) -> tuple[Any, ...]:
    """Return a failure as three arguments that a message can carry.

    Args:
        request: The request of the failed task.
        exc: Its exception.
        traceback: Its text, or None.
        encodes: Function that raises if the message cannot carry a value. Such a value is replaced
            by its repr if it is an argument, and left out if it is another field of the request.
    """

    def carried(value: Any) -> Any:
        try:
            encodes(value)
        except Exception:
            return saferepr(value)
        return value

    def is_carried(name: str, value: Any) -> bool:
        if name in _NOT_SENT or name.startswith(("_", "redlock_")):
            return False  # our own headers contain tokens
        try:
            encodes(value)
        except Exception:
            return False
        return True

    given = dict(vars(request))
    given["args"] = [carried(value) for value in given.get("args") or ()]
    given["kwargs"] = {
        name: carried(value) for name, value in dict(given.get("kwargs") or {}).items()
    }
    headers = given.get("headers")
    if isinstance(headers, dict):
        given["headers"] = {name: one for name, one in headers.items() if is_carried(name, one)}
    kind = type(exc)
    return (
        {FAILED: {name: value for name, value in given.items() if is_carried(name, value)}},
        {
            "exc_type": kind.__qualname__,
            "exc_message": [carried(value) for value in exc.args],
            "exc_module": kind.__module__,
        },
        traceback if traceback is None else str(traceback),
    )


def unpack(task: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments of a call, with the request and the exception from `pack` rebuilt.

    The message is untrusted input: a value that cannot be an exception becomes an `Exception` with
    its text.
    """
    if not args or task is None:
        return args
    first = args[0]
    if isinstance(first, Context) and not isinstance(first, FailedRequest):
        return (FailedRequest(vars(first)), *args[1:])
    if type(first) is not dict or len(args) < 3:
        return args
    fields = first.get(FAILED)
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        return args
    try:
        exc = task.backend.exception_to_python(args[1])
    except Exception:
        exc = None
    if not isinstance(exc, Exception):
        exc = Exception(saferepr(args[1]))
    return (FailedRequest(fields), exc, *args[2:])


def key_arguments(args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments from which a key of all arguments is made.

    Of a failure only the request counts (by the id of the failed task), because exceptions and
    tracebacks have no stable text.
    """
    if len(args) < 3 or not isinstance(args[0], FailedRequest):
        return args
    return (args[0], None, None, *args[3:])
