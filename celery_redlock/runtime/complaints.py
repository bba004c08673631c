"""What the log says of one node: that it fails, once, and that it works again, without flooding.

A node whose latency is near the node timeout fails and works many times a second. After a few
changes within a minute it is summed up instead, once a minute, until it has kept to one state for
that long.

Pure: times come in, lines go out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

from ..protocol.round import Verb

__all__ = ["Complaints", "Once"]

PAGE_S = 60.0
"""Time between two summaries: often enough to follow an outage, too seldom to fill a disk."""
MAX_CHANGES = 6
"""Lines about changes within that time: a restart is three of them, two in a row are no flood."""


class Complaints:
    """What one node is said to fail at.

    Args:
        name: The node's address.
        say: Takes a level of `logging`, the id of an event, and a line.

    Attributes:
        answers: Answers since the page was begun; the caller counts them.
        failing: What it fails at, None for everything: the kind, and the line that was logged.
        page: When the next page begins; seconds.
    """

    def __init__(self, name: str, say: Callable[[int, str, str], object]) -> None:
        self._name = name
        self._say = say
        self.failing: dict[Verb | None, tuple[str, str]] = {}
        self._summed_up = False
        self._begin(0.0)

    def fails(self, verb: Verb | None, reason: str, now: float, *, late: bool = False) -> None:
        """It fails at `verb`, or altogether: once until it works again or fails in another way."""
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
        """It does not fail at `verb`, or altogether, any more."""
        if verb in self.failing:
            self.look(now)
            del self.failing[verb]
            what = f"can {verb.word} again" if verb else "is back"
            self._changed(logging.INFO, "node_back", f"node {self._name} {what}")

    def look(self, now: float) -> None:
        """Begin another page if it is time to, and sum the last one up."""
        if now < self.page:
            return
        if self._summed_up and self._changes:
            advice = "Look at its latency and its network; if it is only far away, raise"
            advice += " redlock_node_timeout"
            if not self._late:  # the reason of a failure says more
                advice = next((line for _kind, line in self.failing.values()), "It works just now")
            self._say(
                logging.WARNING,
                "node_unstable",
                f"node {self._name}: {self._late} of {self.answers} answers were late in the last"
                f" minute, {self._failed} requests or connections failed. {advice}",
            )
        elif self._summed_up:
            self._summed_up = False
            for _kind, line in self.failing.values():
                self._say(logging.WARNING, "node_failing", f"{line} (for a minute by now)")
            if not self.failing:
                self._say(
                    logging.INFO, "node_back", f"node {self._name} is back, for a minute by now"
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
                f"node {self._name} fails and works again, over and over; from now on it is summed"
                f" up once a minute ({line})"
            )
        self._say(level, event, line)


def refuses(reason: str) -> bool:
    """Return whether it is there, and does not let us in."""
    return reason.startswith(("AUTH", "NOPERM", "LOADING"))


class Once:
    """Whether a line about a cause is due: one in `PAGE_S`."""

    def __init__(self) -> None:
        self._said: dict[Hashable, float] = {}

    def __call__(self, cause: Hashable, now: float) -> bool:
        """Return whether to say that it has happened; then it counts as said."""
        self._said = {one: at for one, at in self._said.items() if now - at < PAGE_S}
        due = cause not in self._said
        self._said.setdefault(cause, now)
        return due
