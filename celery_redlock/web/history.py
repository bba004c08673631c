"""Changes from one survey to the next: the timeline of a lock, and of the nodes.

The surveys are seconds apart, and what came and went between two of them is not seen. So each
change carries the times of the two surveys it happened between, and a lock carries the time since
which it is watched. Memory is bounded: the last changes of each lock, and only the locks that
changed last. Pure.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .formatting import holder

if TYPE_CHECKING:
    from ..survey.models import Entry, Survey

__all__ = ["Change", "History", "state_of", "who"]

MAX_CHANGES = 50
"""Changes kept of one lock, of one node, and of the spans without a survey: a page full."""
MAX_LOCKS = 2_000
"""Locks whose changes are kept: at most 100 000 changes in memory, some tens of MB."""
WITHOUT_HOLDER = ("line", "fence", "mark")
"""Kinds of entries that are left out: their coming and going has nothing to do with a holder."""
UPTIME_ERROR_S = 1.0
"""Maximum error of a node's uptime, which is a whole number of seconds."""
UNWATCHED_S = 60.0
"""Seconds between two surveys from which the time between them is called unwatched."""


@dataclass(frozen=True)
class Change:
    """A change that a survey has shown.

    Attributes:
        at: Time of the survey that showed it, in seconds since 1970.
        after: Time of the survey before that; None if there was none.
        what: "there" (when watching began), "came", "passed" (another token in its place), "held"
            (it has gained a quorum), "short" (it has lost its quorum), "gone"; of nodes
            "up", "down" and "restarted"; "blind" and "unwatched" for spans of time.
        kind: Kind of the entry; `place` and `digest` (of its token) are the entry's, too.
        who: The holder, now or before, for people.
        nodes: How many of the `total` nodes have it.
    """

    at: float
    after: float | None
    what: str
    kind: str = "lock"
    place: str = ""
    who: str = ""
    digest: str = ""
    nodes: int = 0
    total: int = 0


def state_of(entry: Entry, silent: int) -> str:
    """Return the state that is certain for an entry, where `silent` nodes did not answer.

    It is "never" (a key without a ttl: it never expires), "held", "unsure" (the silent nodes may
    make it a quorum), or "short" (fewer than a quorum: a split vote, or the rest of one).
    """
    if entry.leaked and entry.kind not in ("fence", "line"):
        return "never"
    if entry.held:
        return "held"
    return "unsure" if entry.nodes + silent >= entry.quorum else "short"


class History:
    """Changes by the name of the lock; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[tuple[str, str, str], Entry] = {}
        self._changes: OrderedDict[str, deque[Change]] = OrderedDict()
        self._nodes: dict[str, deque[Change]] = {}
        self._before: dict[str, Mapping[str, Any]] = {}
        self._asked = math.inf
        self._blind: deque[Change] = deque(maxlen=MAX_CHANGES)
        self._failure = ""
        self.since = 0.0
        """Time of the first survey, in seconds since 1970; 0.0 before it."""
        self.at = 0.0
        """Time of the last successful survey."""

    def of(self, resource: str) -> list[Change]:
        """Return the changes of one lock and the spans without a survey, the last one first."""
        with self._lock:
            mine = list(self._changes.get(resource, ()))
            first = min((change.at for change in mine), default=self.since)
            spans = [span for span in self._blind if span.at >= first]
        return sorted([*mine, *spans], key=lambda change: change.at, reverse=True)

    def of_nodes(self) -> dict[str, list[Change]]:
        """Return the changes of each node, the last one first."""
        with self._lock:
            return {name: list(changes)[::-1] for name, changes in self._nodes.items()}

    def record_failure(self, why: str) -> None:
        """Record a survey that showed no locks, because too few nodes answered."""
        with self._lock:
            self._failure = self._failure or why

    def record(self, survey: Survey) -> None:
        """Record a survey."""
        silent = sum(not look.reachable for look in survey.looks)
        with self._lock:
            first = not self.since
            if first:
                self.since = survey.at
            elif self._failure:
                self._blind.append(Change(survey.at, self.at, "blind", who=self._failure))
            elif survey.at - self.at > UNWATCHED_S:
                self._blind.append(Change(survey.at, self.at, "unwatched"))
            self._failure = ""
            now = {
                (entry.kind, *entry.identity): entry
                for entry in survey.entries
                if entry.kind not in WITHOUT_HOLDER
            }
            for key, entry in now.items():
                self._compare(self._last.get(key), entry, survey.at, silent, first)
            for key, entry in self._last.items():
                if key not in now:
                    self._add(entry, "gone", survey.at)
            self._last, self.at = now, survey.at

    def record_nodes(self, nodes: Sequence[Mapping[str, Any]], at: float) -> None:
        """Record the answers of the nodes, also of too few for a survey.

        Args:
            nodes: The result of `serializers.nodes`.
            at: Time of the request to them, in seconds since 1970.
        """
        with self._lock:
            for node in nodes:
                before = self._before.get(node["name"], node)
                what = "up" if node["answers"] else "down"
                if node["answers"] and before["answers"] and node["uptime"] is not None:
                    least = max(before["uptime"] or 0.0, at - self._asked)
                    what = "restarted" if node["uptime"] < least - UPTIME_ERROR_S else what
                if what == "restarted" or node["answers"] != before["answers"]:
                    changes = self._nodes.setdefault(node["name"], deque(maxlen=MAX_CHANGES))
                    changes.append(Change(at, self._asked, what, "node", who=node["error"]))
                self._before[node["name"]] = node
            self._asked = at

    def _compare(self, old: Entry | None, new: Entry, at: float, silent: int, first: bool) -> None:
        if old is None:
            if not first:
                self._add(new, "came", at)
            elif len(self._changes) < MAX_LOCKS:
                self._add(new, "there", at)
        elif old.digest != new.digest:
            self._add(new, "passed", at)
        elif old.held != new.held and (new.held or state_of(new, silent) != "unsure"):
            self._add(new, "held" if new.held else "short", at)

    def _add(self, entry: Entry, what: str, at: float) -> None:
        changes = self._changes.setdefault(entry.resource, deque(maxlen=MAX_CHANGES))
        self._changes.move_to_end(entry.resource)
        changes.append(
            Change(
                *(at, self.at or None, what, entry.kind, entry.place.strip()),
                *(who(entry), entry.digest),
                nodes=0 if what == "gone" else entry.nodes,
                total=entry.total,
            )
        )
        while len(self._changes) > MAX_LOCKS:
            self._changes.popitem(last=False)


def who(entry: Entry) -> str:
    """Return the holder of an entry, for people; empty if the entry does not name one."""
    it = entry.owner
    return holder(it.task, it.task_id, it.pid, it.host) if it is not None else ""
