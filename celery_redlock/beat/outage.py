"""A beat's treatment of a time without a quorum: when to ask the nodes, and what to log.

However many entries are due, the nodes are asked once in a while, and not once per entry. The log
gets one error a minute, and not one per entry. Pure: the time is an argument.
"""

from __future__ import annotations

import logging
import math

from ..protocol.errors import QuorumUnavailable
from ..protocol.texts import event

__all__ = ["Outage"]

logger = logging.getLogger("celery_redlock.beat")

LOG_INTERVAL_S = 60.0
"""Seconds between two errors in the log: often enough for an alarm on them to stay on."""
MAX_NAMES = 5
"""Maximum number of entries that a log line names; the others are counted."""


class Outage:
    """The state of a beat's quorum: no outage, or an outage that goes on.

    Args:
        again: Seconds between two requests to the nodes during an outage.
        send: True if due entries are sent all the same.
    """

    def __init__(self, again: float, *, send: bool) -> None:
        self.send = send
        self._again = again
        self._began: float | None = None
        self._next_question = self._next_error = -math.inf
        self._logged = False
        self._names: set[str] = set()

    def pause(self, now: float) -> float:
        """Return the seconds until the nodes may be asked again; 0 if there is no outage."""
        return max(0.0, self._next_question - now)

    def met(
        self, name: str, error: QuorumUnavailable | None, now: float, *, for_all: bool = True
    ) -> None:
        """Note an entry that is due without a quorum.

        Args:
            name: The entry's name.
            error: The error of the nodes; None if they were not asked.
            now: The time; seconds.
            for_all: True if the error applies to all entries. If not, the nodes are asked for the
                next entry, too.
        """
        if self._began is None:
            self._began = now
        if self._logged and not self.send and str(name) not in self._names:
            logger.info("%s is held back as well", name, extra=event("tick_held_back"))
        self._names.add(str(name))
        if error is not None and for_all:
            self._next_question = now + self._again
        if error is not None and now >= self._next_error:
            self._next_error, self._logged = now + LOG_INTERVAL_S, True
            done = "sent without a claim, by every beat"
            logger.error(
                "no quorum for %.0f s: %s %s: %s",
                *(now - self._began, self._waiting()),
                *(done if self.send else "held back until there is one", error),
                extra=event("beat_no_quorum"),
            )

    def ended(self, now: float) -> None:
        """Note that a quorum has answered."""
        if self._began is not None and self._logged:
            logger.warning(
                "a quorum answers again, after %.1f s; due ticks are sent now: %s",
                *(now - self._began, self._waiting()),
                extra=event("beat_quorum_back"),
            )
        self._began, self._logged = None, False
        self._next_question = -math.inf
        self._names.clear()

    def _waiting(self) -> str:
        names = sorted(self._names)
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        return ", ".join(names[:MAX_NAMES]) + more
