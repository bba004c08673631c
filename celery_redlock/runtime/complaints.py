"""Log the failures of one node, each once, and its recovery, without flooding the log.

A node whose latency is near the node timeout fails and works again many times a second. After a few
changes within a minute it gets a summary once a minute instead, until it has stayed in one state
for a minute.

Pure: times are arguments, lines are results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

from ..protocol.round import Verb

__all__ = ["Complaints", "Once"]

PAGE_S = 60.0
"""Seconds between two summaries: often enough to follow an outage, too seldom to fill a disk."""
MAX_CHANGES = 6
"""Maximum lines about changes in that time: a restart causes three, and two in a row are fine."""


class Complaints:
    """The logged failures of one node, in pages of a minute.

    Args:
        name: The node's address.
        say: Function that logs a line; its arguments are a level, the id of an event, and the line.

    Attributes:
        answers: Answers since the page was begun; the caller counts them.
        failing: By verb (None for all), the kind of its failure and the line that was logged.
        page: The begin of the next page; seconds.
    """

    def __init__(self, name: str, say: Callable[[int, str, str], object]) -> None:
        self._name = name
        self._say = say
        self.failing: dict[Verb | None, tuple[str, str]] = {}
        self._summed_up = False
        self._begin(0.0)

    def fails(self, verb: Verb | None, reason: str, now: float, *, late: bool = False) -> None:
        """Log a failure at `verb`, or altogether: once, until it works or fails in another way."""
        self.look(now)
        self._late += late
        self._failed += not late
        kind = reason.split(" ", 1)[0] if verb else reason
        what = "refuses us" if refuses(reason) else "is unreachable"
        what = f"does not {verb.word}" if verb else what
        line = f"node {self._name} {what}: {reason}"
        known = self.failing.get(verb, ("", ""))[0]
        self.failing[verb] = kind, line
        if known != kind:
            self._changed(logging.WARNING, "node_failing", line)

    def works(self, verb: Verb | None, now: float) -> None:
        """Log that it does not fail at `verb`, or altogether, any more."""
        if verb in self.failing:
            self.look(now)
            del self.failing[verb]
            what = f"can {verb.word} again" if verb else "is back"
            self._changed(logging.INFO, "node_back", f"node {self._name} {what}")

    def look(self, now: float) -> None:
        """Begin a new page if it is time to, and log the summary of the last one."""
        if now < self.page:
            return
        if self._summed_up and self._changes:
            advice = "Look at its latency and its network; if it is only far away, raise"
            advice += " redlock_node_timeout"
            if not self._late:  # the reason of a failure says more
                advice = next((line for _kind, line in self.failing.values()), "It works now")
            self._say(
                logging.WARNING,
                "node_unstable",
                f"node {self._name}: {self._late} of {self.answers} answers were late in the last"
                f" minute, {self._failed} requests or connections failed. {advice}",
            )
        elif self._summed_up:
            self._summed_up = False
            for _kind, line in self.failing.values():
                self._say(logging.WARNING, "node_failing", f"{line} (for a minute)")
            if not self.failing:
                self._say(
                    logging.INFO,
                    "node_back",
                    f"node {self._name} is back, and has worked for a minute",
                )
        self._begin(now)

    def _begin(self, now: float) -> None:
        self.page = now + PAGE_S
        self.answers = self._late = self._failed = self._changes = 0

    def _changed(self, level: int, event: str, line: str) -> None:
        self._changes += 1
        if self._summed_up:
            return
        if self._changes > MAX_CHANGES:
            self._summed_up, level, event = True, logging.WARNING, "node_unstable"
            line = (
                f"node {self._name} fails and recovers again and again; from now on there is one"
                f" summary a minute ({line})"
            )
        self._say(level, event, line)


def refuses(reason: str) -> bool:
    """Return True if the node is up but refuses us: authentication, permission, or loading."""
    return reason.startswith(("AUTH", "NOPERM", "LOADING"))


class Once:
    """Limit of one line about each cause in `PAGE_S`."""

    def __init__(self) -> None:
        self._said: dict[Hashable, float] = {}

    def __call__(self, cause: Hashable, now: float) -> bool:
        """Return True if the line should be logged now; it then counts as logged."""
        self._said = {one: at for one, at in self._said.items() if now - at < PAGE_S}
        due = cause not in self._said
        self._said.setdefault(cause, now)
        return due
