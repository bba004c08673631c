"""Whether a delivery that meets a held lock is parked in the worker's main process.

Where it is, it never waits in a pool slot: its body's process sends the message again at once, and
says in a header that nothing but the lock is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from .attempts import ATTEMPTS
from .options import TaskOptions

__all__ = ["at_work", "eta_of", "parkable", "parks", "set_at_work", "waits"]

PARKS = "redlock_parks"
"""Attribute of a request: whether it would be parked."""

_at_work = [False]


def set_at_work(parking: bool) -> None:
    """The worker's main process, before it forks its pool: deliveries are parked here, or not."""
    _at_work[0] = parking


def parks(request: Any, options: TaskOptions, resources: Sequence[str]) -> bool:
    """Whether this worker parks a delivery that meets a held lock; noted for `at_work`."""
    here = _at_work[0] and len(resources) == 1 and parkable(options)
    setattr(request, PARKS, here)
    return here


def at_work(request: Any) -> bool:
    """The same, once it was found out."""
    return getattr(request, PARKS, False) is True


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
