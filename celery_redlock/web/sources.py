"""Where what is shown comes from: the nodes, the workers, the events; each with its bounds."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..protocol.errors import QuorumUnavailable
from ..protocol.values import printable
from ..survey.models import Survey
from ..survey.snapshot import look_at, survey
from ..survey.waiting import Parked
from . import serializers
from .health import Health, examine
from .history import History
from .refresher import Fresh, Seen
from .workers import Hearing, ask, parked

if TYPE_CHECKING:
    from ..locking.redlock import Redlock

__all__ = ["Sources", "Waiting"]

logger = logging.getLogger("celery_redlock.web")

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
WORKERS_GOOD_S = 10.0
"""For which their answers are good enough to count with; a page waits for newer ones."""


class Waiting(NamedTuple):
    """The tasks that wait in the workers.

    Attributes:
        by_name: How many wait for each resource, by its name as a log has it.
        tasks: How many wait in all; one that waits for several resources counts once.
        known: Whether a worker has answered lately; else nothing is counted.
    """

    by_name: Counter[str]
    tasks: int
    known: bool


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
        self.app = app
        self.history = History()
        self.health: Health | None = None
        """How the nodes were at the last look; None before the first."""
        self._nodes = Fresh(self._look, idle=idle, rest=rest, then=self._keep)
        self._rows: tuple[Survey | None, list[dict[str, Any]]] = (None, [])
        self._workers: Fresh[list[dict[str, Any]]] | None = None
        self.hearing: Hearing | None = None
        self.parked: Callable[[], Parked] | None = None
        if app is not None:
            self.parked = partial(parked, app, WORKERS_TIMEOUT_S)
            self._workers = Fresh(lambda: ask(app, WORKERS_TIMEOUT_S), every=WORKERS_EVERY_S)
            self.hearing = Hearing(app)

    def _look(self) -> Survey:
        """Look at all that lies on the nodes; and, at the same time, how they are."""
        with ThreadPoolExecutor(1, "redlock-web-health") as pool:
            health = pool.submit(examine, self.redlock, self.app, ALL_TIMEOUT_S)
            try:
                return survey(self.redlock, kinds=KINDS, timeout=ALL_TIMEOUT_S)
            finally:
                try:
                    self.health = health.result()
                except Exception:
                    self.health = None
                    logger.exception("the nodes could not be examined")

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

    def waiting(self) -> Waiting | None:
        """Return the tasks that wait in the workers; None if there are no workers to ask."""
        if self._workers is None:
            return None
        told = self.workers(0.0)
        if not told["failure"] and self._is_old(told):
            told = self.workers(PAGE_WAIT_S)
        if told["failure"] or self._is_old(told):
            return Waiting(Counter(), 0, False)
        waits = [row["resource"] or "" for one in told["rows"] for row in one["waits"]]
        by_name = Counter(printable(name) for names in waits for name in names.split(" + "))
        return Waiting(by_name, len(waits), any(not one["error"] for one in told["rows"]))

    @staticmethod
    def _is_old(told: dict[str, Any]) -> bool:
        return (told["at"] or 0.0) < time.time() - WORKERS_GOOD_S

    def close(self) -> None:
        """Look and listen no more."""
        for source in (self._nodes, self._workers, self.hearing):
            if source is not None:
                source.close()
