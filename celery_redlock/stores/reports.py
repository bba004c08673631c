"""How one node does: for the log and for listeners, when the driver's lock is given up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from ..events import emit_node, heard_nodes
from ..protocol.round import Verb
from ..protocol.texts import event
from ..runtime.complaints import Complaints

__all__ = ["Reports"]

logger = logging.getLogger("celery_redlock.node")


class Reports(Complaints):
    """Makes its calls through `later`.

    A slow log handler would keep all threads waiting, and one that uses a lock would find the
    driver in the middle of a request.
    """

    def __init__(
        self,
        name: str,
        clock: Callable[[], float],
        later: Callable[[Callable[[], object]], object],
    ) -> None:
        super().__init__(name, self.log)
        self._clock = clock
        self._later = later

    def log(self, level: int, name: str, line: str) -> None:
        """Log a line with the id of its event."""
        self._later(partial(logger.log, level, "%s", line, extra=event(name)))

    def failed(self, kind: str) -> None:
        """Tell listeners that it has failed in a way of `events.NODE_FAILURES`."""
        if heard_nodes():
            self._later(partial(emit_node, "node_failed", self._name, kind))

    def late(self, verb: Verb, reason: str) -> None:
        """Note that it has not answered in time."""
        self.fails(verb, reason, self._clock(), late=True)
        self.failed("timeout")

    def complain(self, verb: Verb | None, reason: str) -> None:
        """Log that it fails, once until it works again or fails in another way."""
        self.fails(verb, reason, self._clock())

    def answered(self, seconds: float) -> None:
        """Tell listeners how long it took to answer."""
        self._later(partial(emit_node, "node_answered", self._name, seconds))

    def did(self, verb: Verb, wrote: bool, now: float) -> None:
        """Note that it has done what it was asked for, after a failure or at a page's end."""
        if self.failing:
            if wrote or verb is Verb.PEEK:
                self.works(verb, now)
            self.works(None, now)
        else:
            self.look(now)
