"""How much memory the parked deliveries of a worker may take: by their messages, not by a count."""

from __future__ import annotations

import logging
from typing import Any

from ...protocol.texts import event
from .admission import AdmissionQueue

__all__ = ["ParkingMemory", "size_of"]

logger = logging.getLogger("celery_redlock.parking")

REQUEST_BYTES = 12_000
"""Memory that a parked delivery takes besides its body; measured with Redis, as is the next."""
BODY_COPIES = 3.5
"""How often its body is in memory: as it came, as text in base64, as bytes, and deserialised."""


class ParkingMemory:
    """The bound of what a worker parks.

    Args:
        admission: Knows what is parked.
        most: Memory that it may take; bytes.
    """

    def __init__(self, admission: AdmissionQueue, most: int) -> None:
        self._admission = admission
        self._most = most
        self._warned = False

    @property
    def is_over(self) -> bool:
        """Whether more is parked than may be."""
        return self._admission.size > self._most

    @property
    def fitting(self) -> int:
        """How many of the parked deliveries fit, if all take as much as they do on average."""
        count, size = len(self._admission), self._admission.size
        return count * self._most // size if size > self._most else count

    def warn(self) -> None:
        """Log that more is parked than may be: once, until nothing is parked."""
        if self.is_over and not self._warned:
            logger.warning(
                "%d parked tasks take more memory than redlock_parking_memory allows (%d bytes);"
                " the last in line are sent again, a few a second, and tasks of other keys wait"
                " behind them in the queue: allow more, or give hot keys a queue of their own",
                len(self._admission),
                self._most,
                extra=event("parking_memory_full"),
            )
        self._warned = self.is_over or (self._warned and len(self._admission) > 0)


def size_of(request: Any) -> int:
    """Return how much memory a delivery takes, about; bytes."""
    body = request.message.body
    length = len(body) if isinstance(body, (bytes, memoryview, str)) else 0
    return REQUEST_BYTES + int(BODY_COPIES * length)
