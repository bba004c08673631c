"""How the page says it: times, durations, names from elsewhere, links to a lock."""

from __future__ import annotations

import math
import time
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from ..protocol.values import printable
from ..survey.force_release import stop_command

__all__ = ["FILTERS", "clock", "named_in", "quoted", "seconds", "short", "stamp"]

LONG = 96
"""Characters of a name in a list; a lock's own page has all of it."""


def seconds(given: float | None) -> str:
    """A duration, as exact as a reader wants it: `0.4 s`, `12 s`, `3 min 5 s`, `2 h 10 min`."""
    if given is None:
        return "\u2013"
    if math.isinf(given):
        return "for ever"
    if given < 0:
        return f"-{seconds(-given)}"  # clocks of two hosts differ
    if 0 < given < 0.00005:
        return "< 0.1 ms"
    if given < 0.0995:
        return f"{given * 1e3:.0f} ms" if given >= 0.0095 else f"{given * 1e3:.1f} ms"
    if given < 9.95:
        return f"{given:.1f} s"
    whole = round(given)
    for unit, below, size, small in (("min", "s", 60, 3600), ("h", "min", 3600, 86_400)):
        if whole < size:
            break
        if whole < small:
            first, rest = divmod(whole, size)
            rest //= 1 if below == "s" else 60
            return f"{first} {unit} {rest} {below}" if rest else f"{first} {unit}"
    if whole >= 86_400:
        days, rest = divmod(whole, 86_400)
        return f"{days} d {rest // 3600} h" if rest >= 3600 else f"{days} d"
    return f"{whole} s"


def clock(at: float) -> str:
    """A time of day, in UTC; with the day, if it is not today."""
    try:
        when, today = time.gmtime(at), time.gmtime()
        shape = "%H:%M:%S" if when[:3] == today[:3] else "%Y-%m-%d %H:%M:%S"
        return time.strftime(shape, when)
    except (OverflowError, OSError, ValueError):
        return "?"  # what a node or a worker said is no time


def stamp(at: float) -> str:
    """The same for programs: ISO 8601."""
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
    except (OverflowError, OSError, ValueError):
        return ""


def short(text: str, most: int = LONG) -> str:
    """A name in a list: printable, and not too long; its begin and its end are what tells."""
    text = printable(text)
    return text if len(text) <= most else f"{text[: most * 2 // 3]}…{text[-most // 3 :]}"


def quoted(name: str) -> str:
    """The name of a resource as it may stand in a link; any comes back as it was: `named_in`."""
    return quote(name, safe="", errors="surrogatepass")


def named_in(query: bytes, field: str = "resource") -> str:
    """The name that stands in a query string; empty if there is none.

    Not by way of the request's own arguments: decoding makes those that are no UTF-8 alike.
    """
    for part in query.split(b"&"):
        name, _, value = part.partition(b"=")
        if name.decode("latin-1") == field:
            raw = unquote_to_bytes(value.replace(b"+", b" "))
            try:
                return raw.decode("utf-8", "surrogatepass")
            except UnicodeDecodeError:
                return raw.decode("utf-8", "replace")
    return ""


def count(number: int) -> str:
    """A number, its thousands apart."""
    return f"{number:,}".replace(",", "\u202f")


def plural(number: int, one: str, many: str = "") -> str:
    """`1 lock`, `2 locks`."""
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


FILTERS: dict[str, Any] = {
    "seconds": seconds,
    "clock": clock,
    "stamp": stamp,
    "short": short,
    "printable": printable,
    "stop_command": lambda task_id: stop_command(task_id or ""),
    "quoted": quoted,
    "count": count,
    "plural": plural,
}
