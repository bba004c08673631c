"""Whether a delivery that meets a held lock is parked in the worker's main process.

Where it is, it never waits in a pool slot: its body's process sends the message again at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config.options import TaskOptions

__all__ = ["at_work", "parkable", "parks", "set_at_work"]

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
