"""What a worker's dispatcher knows of the resources that some deliveries are parked for."""

from __future__ import annotations

from contextlib import ExitStack

from ...locking.wait_queue import Waiter
from ...protocol.names import START_SUFFIX
from ...protocol.values import QueueEntry
from ...runtime.event import SafeEvent
from .admission import Resources

__all__ = ["Call", "Watched"]


class Call(SafeEvent):
    """Wakes the dispatcher's thread as well, by its bell."""

    def __init__(self, bell: SafeEvent) -> None:
        super().__init__()
        self._bell = bell

    def set(self) -> None:
        super().set()
        self._bell.set()


class Watched:
    """The resource, or several, that some deliveries are parked for, and our place in its queue."""

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
        """Since when it is free and no pool slot is; None if that is not so."""
        self.no_quorum: float | None = None
        """Since when no quorum answers; None if one does."""
        self.next_at: float | None = None
        """When the next start may be, where a rate counts them, as far as is known."""

    @property
    def is_one(self) -> bool:
        """Whether it is a single resource: a call then shows that it is free, without a look."""
        return len(self.resources) == 1

    @property
    def is_start(self) -> bool:
        """Whether it is a start that a rate counts."""
        return self.resources[0].endswith(START_SUFFIX)
