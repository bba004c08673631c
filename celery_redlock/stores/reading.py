"""The key and value of a node as a survey reads them, from any kind of store."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["FOREIGN", "MAX_TIMEOUTS", "QUEUE", "KeyValue", "to_bytes", "to_text"]

MAX_TIMEOUTS = 10
"""Maximum duration of a node's answers in all, in timeouts, as long as it goes on answering."""
FOREIGN = b""
"""Placeholder for a value that is not a string, or longer than any of ours."""
QUEUE = b"line"
"""Placeholder for the value of a wait queue."""


class KeyValue(NamedTuple):
    """The value of a key on one node."""

    value: bytes  # or `FOREIGN`, or `QUEUE`; of several readers, the token that expires last
    left: float  # seconds until it expires; infinite for a key without a ttl
    waiting: int = 0  # number of waiters in a queue
    first: tuple[tuple[bytes, float], ...] = ()  # names, start of the wait (microseconds, 1970)
    readers: tuple[tuple[bytes, float], ...] = ()  # tokens, and seconds until they expire


def to_bytes(text: str) -> bytes:
    """Encode a key, which may contain lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def to_text(value: bytes) -> str:
    """Decode a key or a value, which another program may have written, not in UTF-8."""
    try:
        return value.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return value.decode("utf-8", "surrogateescape")
