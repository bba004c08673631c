"""What a worker's dispatcher knows of one resource, or several, that deliveries are parked for."""

from __future__ import annotations

from contextlib import ExitStack

from ...locking.wait_queue import Waiter
from ...protocol.names import START_SUFFIX
from ...protocol.values import QueueEntry
from ...runtime.event import SafeEvent
from .admission import Resources

__all__ = ["Call", "Watched"]


class Call(SafeEvent):
    """Rings the dispatcher's bell as well."""

    def __init__(self, bell: SafeEvent) -> None:
        super().__init__()
        self._bell = bell

    def set(self) -> None:
        super().set()
        self._bell.set()


class Watched:
    """What somebody here is parked for."""

    def __init__(
        self, resources: Resources, place: Waiter, entry: QueueEntry, exits: ExitStack
    ) -> None:
        self.resources = resources
        self.place = place
        self.entry = entry
        self.exits = exits
        self.queued: float | None = None
        """Since when we stand in its queue; None if we do not."""
        self.due = 0.0
        self.called = False
        """Whether we were called, and nothing has come of it yet."""
        self.no_slot: float | None = None
        """Since when no slot has been seen for it."""
        self.no_quorum: float | None = None
        self.next_at: float | None = None
        """When the next start may be, where a rate counts them, as far as is known."""

    @property
    def is_one(self) -> bool:
        """Whether it is a single resource, which a call is as good as a look for."""
        return len(self.resources) == 1

    @property
    def is_start(self) -> bool:
        """Whether it is a start that a rate counts."""
        return self.resources[0].endswith(START_SUFFIX)
