"""Asks the workers of an app which tasks wait parked in them, while the nodes are looked at."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..survey.models import Survey
from ..survey.waiting import Parked, count_parked
from .context import Site

__all__ = ["NO_APP", "WORKERS_TIMEOUT_S", "look_with_parked", "parked_in"]

WORKERS_TIMEOUT_S = 1.0
"""To wait for workers: always the whole time, as nobody knows how many there are."""
NO_APP = "tasks that wait parked in workers are not seen without their app: -A APP"


def look_with_parked(site: Site, look: Callable[[], Survey]) -> tuple[Survey, str]:
    """Return what `look` returns, parked tasks counted as waiting; and why they are not, if so.

    The workers are asked at the same time. Without an app there are none to ask.

    Raises:
        QuorumUnavailable: As `look` does.
    """
    if site.app is None:
        return look(), NO_APP
    from ..doctor.workers import ask

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, site.app, WORKERS_TIMEOUT_S)
        seen = look()
        replies, unasked = asked.result()
    if not replies and not unasked:
        unasked = f"no worker answered within {WORKERS_TIMEOUT_S:g} s: parked tasks are not counted"
    return count_parked(seen, Parked.of(replies.values())), unasked


def parked_in(app: Any) -> Callable[[], Parked] | None:
    """Return what asks the workers of an app for the tasks parked in them; None without an app."""
    if app is None:
        return None
    from ..doctor.workers import ask

    return lambda: Parked.of(ask(app, WORKERS_TIMEOUT_S)[0].values())
