"""Whether a delivery that meets a held lock is parked in the worker's main process.

Where it is, it never waits in a pool slot: its body's process sends the message again at once, and
says in a header that nothing but the lock is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from .attempts import ATTEMPTS
from .options import TaskOptions

__all__ = ["at_work", "eta_of", "parkable", "set_at_work", "waits"]

_at_work = [False]


def set_at_work(parking: bool) -> None:
    """The worker's main process, before it forks its pool: deliveries are parked here, or not."""
    _at_work[0] = parking


def at_work(options: TaskOptions) -> bool:
    """Whether this worker parks deliveries of such a task."""
    return _at_work[0] and parkable(options)


def parkable(options: TaskOptions) -> bool:
    """Whether deliveries of such a task can be parked: it waits its turn, for one lock."""
    return (
        options.on_conflict == "retry" and options.limit == 1 and options.scope != "until_executing"
    )


def eta_of(countdown: float, attempts: dict[str, Any]) -> datetime:
    """When a message is due that waits for a lock, where no worker parks it; noted in its header.

    The note names the ETA: a later one, of the user's own `retry(countdown=...)`, is none of ours.
    """
    eta = datetime.now(timezone.utc) + timedelta(seconds=countdown)
    attempts["waits"] = eta.isoformat()
    return eta


def waits(headers: Any) -> bool:
    """Whether a message's ETA is there only because its lock was held."""
    attempts = headers.get(ATTEMPTS) if isinstance(headers, Mapping) else None
    eta = headers.get("eta") if isinstance(headers, Mapping) else None
    return isinstance(attempts, Mapping) and eta is not None and attempts.get("waits") == eta
