"""`redlock_disabled`: for tests that are about something else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..config import settings

__all__ = ["redlock_disabled"]

_counting = threading.Lock()


@contextmanager
def redlock_disabled() -> Iterator[None]:
    """No task of this process takes a lock while the block runs, nor a reservation.

    As if each app had `redlock_enabled = False`. A `with redlock.lock(...)` block locks all the
    same; and a worker in a process of its own needs the setting.
    """
    with _counting:
        settings.switched_off += 1
    try:
        yield
    finally:
        with _counting:
            settings.switched_off -= 1
