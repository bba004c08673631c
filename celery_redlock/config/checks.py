"""What each option may be.

A check returns the value, or raises ValueError saying what is allowed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

MIN_TTL = 0.02
"""Seconds; below it the drift allowance and a round trip leave nothing of a lease."""
DAY = 86_400.0
"""Seconds; the longest ttl, because a holder that dies blocks its resource for that long."""
HOUR = 3600.0
LEAST_MEMORY = 65_536
"""Bytes; who gives less means megabytes."""
LONG_TTL = 900.0
"""Seconds; whoever gives a longer ttl means milliseconds, or the time that the work may take."""
Scope = Literal[
    "while_executing",
    "until_executing",
    "until_executed",
    "until_and_while_executing",
    "until_succeeded",
    "until_expired",
]
OnDuplicate = Literal["existing", "raise", "skip", "replace"]
ConflictPolicy = Literal["retry", "skip", "raise", "wait", "reject", "replace"]
SCOPES: tuple[str, ...] = get_args(Scope)
DUPLICATE_POLICIES: tuple[str, ...] = get_args(OnDuplicate)
CONFLICT_POLICIES: tuple[str, ...] = get_args(ConflictPolicy)

Check = Callable[[Any], Any]


def or_none(check: Check) -> Check:
    def checked(value: Any) -> Any:
        return value if value is None else _or(check, value, "None")

    return checked


def lets_several(limit: Any) -> bool:
    """Whether under this limit several bodies may hold a key at a time."""
    return callable(limit) or max((limit,) if isinstance(limit, int) else limit) > 1


def or_callable(check: Check, *arguments: str) -> Check:
    """Accept a callable too, if it can be called with these arguments."""
    what = f"a callable that takes {' and '.join(arguments)}"

    def checked(value: Any) -> Any:
        if not callable(value):
            return _or(check, value, what)
        try:
            inspect.signature(value).bind(*arguments)
        except TypeError:
            raise ValueError(f"must be {what}") from None
        except ValueError:  # nobody knows the signature of some that are written in C
            pass
        return value

    return checked


def _or(check: Check, value: Any, what: str) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{error}, or {what}") from None


def seconds(least: float = 0.0, *, zero: bool = False, day: str = "") -> Check:
    """Accept a number of seconds.

    Args:
        least: The smallest that works; 0 itself only with `zero`.
        zero: Whether 0 works.
        day: If given, a day is the most, and this says why.
    """
    wanted = f"must be a number of seconds {'>=' if zero or least else '>'} {least:g}"

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(wanted)
        if not math.isfinite(value) or value < least or (value == 0 and not zero):
            raise ValueError(wanted)
        if day and value > DAY:
            raise ValueError(f"must be at most {DAY:g} seconds (a day; not milliseconds): {day}")
        return float(value)

    return check


def one_of(literal: Any) -> Check:
    names = get_args(literal)

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


def count(value: Any) -> Any:
    from ..protocol.names import MAX_SLOTS  # most programs have no limit

    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SLOTS:
        raise ValueError(f"must be a whole number from 1 to {MAX_SLOTS}")
    return value


def memory(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or value < LEAST_MEMORY:
        raise ValueError(f"must be a whole number of bytes >= {LEAST_MEMORY} (not of megabytes)")
    return value


def limit(value: Any) -> Any:
    if callable(value):
        return value
    if isinstance(value, (list, tuple)) and value:
        return tuple(map(count, value))
    return _or(count, value, "a list of such, one for each key")


def rate(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("must be a rate such as '10/m'")
    from ..protocol.rate import parsed  # most programs have none

    parsed(value)
    return value


def nodes(value: Any) -> Any:
    if value is not None:
        from ..stores.kinds import listed, parse_nodes  # most programs set none

        parse_nodes(value, "redlock_nodes")
        value = listed(value)
    return value


def key(value: Any) -> Any:
    if value is None or callable(value):
        return value
    if isinstance(value, (list, tuple)):
        for name in value:
            text(name)
        # A copy that nobody can change; a tuple stays what it is: see `Templates`.
        return value if isinstance(value, tuple) else tuple(value)
    if not isinstance(value, str) or not value:
        raise ValueError(
            "must be a template, a list of templates or arguments' names, or a function"
        )
    return value


def too_long(ttl: float) -> str:
    """Return a warning about a ttl, in seconds, that is longer than any lock needs; else ""."""
    if ttl <= LONG_TTL:
        return ""
    return (
        f"a ttl of {ttl:g} s keeps the lock of a dead worker for {ttl / 60:.0f} minutes. It is in"
        f" seconds: do you mean {ttl / 1000:g}? It need not be as long as the work, because leases"
        " are extended while bodies run"
    )


def guarded(restart_guard: str, nodes: int, moves: bool = False) -> bool:
    """Return whether nodes that may have forgotten locks have no vote.

    `moves`: one of them has a standby that takes its place by itself, so nobody has to have
    accepted what that forgets.

    "auto" leaves one node alone: waiting after each of its starts protects from nothing but its own
    crash, and whoever runs one has accepted that. Of two, both must grant a lock: if one forgets,
    the other still says no. From three on, one that forgets is enough for two holders.
    """
    return restart_guard == "uptime" or (restart_guard == "auto" and (nodes > 2 or moves))
