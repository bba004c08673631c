"""Rates: at most a given number of body starts in any window of a given length.

A rate of n starts has n slots. Each start takes a slot, and the nodes remember it for the whole
window, counted from the start, whatever becomes of the body. So the next start in the same slot
comes at least a window later, and the starts of one window each have a slot of their own. A count
of starts on each node would admit more, as with a limit (`names.slots`).

As with a lease (`lease.py`), the time of a slot is counted from before the nodes were asked. So its
ttl is a little longer than the window: for the way to the body, and for the drift of clocks. A rate
is therefore never exceeded, and not quite reached: 1 % is missing, and a twentieth at a window of
one second.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from .lease import DRIFT_FLOOR, DRIFT_RATE

__all__ = ["Rate", "parsed", "rate_of", "ttl_to_hold"]

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MIN_WINDOW_S, MAX_WINDOW_S = 1.0, 86_400.0
"""The limits of a window, in seconds. A shorter one would be spent on the way to the nodes. For the
length of a window a restarted node has no vote on a start, so it must not be longer either."""
MAX_STARTS = 100
"""Maximum number of starts in one window. Each has a slot, and a process that finds one slot taken
looks at all of them."""
MAX_SLACK_S = 0.25
"""Maximum seconds that may pass from the request to the start without another round."""
SLACK_PART = 0.05
"""The same limit, as a part of the window."""


class Rate(NamedTuple):
    """A limit of `starts` in any `window` (seconds); `text` is the user's spelling of it."""

    starts: int
    window: float
    text: str

    @property
    def slack(self) -> float:
        """The seconds by which a slot outlasts the window, to allow for the way to the body."""
        return min(MAX_SLACK_S, SLACK_PART * self.window)

    @property
    def ttl(self) -> float:
        """The seconds for which the nodes are asked to remember a start."""
        return ttl_to_hold(self.window + self.slack)

    def longest(self, patience: float) -> float:
        """Return the ttl of a second request, which follows if the first one took too long.

        It is longer by twice the `patience` of a request, in seconds.
        """
        return ttl_to_hold(self.window + self.slack + 2 * patience)


def ttl_to_hold(seconds: float) -> float:
    """Return the ttl of a lease that is held for `seconds` after the drift (`lease.drift`)."""
    return (seconds + DRIFT_FLOOR) / (1 - DRIFT_RATE)


def parsed(text: str) -> tuple[int, float]:
    """Return the starts and the seconds of a rate such as `"10/m"` or `"10/5m"`.

    Celery's `rate_limit` has the same syntax.

    Raises:
        ValueError: The text is not a rate; the message explains the syntax.
    """
    found = re.fullmatch(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,5})?([smhd])", text)
    if found is None:
        raise ValueError(
            "must be a rate such as '10/m' or '10/5m': so many starts per s, m, h or d"
        )
    return int(found[1]), float(int(found[2] or 1) * UNITS[found[3]])


@lru_cache
def rate_of(text: str, burst: int | None = None) -> Rate:
    """Return the rate for a text and a burst.

    With a burst of b, b bodies may start at once, and the window is the time in which the rate
    allows b starts: shorter than the rate's own window in the same proportion.

    Raises:
        ValueError: There cannot be such a rate; the message says why.
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
