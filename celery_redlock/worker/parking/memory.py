"""Limit the memory of a worker's parked deliveries: by their messages, not by a count."""

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
"""Copies of its body in memory: as it arrived, as base64 text, as bytes, and deserialised."""


class ParkingMemory:
    """The memory limit for a worker's parked deliveries.

    Args:
        admission: The parked deliveries.
        most: Memory that they may take; bytes.
    """

    def __init__(self, admission: AdmissionQueue, most: int) -> None:
        self._admission = admission
        self._most = most
        self._warned = False

    @property
    def is_over(self) -> bool:
        """True if the parked deliveries take more memory than they may."""
        return self._admission.size > self._most

    @property
    def fitting(self) -> int:
        """Number of the parked deliveries that fit, by their average size."""
        count, size = len(self._admission), self._admission.size
        return count * self._most // size if size > self._most else count

    def warn(self) -> None:
        """Log that they take more than they may: once, until none is parked."""
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
    """Return about how much memory a delivery takes; bytes."""
    body = request.message.body
    length = len(body) if isinstance(body, (bytes, memoryview, str)) else 0
    return REQUEST_BYTES + int(BODY_COPIES * length)
