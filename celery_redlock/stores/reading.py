"""What a survey reads of a node, whatever kind of store it is of."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["FOREIGN", "MAX_TIMEOUTS", "QUEUE", "KeyValue", "to_bytes", "to_text"]

MAX_TIMEOUTS = 10
"""A node may take this many timeouts in all, as long as it goes on answering."""
FOREIGN = b""
"""Stands for a value that is no string, or longer than any of ours."""
QUEUE = b"line"
"""Stands for the value of a wait queue."""


class KeyValue(NamedTuple):
    """What one node has under a key."""

    value: bytes  # or `FOREIGN`, or `QUEUE`; of several readers the last to end
    left: float  # seconds until it expires; infinite for a key without a ttl
    waiting: int = 0  # how many wait in a queue
    first: tuple[tuple[bytes, float], ...] = ()  # their names, and since when (microseconds, 1970)
    readers: tuple[tuple[bytes, float], ...] = ()  # their tokens, and for how long yet; seconds


def to_bytes(text: str) -> bytes:
    """Encode a key; it may hold half characters."""
    return text.encode("utf-8", "surrogatepass")


def to_text(value: bytes) -> str:
    """Decode a key or a value, which may be another program's and no UTF-8."""
    try:
        return value.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return value.decode("utf-8", "surrogateescape")
