"""Where what is shown comes from: the nodes, the workers, the events; each with its bounds."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ..survey.models import Survey
from ..survey.snapshot import look_at, survey
from ..survey.waiting import Parked, count_parked
from . import serializers
from .health import Health, examine
from .history import History
from .refresher import Fresh, Seen
from .workers import Hearing, ask

if TYPE_CHECKING:
    from ..locking.redlock import Redlock

__all__ = ["Sources"]

logger = logging.getLogger("celery_redlock.web")

KINDS = ("lock", "start", "reservation", "line", "foreign")
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
        self._nodes = Fresh(self._look, idle=idle, rest=rest)
        self._rows: tuple[Survey | None, Parked | None, list[dict[str, Any]]] = (None, None, [])
        self._workers: Fresh[tuple[list[dict[str, Any]], Parked]] | None = None
        self.hearing: Hearing | None = None
        if app is not None:
            self._workers = Fresh(self._ask, every=WORKERS_EVERY_S)
            self.hearing = Hearing(app)

    def _look(self) -> Survey:
        """Look at all that lies on the nodes; and, at the same time, how they are."""
        with ThreadPoolExecutor(1, "redlock-web-health") as pool:
            pool.submit(self._examine)
            try:
                seen = survey(self.redlock, kinds=KINDS, timeout=ALL_TIMEOUT_S)
            except Exception as error:
                self.history.blind(serializers.failure(error))
                raise
        self.history.note(seen)
        return seen

    def _examine(self) -> None:
        try:
            self.health = examine(self.redlock, self.app, ALL_TIMEOUT_S)
        except Exception:
            self.health = None
            logger.exception("the nodes could not be examined")

    @property
    def no_quorum(self) -> dict[str, Any] | None:
        """What is to be said of a quorum that does not vote; None if it does, or is not known."""
        return self.health.no_quorum if self.health is not None else None

    def looked(self, seen: Seen[Survey]) -> dict[str, Any]:
        """Return which look a page is made of, how the nodes answered, and whether they vote."""
        return {
            "at": seen.at or None,
            "age": max(0.0, time.time() - seen.at) if seen.at else None,
            "failure": serializers.failure(seen.error) if seen.error else None,
            "no_quorum": self.no_quorum,
            "nodes": serializers.nodes(seen.what, seen.error, self.health),
        }

    def nodes(self) -> Seen[Survey]:
        """Return all that lies on the nodes."""
        if self.hearing is not None:
            self.hearing.start()
        return self._nodes.get(PAGE_WAIT_S)

    def rows(
        self, seen: Seen[Survey], parked: Parked | None = None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the entries of a look, as the pages show them, and the wait queues.

        Tasks that are `parked` count as waiting.
        """
        if seen.what is None:
            return [], []
        found, counted, rows = self._rows
        if found is not seen.what or counted is not parked:  # they are made once a look
            survey = self._counted(seen.what, parked)
            rows = [serializers.entry(it, survey.looks) for it in survey.entries]
            self._rows = (seen.what, parked, rows)
        queues = [row for row in rows if row["kind"] == "line"]
        return [row for row in rows if row["kind"] != "line"], queues

    def one(self, resource: str, parked: Parked | None = None) -> Survey:
        """Return all that is known of one lock, now; tasks that are `parked` count as waiting.

        Raises:
            QuorumUnavailable: Too little is known.
        """
        return self._counted(look_at(self.redlock, resource, ONE_TIMEOUT_S), parked)

    def _counted(self, seen: Survey, parked: Parked | None) -> Survey:
        return seen if parked is None else count_parked(seen, parked, prefix=self.redlock.prefix)

    def workers(self, patience: float = 0.0) -> dict[str, Any]:
        """Return what the workers said when they were asked last."""
        if self._workers is None:
            return {"asked": False, "at": None, "failure": None, "rows": []}
        seen = self._workers.get(patience)
        error = type(seen.error).__name__ if seen.error else None
        rows = seen.what[0] if seen.what else []
        return {"asked": True, "at": seen.at or None, "failure": error, "rows": rows}

    def parked(self) -> Parked | None:
        """Return the tasks that wait parked in the workers; None if none has answered lately."""
        if self._workers is None:
            return None
        seen = self._workers.get(0.0)
        if seen.error is None and self._is_old(seen):
            seen = self._workers.get(PAGE_WAIT_S)
        if seen.what is None or seen.error is not None or self._is_old(seen):
            return None
        rows, parked = seen.what
        return parked if any(not one["error"] for one in rows) else None

    def _ask(self) -> tuple[list[dict[str, Any]], Parked]:
        rows = ask(self.app, WORKERS_TIMEOUT_S)
        return rows, Parked.of(rows)

    @staticmethod
    def _is_old(seen: Seen[Any]) -> bool:
        return seen.at < time.time() - WORKERS_GOOD_S

    def close(self) -> None:
        """Look and listen no more."""
        for source in (self._nodes, self._workers, self.hearing):
            if source is not None:
                source.close()
