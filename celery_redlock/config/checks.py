"""Checks for the values of options.

A check returns the value, or raises a ValueError that says what is allowed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

MIN_TTL = 0.02
"""The shortest ttl, in seconds; below it the drift and a round trip leave nothing of a lease."""
DAY = 86_400.0
"""The longest ttl, in seconds, because a holder that dies blocks its resource for that long."""
HOUR = 3600.0
MIN_MEMORY = 65_536
"""Minimum number of bytes of memory; a smaller number was probably meant as megabytes."""
LONG_TTL = 900.0
"""The longest ttl without a warning, in seconds. A longer one was probably meant as milliseconds,
or as the time that the work may take."""
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


def allows_several(limit: Any) -> bool:
    """Return True if this limit lets several bodies hold a key at a time."""
    return callable(limit) or max((limit,) if isinstance(limit, int) else limit) > 1


def or_callable(check: Check, *arguments: str) -> Check:
    """Return a check that also accepts a callable, if it can be called with these arguments."""
    what = f"a callable that takes {' and '.join(arguments)}"

    def checked(value: Any) -> Any:
        if not callable(value):
            return _or(check, value, what)
        try:
            inspect.signature(value).bind(*arguments)
        except TypeError:
            raise ValueError(f"must be {what}") from None
        except ValueError:  # some callables written in C have no known signature
            pass
        return value

    return checked


def _or(check: Check, value: Any, what: str) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{error}, or {what}") from None


def seconds(least: float = 0.0, *, zero: bool = False, day: str = "") -> Check:
    """Return a check that accepts a number of seconds.

    Args:
        least: The smallest number allowed; 0 itself only with `zero`.
        zero: True to allow 0.
        day: If given, more than a day is not allowed, and this text gives the reason.
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


def page_address(value: Any) -> Any:
    if not isinstance(value, str) or "{page}" not in value:
        raise ValueError(
            "must be an address with {page} in it, such as 'https://docs.example.org/{page}.html'"
        )
    return value


def flag(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("must be True or False")
    return value


def count(value: Any) -> Any:
    from ..protocol.names import MAX_SLOTS  # imported here: most programs have no limit

    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SLOTS:
        raise ValueError(f"must be a whole number from 1 to {MAX_SLOTS}")
    return value


def memory(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or value < MIN_MEMORY:
        raise ValueError(f"must be a whole number of bytes >= {MIN_MEMORY} (not of megabytes)")
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
    from ..protocol.rate import parsed  # imported here: most programs have no rate

    parsed(value)
    return value


def nodes(value: Any) -> Any:
    if value is not None:
        from ..stores.kinds import listed, parse_nodes  # imported here: most programs set no nodes

        parse_nodes(value, "redlock_nodes")
        value = listed(value)
    return value


def key(value: Any) -> Any:
    if value is None or callable(value):
        return value
    if isinstance(value, (list, tuple)):
        for name in value:
            text(name)
        # Return a copy that nobody can change; a tuple is returned as it is: see `Templates`.
        return value if isinstance(value, tuple) else tuple(value)
    if not isinstance(value, str) or not value:
        raise ValueError(
            "must be a template, a list of templates or arguments' names, or a function"
        )
    return value


def long_ttl_warning(ttl: float) -> str:
    """Return a warning if a ttl, in seconds, is longer than any lock needs; else ""."""
    if ttl <= LONG_TTL:
        return ""
    return (
        f"a ttl of {ttl:g} s keeps the lock of a dead worker for {ttl / 60:.0f} minutes. It is in"
        f" seconds: do you mean {ttl / 1000:g}? It need not be as long as the work, because leases"
        " are extended while bodies run"
    )


def guarded(restart_guard: str, nodes: int, moves: bool = False) -> bool:
    """Return True if nodes that may have forgotten locks have no vote.

    "auto" does not guard a single node: to wait after each of its starts protects only from its own
    crash, and a user of one node has accepted that risk. With two nodes, both must grant a lock: if
    one forgets, the other still says no. With three or more, one node that forgets is enough for
    two holders.

    Args:
        restart_guard: The option: "uptime", "auto" or "off".
        nodes: The number of nodes.
        moves: True if a standby takes the place of a node by itself. With "auto" it is guarded,
            because the user has not accepted the locks that a standby lacks.
    """
    return restart_guard == "uptime" or (restart_guard == "auto" and (nodes > 2 or moves))
