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

__all__ = ["Rate", "outlasting", "parsed", "rate_of"]

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MIN_WINDOW_S, MAX_WINDOW_S = 1.0, 86_400.0
"""A shorter one would go for the way to the nodes; a restarted node has no vote on a start for a
whole one."""
MAX_STARTS = 100
"""In one window. Each has a slot, and whoever finds one taken looks at all of them."""
MAX_SLACK_S = 0.25
"""Seconds at most that may pass from the request to the start without another round."""
SLACK_PART = 0.05
"""The same, as a part of the window."""


class Rate(NamedTuple):
    """At most `starts` in any `window`, in seconds; `text` is what a user wrote."""

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


def parsed(text: str) -> tuple[int, float]:
    """Return how many, and in how many seconds: `"10/m"`, `"10/5m"`; Celery writes `rate_limit` so.

    Raises:
        ValueError: It is no rate; says what is.
    """
    found = re.fullmatch(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,5})?([smhd])", text)
    if found is None:
        raise ValueError(
            "must be a rate such as '10/m' or '10/5m': so many starts per s, m, h or d"
        )
    return int(found[1]), float(int(found[2] or 1) * UNITS[found[3]])


@lru_cache
def rate_of(text: str, burst: int | None = None) -> Rate:
    """Return the rate that a text and a burst mean.

    With a burst, so many may start at once, and each of these comes back in the time that the rate
    has for as many: a window that is as much shorter.

    Raises:
        ValueError: There is none such; says why.
    """
    starts, window = parsed(text)
    if burst is not None:
        if burst >= starts:
            raise ValueError(
                f"burst {burst} must be less than the {starts} starts of rate {text!r}, as many of"
                " which may be at once without it"
            )
        starts, window, text = burst, burst * window / starts, f"{text}, burst {burst}"
    if not MIN_WINDOW_S <= window <= MAX_WINDOW_S:
        larger = "give a larger burst" if burst is not None else "give a shorter one"
        raise ValueError(
            f"rate {text} counts starts in windows of {window:g} s, and these last from a second"
            f" to a day: {larger}"
        )
    if starts > MAX_STARTS:
        raise ValueError(
            f"rate {text} has more than {MAX_STARTS} starts, each of which the nodes remember: give"
            f" a burst of at most {MAX_STARTS}, or a shorter window ('10/s' is 600 a minute)"
        )
    return Rate(starts, window, text)
