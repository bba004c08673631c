"""Where what is shown comes from: the nodes, the workers, the events; each with its bounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..protocol.errors import QuorumUnavailable
from ..survey.models import Survey
from ..survey.snapshot import look_at, survey
from ..survey.waiting import Parked
from . import serializers
from .history import History
from .refresher import Fresh, Seen
from .workers import Hearing, ask, parked

if TYPE_CHECKING:
    from ..locking.redlock import Redlock

__all__ = ["Sources"]

KINDS = ("lock", "reservation", "line", "foreign")
"""What of the nodes' keys is shown; marks and fences are many, and nobody waits for them."""
ALL_TIMEOUT_S = 3.0
"""After which a node that has not told all counts as away, in a look at everything."""
ONE_TIMEOUT_S = 1.0
"""The same, in a look at one lock."""
PAGE_WAIT_S = 1.5
"""For which a page waits for a look; then it shows what was seen last, and when."""
WORKERS_TIMEOUT_S = 1.0
"""For which workers are waited for: always as long, because their number is unknown."""
WORKERS_EVERY_S = 3.0
"""Between two questions to the workers: each of them has to answer."""


class Sources:
    """What a page asks for what it shows.

    Args:
        redlock: Whose nodes.
        app: Whose workers and events; None: there are none to ask.
        idle: Seconds between two looks at the nodes without a reader.
        rest: Seconds without a reader after which it no longer looks.
    """

    def __init__(
        self, redlock: Redlock, app: Any, *, idle: float | None, rest: float | None
    ) -> None:
        self.redlock = redlock
        self.history = History()
        self._nodes = Fresh(
            lambda: survey(redlock, kinds=KINDS, timeout=ALL_TIMEOUT_S),
            idle=idle,
            rest=rest,
            then=self._keep,
        )
        self._rows: tuple[Survey | None, list[dict[str, Any]]] = (None, [])
        self._workers: Fresh[list[dict[str, Any]]] | None = None
        self.hearing: Hearing | None = None
        self.parked: Callable[[], Parked] | None = None
        if app is not None:
            self.parked = partial(parked, app, WORKERS_TIMEOUT_S)
            self._workers = Fresh(lambda: ask(app, WORKERS_TIMEOUT_S), every=WORKERS_EVERY_S)
            self.hearing = Hearing(app)

    def _keep(self, seen: Seen[Survey]) -> None:
        if seen.error is not None:
            self.history.blind(serializers.failure(seen.error))
        elif seen.what is not None:
            self.history.note(seen.what)

    def nodes(self) -> Seen[Survey]:
        """Return all that lies on the nodes."""
        if self.hearing is not None:
            self.hearing.start()
        return self._nodes.get(PAGE_WAIT_S)

    def rows(self, seen: Seen[Survey]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the entries of a look, as the pages show them, and the wait queues."""
        found, rows = self._rows
        if found is not seen.what and seen.what is not None:  # they are made once a look
            rows = [serializers.entry(it, seen.what.looks) for it in seen.what.entries]
            self._rows = (seen.what, rows)
        queues = [row for row in rows if row["kind"] == "line"]
        return [row for row in rows if row["kind"] != "line"], queues

    def one(self, resource: str) -> Survey | QuorumUnavailable:
        """Return all that is known of one lock, now; or why too little is."""
        try:
            return look_at(self.redlock, resource, ONE_TIMEOUT_S)
        except QuorumUnavailable as error:
            return error

    def workers(self, patience: float = 0.0) -> dict[str, Any]:
        """Return what the workers said when they were asked last."""
        if self._workers is None:
            return {"asked": False, "at": None, "failure": None, "rows": []}
        seen = self._workers.get(patience)
        error = type(seen.error).__name__ if seen.error else None
        return {"asked": True, "at": seen.at or None, "failure": error, "rows": seen.what or []}

    def close(self) -> None:
        """Look and listen no more."""
        for source in (self._nodes, self._workers, self.hearing):
            if source is not None:
                source.close()
