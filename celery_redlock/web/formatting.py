"""Formatting for the pages: times, durations, untrusted names, links to a lock."""

from __future__ import annotations

import math
import time
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from ..protocol.texts import printable
from ..survey.durations import span
from ..survey.force_release import stop_command

__all__ = ["FILTERS", "holder", "named_in", "quoted"]

MAX_LISTED_CHARS = 96
"""Characters of a name in a list, so that a row stays one line; a lock's own page has all."""


def seconds(given: float | None) -> str:
    """Return a duration with the precision that a reader needs: `0.4 ms`, `2.5 s`, `3 min 5 s`."""
    if given is None:
        return "\u2013"
    if math.isinf(given):
        return "no expiry"
    if given < 0:
        return f"-{seconds(-given)}"  # clocks of two hosts differ
    if given >= 0.0995:
        return span(given)
    return f"{given * 1e3:.1f} ms" if given >= 0.00095 else f"{given * 1e3:.2f} ms"


def clock(at: float) -> str:
    """Return a time of day, in UTC; with the date, if it is not today."""
    today = _utc(at, "%Y-%m-%d") == _utc(time.time(), "%Y-%m-%d")
    return _utc(at, "%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S") or "?"


def stamp(at: float) -> str:
    """Return a time for programs: ISO 8601, in UTC."""
    return _utc(at, "%Y-%m-%dT%H:%M:%SZ")


def _utc(at: float, shape: str) -> str:
    try:
        return time.strftime(shape, time.gmtime(at))
    except (OverflowError, OSError, ValueError):
        return ""  # a node or a worker sent an impossible time


def short(text: str, most: int = MAX_LISTED_CHARS) -> str:
    """Return a name for a list: printable, and without its middle if it is long."""
    text = printable(text)
    return text if len(text) <= most else f"{text[: most * 2 // 3]}…{text[-most // 3 :]}"


def holder(task: str, task_id: str, pid: int | str, host: str) -> str:
    """Return `shop.pay 8c1f02d0, pid 4242 on web-1`; empty parts are left out."""
    where = " on ".join(part for part in (f"pid {pid}" if pid else "", host) if part)
    return ", ".join(part for part in (f"{task} {task_id}".strip(), where) if part)


def quoted(name: str) -> str:
    """Return a resource's name quoted for a link; `named_in` returns exactly the same name."""
    return quote(name, safe="", errors="surrogatepass")


def named_in(query: bytes) -> str:
    """Return the resource's name in a query string; empty if there is none.

    Werkzeug's parsed arguments are not used: they decode all invalid UTF-8 to the same character.
    """
    for part in query.split(b"&"):
        name, _, value = part.partition(b"=")
        if name == b"resource":
            raw = unquote_to_bytes(value.replace(b"+", b" "))
            try:
                return raw.decode("utf-8", "surrogatepass")
            except UnicodeDecodeError:
                return raw.decode("utf-8", "replace")
    return ""


def count(number: int) -> str:
    """Return a number with its thousands separated."""
    return f"{number:,}".replace(",", "\u202f")


def sentence(text: str) -> str:
    """Return a text as a sentence: with a capital, and a full stop."""
    return text[:1].upper() + text[1:] + "." * (not text.endswith((".", "?", "!")))


def plural(number: int, one: str, many: str = "") -> str:
    """Return `1 lock`, `2 locks`."""
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


FILTERS: dict[str, Any] = {
    "seconds": seconds,
    "clock": clock,
    "stamp": stamp,
    "short": short,
    "printable": printable,
    "stop_command": lambda task_id: stop_command(task_id or ""),
    "count": count,
    "plural": plural,
    "sentence": sentence,
    "ceil": math.ceil,
}
