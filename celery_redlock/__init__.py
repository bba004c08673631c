"""Run Celery tasks under a Redlock: one body at a time per key."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .protocol.errors import (
    ConfigurationError,
    DuplicateTask,
    LeaseLost,
    NotAcquired,
    QuorumUnavailable,
    RedlockError,
    ResourceHeld,
)

if TYPE_CHECKING:
    from .config.typed import CallOptions, LockOptions
    from .locking.aio import AsyncHeldLease, AsyncRedlock
    from .locking.held import HeldLease, current_lease
    from .locking.redlock import Redlock
    from .messages.aio import redlock_publish
    from .messages.signals import (
        beat_deduplicated,
        lock_acquired,
        lock_contended,
        lock_extended,
        lock_lost,
        lock_released,
        lock_unavailable,
        task_skipped,
    )
    from .messages.skipped import Skipped
    from .protocol.lease import Lease
    from .protocol.values import Holder
    from .task import SingletonTask, install, locked

__version__ = "0.1.0"

__all__ = [
    "AsyncHeldLease",
    "AsyncRedlock",
    "CallOptions",
    "ConfigurationError",
    "DuplicateTask",
    "HeldLease",
    "Holder",
    "Lease",
    "LeaseLost",
    "LockOptions",
    "NotAcquired",
    "QuorumUnavailable",
    "Redlock",
    "RedlockError",
    "ResourceHeld",
    "SingletonTask",
    "Skipped",
    "beat_deduplicated",
    "current_lease",
    "install",
    "lock_acquired",
    "lock_contended",
    "lock_extended",
    "lock_lost",
    "lock_released",
    "lock_unavailable",
    "locked",
    "redlock_publish",
    "task_skipped",
]

# The modules of these names are imported at their first use. Most of them import redis-py, and the
# tasks import Celery and connect its signals. Celery's commands and pytest load modules of this
# package wherever it is installed, and need neither.
_HOME = {
    **dict.fromkeys(("CallOptions", "LockOptions"), "config.typed"),
    **dict.fromkeys(("AsyncHeldLease", "AsyncRedlock"), "locking.aio"),
    **dict.fromkeys(("HeldLease", "current_lease"), "locking.held"),
    "Holder": "protocol.values",
    "Lease": "protocol.lease",
    "Redlock": "locking.redlock",
    "Skipped": "messages.skipped",
    "redlock_publish": "messages.aio",
    **dict.fromkeys(("SingletonTask", "install", "locked"), "task"),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(f"{__name__}.{_HOME.get(name, 'signals')}")
        found: object = getattr(home, name)
    except AttributeError as error:
        # After an AttributeError, `from celery_redlock import name` would not show the cause.
        raise ImportError(f"celery_redlock.{name} cannot be loaded: {error}") from error
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]
