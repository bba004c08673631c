"""Report the state of one node to the log and to listeners, after the driver's lock is released."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from ..events import emit_node, has_node_listeners
from ..protocol.round import Verb
from ..protocol.texts import event
from ..runtime.complaints import Complaints

__all__ = ["Reports"]

logger = logging.getLogger("celery_redlock.node")


class Reports(Complaints):
    """The reports about one node, all made through `later`.

    With the driver's lock held, a slow log handler would block all threads, and a handler that uses
    a lock would interrupt the driver in the middle of a request.
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
        """Report a failure to listeners; `kind` is one of `events.NODE_FAILURES`."""
        if has_node_listeners():
            self._later(partial(emit_node, "node_failed", self._name, kind))

    def late(self, verb: Verb, reason: str) -> None:
        """Note that the node has not answered in time."""
        self.fails(verb, reason, self._clock(), late=True)
        self.failed("timeout")

    def complain(self, verb: Verb | None, reason: str) -> None:
        """Log that the node fails, once until it works again or fails in another way."""
        self.fails(verb, reason, self._clock())

    def answered(self, seconds: float) -> None:
        """Report to listeners how long the node took to answer."""
        self._later(partial(emit_node, "node_answered", self._name, seconds))

    def did(self, verb: Verb, wrote: bool, now: float) -> None:
        """Note a successful answer, after a failure or at the end of a page."""
        if self.failing:
            if wrote or verb is Verb.PEEK:
                self.works(verb, now)
            self.works(None, now)
        else:
            self.look(now)
