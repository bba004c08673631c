"""Run Celery tasks under a Redlock: one body at a time per key."""

from __future__ import annotations

from .errors import (
    ConfigurationError,
    LeaseLost,
    NotAcquired,
    QuorumUnavailable,
    RedlockError,
    ResourceHeld,
)
from .hold import HeldLease, current_lease
from .lease import Holder, Lease
from .lock import Redlock
from .task import SingletonTask, Skipped, locked
from .worker import install

__version__ = "0.1.0"

__all__ = [
    "ConfigurationError",
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
    "locked",
]

install()
