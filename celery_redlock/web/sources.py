"""Data sources of the pages: nodes, workers and events; each with its time limits."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ..protocol.texts import event
from ..survey.models import Survey
from ..survey.snapshot import look_at, survey
from ..survey.waiting import Parked, count_parked
from . import serializers
from .health import Health, examine
from .history import History
from .refresher import Refresher, Seen
from .workers import EventReceiver, ask

if TYPE_CHECKING:
    from ..locking.redlock import Redlock

__all__ = ["Sources"]

logger = logging.getLogger("celery_redlock.web")

KINDS = ("lock", "start", "reservation", "line", "foreign")
"""Kinds of keys shown. Not marks and fences: there are many, and nothing waits for them."""
SURVEY_TIMEOUT_S = 3.0
"""Seconds after which a node that has not returned all keys counts as silent, in a full survey."""
LOCK_TIMEOUT_S = 1.0
"""The same for the survey of one lock."""
PAGE_WAIT_S = 1.5
"""Seconds that a page waits for a survey; after that it shows the one before, with its time."""
WORKERS_TIMEOUT_S = 1.0
"""Seconds to wait for workers. It is always spent whole, because their number is unknown."""
WORKERS_EVERY_S = 3.0
"""Seconds between two requests to the workers, because each of them has to answer."""
WORKERS_FRESH_S = 10.0
"""Seconds for which their answers are fresh enough; after that a page waits for new ones."""


class Sources:
    """The data behind the pages.

    Args:
        redlock: The lock whose nodes are surveyed.
        app: The app whose workers and events are shown; None: no workers are asked.
        idle: Seconds between two surveys without a reader.
        rest: Seconds without a reader after which the surveys stop.
    """

    def __init__(
        self, redlock: Redlock, app: Any, *, idle: float | None, rest: float | None
    ) -> None:
        self.redlock = redlock
        self.app = app
        self.history = History()
        self.health: Health | None = None
        """State of the nodes at the last survey; None before the first."""
        self._nodes = Refresher(self._look, idle=idle, rest=rest)
        self._rows: tuple[Survey | None, Parked | None, list[dict[str, Any]]] = (None, None, [])
        self._workers: Refresher[tuple[list[dict[str, Any]], Parked]] | None = None
        self.receiver: EventReceiver | None = None
        if app is not None:
            self._workers = Refresher(self._ask, every=WORKERS_EVERY_S)
            self.receiver = EventReceiver(app)

    def _look(self) -> Survey:
        """Survey all keys on the nodes, and examine the nodes at the same time."""
        began = time.time()
        try:
            with ThreadPoolExecutor(1, "redlock-web-health") as pool:
                pool.submit(self._examine)
                seen = survey(self.redlock, kinds=KINDS, timeout=SURVEY_TIMEOUT_S)
        except Exception as error:
            self.history.record_nodes(serializers.nodes(None, error, self.health), began)
            self.history.record_failure(serializers.failure(error))
            raise
        self.history.record_nodes(serializers.nodes(seen, None, self.health), began)
        self.history.record(seen)
        return seen

    def _examine(self) -> None:
        try:
            self.health = examine(self.redlock, self.app, SURVEY_TIMEOUT_S)
        except Exception:
            self.health = None
            logger.exception("the nodes could not be examined", extra=event("survey_failed"))

    @property
    def no_quorum(self) -> dict[str, Any] | None:
        """The facts to show if no quorum votes; None if one does, or before the first survey."""
        return self.health.no_quorum if self.health is not None else None

    def looked(self, seen: Seen[Survey]) -> dict[str, Any]:
        """Return the time and age of a page's survey, the nodes' answers, and whether they vote."""
        return {
            "at": seen.at or None,
            "age": max(0.0, time.time() - seen.at) if seen.at else None,
            "failure": serializers.failure(seen.error) if seen.error else None,
            "no_quorum": self.no_quorum,
            "nodes": serializers.nodes(seen.what, seen.error, self.health),
        }

    def nodes(self) -> Seen[Survey]:
        """Return the survey of all keys on the nodes."""
        if self.receiver is not None:
            self.receiver.start()
        return self._nodes.get(PAGE_WAIT_S)

    def rows(
        self, seen: Seen[Survey], parked: Parked | None = None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the entries of a survey, as the pages show them, and its wait queues.

        Tasks in `parked` count as waiting.
        """
        if seen.what is None:
            return [], []
        found, counted, rows = self._rows
        if found is not seen.what or counted is not parked:  # build the rows once per survey
            survey = self._counted(seen.what, parked)
            rows = [serializers.entry(it, survey.looks) for it in survey.entries]
            self._rows = (seen.what, parked, rows)
        queues = [row for row in rows if row["kind"] == "line"]
        return [row for row in rows if row["kind"] != "line"], queues

    def one(self, resource: str, parked: Parked | None = None) -> Survey:
        """Return a new survey of one lock; tasks in `parked` count as waiting.

        Raises:
            QuorumUnavailable: Too few nodes answered.
        """
        return self._counted(look_at(self.redlock, resource, LOCK_TIMEOUT_S), parked)

    def _counted(self, seen: Survey, parked: Parked | None) -> Survey:
        return seen if parked is None else count_parked(seen, parked, prefix=self.redlock.prefix)

    def workers(self, patience: float = 0.0) -> dict[str, Any]:
        """Return the latest answers of the workers."""
        if self._workers is None:
            return {"asked": False, "at": None, "failure": None, "rows": []}
        seen = self._workers.get(patience)
        error = type(seen.error).__name__ if seen.error else None
        rows = seen.what[0] if seen.what else []
        return {"asked": True, "at": seen.at or None, "failure": error, "rows": rows}

    def parked(self) -> Parked | None:
        """Return the tasks that are parked in workers; None if no worker has answered lately."""
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
        return seen.at < time.time() - WORKERS_FRESH_S

    def close(self) -> None:
        """Stop the surveys and the event receiver."""
        for source in (self._nodes, self._workers, self.receiver):
            if source is not None:
                source.close()
