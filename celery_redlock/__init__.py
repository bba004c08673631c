"""Run Celery tasks under a Redlock: one body at a time per key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import (
    ConfigurationError,
    DuplicateTask,
    LeaseLost,
    NotAcquired,
    QuorumUnavailable,
    RedlockError,
    ResourceHeld,
)
from .hold import HeldLease, current_lease
from .lease import Holder, Lease
from .lock import Redlock

if TYPE_CHECKING:
    from .task import SingletonTask, Skipped, install, locked

__version__ = "0.1.0"

__all__ = [
    "ConfigurationError",
    "DuplicateTask",
    "HeldLease",
    "Holder",
    "Lease",
    "LeaseLost",
    "NotAcquired",
    "QuorumUnavailable",
    "Redlock",
    "RedlockError",
    "ResourceHeld",
    "SingletonTask",
    "Skipped",
    "current_lease",
    "install",
    "locked",
]


def __getattr__(name: str) -> object:
    # Only who makes tasks pays for the import of Celery's; it connects the signal handlers as well.
    if name in ("SingletonTask", "Skipped", "install", "locked"):
        from . import task

        return getattr(task, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
