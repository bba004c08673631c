"""Faults of the stage, with their times."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.campaign.worker.journal import now
from tests.campaign.worker.stage import Worker

DEMOTED = "node demoted"
SWAPPED = "node swapped"
BROKER_DOWN = "broker restart"


@dataclass
class Fault:
    """A fault.

    Attributes:
        kind: What was done.
        begin: When; seconds.
        end: When it was undone; None while it is not.
        worker: To which worker.
        pid: To which process of it.
        nodes: To which nodes, by number.
    """

    kind: str
    begin: float
    end: float | None = None
    worker: str = ""
    pid: int = 0
    nodes: tuple[int, ...] = ()

    def touches(self, begin: float, end: float) -> bool:
        return self.begin <= end and (self.end is None or self.end >= begin)


def unseen_swap(faults: Iterable[Fault], begin: float, end: float, *born: float) -> bool:
    """Return True if other servers stood behind addresses, unknown to processes that began later.

    It meets them, or the first ones again, for the first time: `docs/guarantees.md` says so.
    """
    return any(
        fault.kind == SWAPPED and fault.touches(begin - 0.5, end) and max(born) > fault.begin
        for fault in faults
    )


@dataclass
class Chronicle:
    """All that was done."""

    faults: list[Fault] = field(default_factory=list)

    @contextlib.contextmanager
    def fault(self, kind: str, worker: Worker | None = None, **more: object) -> Iterator[Fault]:
        """Write down a fault: from now to the end of the block."""
        name = worker.name if worker else ""
        fault = Fault(kind, now(), worker=name, **more)  # type: ignore[arg-type]
        self.faults.append(fault)
        try:
            yield fault
        finally:
            fault.end = now()

    def counts(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for fault in self.faults:
            found[fault.kind] = found.get(fault.kind, 0) + 1
        return dict(sorted(found.items()))
