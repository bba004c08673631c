"""The subscription of one process to one node, which notifies its waiters of free keys.

Each kind of store has its own: `redis/subscription.py` and the others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

from ..protocol.errors import NodeError

__all__ = ["RECONNECT_S", "Subscription"]

RECONNECT_S = 1.0
"""Longest pause between attempts to connect, in seconds, with full jitter; waiters poll
meanwhile."""


class Subscription(ABC):
    """A subscription to the channel of this process, over a connection of its own.

    Attributes:
        retry: Minimum and maximum seconds until the next attempt if this one fails.
    """

    broken: ClassVar[tuple[type[Exception], ...]] = (OSError, NodeError)
    """The exceptions of `read` after which another connection is needed."""
    every = math.inf
    """Seconds after which `read` is called although nothing has arrived, to keep it alive."""
    retry = 0.0, RECONNECT_S

    @abstractmethod
    def connect(self) -> None:
        """Connect and subscribe; block until the node has confirmed it.

        Raises:
            Exception: The node cannot be reached, or it refuses us.
        """

    @abstractmethod
    def fileno(self) -> int:
        """Return the descriptor of the connection, to poll."""

    @abstractmethod
    def read(self) -> list[bytes]:
        """Return the names of the waiters that were notified since the last read.

        Never waits: raises one of `WAITS` if nothing has arrived.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection. Never waits for the node."""

    @staticmethod
    @abstractmethod
    def reason(error: Exception) -> str:
        """Describe an error in one line without a secret."""
