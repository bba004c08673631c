"""The key and value of a node as a survey reads them, from any kind of store."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from time import monotonic
from typing import Any, ClassVar, NamedTuple

__all__ = ["FOREIGN", "MAX_TIMEOUTS", "QUEUE", "KeyValue", "NodeReader", "to_bytes", "to_text"]

MAX_TIMEOUTS = 10
"""Maximum duration of a node's answers in all, in timeouts, as long as it goes on answering."""
RTT_SAMPLES = 3
"""Round trips to measure; the fastest counts, because the others had to wait for this process."""
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


class NodeReader(ABC):
    """Reader of the keys of one node, over a connection of its own; see `contract.Reader`.

    Attributes:
        store: The name of its kind.
        prefix: Prefix of our keys.
        heard: Time of its last answer; seconds of the monotonic clock.
        connection: The connection, once there is one.
        by_script: True if values were read by a script: this user may not read wait queues.
    """

    store: ClassVar[str]
    connection: Any

    def __init__(self, address: Any, prefix: str, timeout: float) -> None:
        self._address = address
        self._timeout = timeout
        self.prefix = prefix
        self.heard = monotonic()
        self.by_script = False

    @abstractmethod
    def _ping(self) -> object:
        """Make a round trip that costs the server nothing."""

    def rtt(self) -> float:
        """Return the seconds of a round trip."""
        taken = []
        for _ in range(RTT_SAMPLES):
            begun = monotonic()
            self._ping()
            taken.append(monotonic() - begun)
        return min(taken)

    def close(self) -> None:
        """Close the connection. Never fails."""
        with contextlib.suppress(Exception):
            self.connection.close()


def to_bytes(text: str) -> bytes:
    """Encode a key, which may contain lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def to_text(value: bytes) -> str:
    """Decode a key or a value, which another program may have written, not in UTF-8."""
    try:
        return value.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return value.decode("utf-8", "surrogateescape")
