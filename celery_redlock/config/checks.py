"""What each option may be.

A check returns the value, or raises ValueError with what is wrong and what to give instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

MIN_TTL = 0.02
"""Seconds; below it the drift allowance and a round trip leave nothing of a lease."""
DAY = 86_400.0
MOST_SLOTS = 100
"""Bodies at a time per key; each has a name of its own on the nodes, and who finds one taken looks
at all of them."""
SCOPES = (
    "while_executing",
    "until_executing",
    "until_executed",
    "until_and_while_executing",
    "until_expired",
)
DUPLICATE_POLICIES = ("existing", "raise", "skip", "replace")
CONFLICT_POLICIES = ("retry", "skip", "raise", "wait", "reject", "replace")


def seconds(least: float = 0.0, *, none: bool = False, zero: bool = False) -> Any:
    wanted = f"a number of seconds {'>=' if zero or least else '>'} {least:g}"

    def check(value: Any) -> Any:
        if value is None and none:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"must be {wanted}{', or None' if none else ''}")
        if not math.isfinite(value) or value < least or (value == 0 and not zero):
            raise ValueError(f"must be {wanted}")
        return float(value)

    return check


def up_to_a_day(seconds: Callable[[Any], float], why: str) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        if (given := seconds(value)) > DAY:
            raise ValueError(f"must be at most {DAY:g} (a day): {why}")
        return given

    return check


ttl = up_to_a_day(
    seconds(MIN_TTL),
    "a holder that dies blocks the resource for so long; a lease is extended by itself while its"
    " task runs, so it can be short",
)
hold_for = up_to_a_day(
    seconds(zero=True),
    "a node that was restarted has no vote for so long. What must not run again for longer is"
    " reserved for longer, by scope 'until_expired' and reserve_ttl",
)


def one_of(*names: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(map(repr, names))}")
        return value

    return check


def text(value: Any) -> Any:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a string that is not empty")
    return value


def flag(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("must be True or False")
    return value


def flag_or_none(value: Any) -> Any:
    if value is not None and not isinstance(value, bool):
        raise ValueError("must be True, False or None")
    return value


def nodes(value: Any) -> Any:
    if value is None:
        return None
    from ..stores.redis.address import parse_nodes  # the one check that needs redis

    parse_nodes(value, "redlock_nodes")
    return value


def on_lost(value: Any) -> Any:
    if value in ("raise", "log") or callable(value):
        return value
    raise ValueError("must be 'raise', 'log' or a callable that takes the lease")


def key(value: Any) -> Any:
    if value is None or callable(value):
        return value
    if isinstance(value, (list, tuple)):
        for name in value:
            text(name)
        return value if isinstance(value, tuple) else tuple(value)  # nobody is to change it
    return text(value)


def on_conflict(value: Any) -> Any:
    if callable(value):
        return value
    try:
        return one_of(*CONFLICT_POLICIES)(value)
    except ValueError as error:
        raise ValueError(
            f"{error}, or a callable that is given the holder and the request"
        ) from None


def limit(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_SLOTS:
        raise ValueError(f"must be a whole number from 1 to {MOST_SLOTS}")
    return value


def scope_name(value: Any) -> Any:
    return None if value is None else text(value)
