"""What a worker's dispatcher knows of the resources that some deliveries are parked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

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
        self.holders: frozenset[str] = frozenset()
        """The tokens that the last look found; none if it found a free slot, or no quorum."""
        self.held_since = 0.0
        """The time of the first look that found these, with no others since; seconds."""
        self.looked = 0.0
        """The time of the last look that a quorum answered; seconds."""

    def note_holders(self, ballot: Round, queries: range, now: float) -> None:
        """Note which tokens a look has found, if a quorum has answered it."""
        if ballot.yes >= ballot.quorum:
            self.looked = now
            found = frozenset(name for query in queries for name in outcome.tokens(ballot, query))
            if found != self.holders:
                self.holders, self.held_since = found, now

    @property
    def is_one(self) -> bool:
        """Whether it is a single resource: a call then shows that it is free, without a look."""
        return len(self.resources) == 1

    @property
    def is_start(self) -> bool:
        """Whether it is a start that a rate counts."""
        return self.resources[0].endswith(START_SUFFIX)


def batches(
    looks: Sequence[Watched], admission: AdmissionQueue
) -> Iterator[list[tuple[Watched, Limit]]]:
    """Divide what is looked at into requests, each of about `BATCH` names, with their limits."""
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
    """Return the seconds until some of the names in a PEEK are free, if nobody extends."""
    return [outcome.free_in(ballot, number) for number in range(first, first + count)]
