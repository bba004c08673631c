"""How often bodies may start: at most so many in any window of so many seconds.

Each start takes one of as many slots as may start in a window, and the nodes remember it for the
window, counted from the start, whatever becomes of the body. So whoever starts in the same slot
next does so a window later, and of the starts in one window each has a slot of its own. A count of
starts on each node would admit more, as with a limit (`names.slots`).

The window of a slot is counted from before the nodes were asked, as a lease is (`lease.py`): a
little is added for that, and for the drift of clocks, so a rate is never exceeded, and not quite
reached: by 1 %, and by a twentieth at a window of one second.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from .lease import DRIFT_FLOOR, DRIFT_RATE

__all__ = ["Rate", "outlasting", "rate_of"]

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MAX_WINDOW_S = 86_400.0
"""A restarted node has no vote for as long."""
MAX_STARTS = 100
"""In one window. Each has a slot, and whoever finds one taken looks at all of them."""
MAX_SLACK_S = 0.25
"""Seconds at most that may pass from the request to the start without another round."""
SLACK_PART = 0.05
"""The same, as a part of the window."""


class Rate(NamedTuple):
    """At most `starts` in any `window`; what a user wrote is `text`."""

    starts: int
    window: float
    text: str

    @property
    def slack(self) -> float:
        """Seconds that a slot is taken for longer than the window, for the way to the body."""
        return min(MAX_SLACK_S, SLACK_PART * self.window)

    @property
    def ttl(self) -> float:
        """Seconds for which a start asks the nodes to remember it."""
        return outlasting(self.window + self.slack)

    def longest(self, patience: float) -> float:
        """The same where the first request took too long: a second may take this `patience`."""
        return outlasting(self.window + self.slack + 2 * patience)


def outlasting(seconds: float) -> float:
    """Return the ttl of a lease that is held for so long, the drift deducted (`lease.drift`)."""
    return (seconds + DRIFT_FLOOR) / (1 - DRIFT_RATE)


@lru_cache
def rate_of(text: str) -> Rate:
    """Read a rate: `"10/m"`, `"10/5m"`, as Celery's `rate_limit`.

    Raises:
        ValueError: It is none; says what is.
    """
    found = re.fullmatch(r"\s*([0-9]{1,9})\s*/\s*([0-9]{0,6})\s*([smhd])\s*", text)
    starts, window = (
        (int(found[1]), float(int(found[2] or 1) * UNITS[found[3]])) if found else (0, 0.0)
    )
    if not starts or not window:
        raise ValueError(
            "must be a rate such as '10/m' or '10/5m': so many starts, in one or so many of"
            " s, m, h or d"
        )
    if window > MAX_WINDOW_S:
        raise ValueError("must have a window of at most a day: a restarted node has no vote for it")
    if starts > MAX_STARTS:
        raise ValueError(
            f"must be of at most {MAX_STARTS} starts, as the nodes remember each: give a shorter"
            f" window, in which fewer start ('10/s' is as many a minute as '600/m', evenly)"
        )
    return Rate(starts, window, text.strip())
