"""Entries of a beat, and the one that is due."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from tests.promises.beat.beat_world import Beat

LONG_AGO = datetime(2025, 11, 21, tzinfo=timezone.utc)


def entries(when: Any, count: int = 1, **fields: Any) -> Mapping[str, Any]:
    return {
        f"job-{n}": {"task": "job", "schedule": when, "args": (f"job-{n}",), **fields}
        for n in range(count)
    }


def due(beat: Beat) -> Any:
    """The one entry of a beat."""
    (found,) = beat.scheduler.schedule.values()
    found.last_run_at = LONG_AGO
    return found
