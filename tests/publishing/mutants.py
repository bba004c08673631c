"""Planted bugs, for this campaign to find: each was a bug of the library once.

Loaded by `project.py` and the beats' app alone, in processes of a campaign that was asked to.
"""

from __future__ import annotations

from tests.faults.mutants import Mutant
from tests.publishing.oracle import ERRBACK


def plant(name: str) -> None:
    """Put a bug into the library, in this process and those forked from it."""
    MUTANTS[name].plant()


def _errback_in_place() -> None:
    from celery_redlock.messages.errbacks import ErrorCallback

    ErrorCallback.send = lambda self, task, why: None  # type: ignore[method-assign]


MUTANTS: dict[str, Mutant] = {
    "errback-in-place": Mutant(
        "an error callback whose key is held is sent as a task", _errback_in_place, ("calm",),
        (ERRBACK,), seconds=12.0),
}  # fmt: skip
