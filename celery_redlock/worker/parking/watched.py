"""State of a worker's dispatcher for resources that deliveries are parked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from ...locking.wait_queue import Waiter
from ...protocol import outcome
from ...protocol.names import START_SUFFIX, Limit, slots_of
from ...protocol.round import Round
from ...protocol.values import QueueEntry
from ...runtime.event import SafeEvent
from ...stores.driver import BATCH
from .admission import AdmissionQueue, Resources

__all__ = ["Call", "Watched", "batches", "free_in"]


class Call(SafeEvent):
    """An event that also wakes the dispatcher's thread, by its bell."""

    def __init__(self, bell: Any) -> None:
        super().__init__()
        self._bell = bell

    def set(self) -> None:
        super().set()
        self._bell.set()


class Watched:
    """One or several resources that deliveries are parked for, and our place in their queue."""

    def __init__(
        self, resources: Resources, place: Waiter, entry: QueueEntry, exits: ExitStack
    ) -> None:
        self.resources = resources
        self.place = place
        self.entry = entry
        self.exits = exits
        self.queued: float | None = None
        """Time since which we stand in its queue; None if we do not."""
        self.due = 0.0
        self.notified = False
        """True if we were notified, and have not used or passed on the notification yet."""
        self.no_slot: float | None = None
        """Time since which it is free without a free pool slot; None if that is not so."""
        self.no_quorum: float | None = None
        """Time since which no quorum answers; None if one does."""
        self.next_at: float | None = None
        """Time of the next possible start, where a rate counts them, if known."""
        self.holders: frozenset[str] = frozenset()
        """The tokens that the last look found; none if it found a free slot, or no quorum."""
        self.held_since = 0.0
        """The time of the first look that found these, with no others since; seconds."""
        self.looked = 0.0
        """The time of the last look that a quorum answered; seconds."""

    def note_holders(self, ballot: Round, queries: range, now: float) -> None:
        """Record the tokens that a look has found, if a quorum has answered it."""
        if ballot.yes >= ballot.quorum:
            self.looked = now
            found = frozenset(name for query in queries for name in outcome.tokens(ballot, query))
            if found != self.holders:
                self.holders, self.held_since = found, now

    @property
    def is_one(self) -> bool:
        """True for a single resource: a notification then shows that it is free, without a look."""
        return len(self.resources) == 1

    @property
    def is_start(self) -> bool:
        """True if it is a start that a rate counts."""
        return self.resources[0].endswith(START_SUFFIX)


def batches(
    looks: Sequence[Watched], admission: AdmissionQueue
) -> Iterator[list[tuple[Watched, Limit]]]:
    """Divide looks into requests, each of about `BATCH` names, with their limits."""
    batch: list[tuple[Watched, Limit]] = []
    size = 0
    for watched in looks:
        limit = admission.limit(watched.resources)
        batch.append((watched, limit))
        size += sum(map(len, slots_of(watched.resources, limit)))
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def free_in(ballot: Round, first: int, count: int) -> list[float]:
    """Return the seconds until some of the names in a PEEK are free, unless they are extended."""
    return [outcome.free_in(ballot, number) for number in range(first, first + count)]
