"""What the pages show, as plain data: the same for a template and for JSON.

It says what was seen and nothing more. An entry's `state` counts the nodes that did not answer, a
list bears the time of the look it was made of, and where a look failed that is said beside what
was seen before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..protocol.errors import NotAcquired
from ..protocol.values import Vote, printable
from .history import Change, state_of
from .refresher import Seen

if TYPE_CHECKING:
    from ..survey.snapshot import Entry, NodeLook, Survey

__all__ = ["SORTS", "change", "entry", "failure", "matches", "nodes", "page_of", "sort", "when"]

PAGE = 50
"""Rows of a page."""


def entry(it: Entry, looks: Sequence[NodeLook]) -> dict[str, Any]:
    """What lies under one key: as `Entry.data` says it, and what may be said of that."""
    silent = sum(not look.reachable for look in looks)
    votes = []
    for node, look in enumerate(looks):
        other = any(rival.ttls[node] is not None for rival in it.rivals)
        has = it.ttls[node] is not None
        votes.append("has" if has else "other" if other else "none" if look.reachable else "silent")
    state = state_of(it, silent)
    return {
        **it.data(),
        "state": state,
        "votes": votes,
        "left": quorum_left(it),
        "silent": silent,
        "trouble": state != "held" or it.kind == "foreign",
    }


def quorum_left(it: Entry) -> float | None:
    """Seconds until fewer than a quorum have it, unless it is extended.

    None if they have not, or if that is never. No claim about the holder, who counts for less.
    """
    left = sorted((ttl for ttl in it.ttls if ttl is not None), reverse=True)
    if len(left) < it.quorum:
        return None
    seconds = left[it.quorum - 1]
    return None if math.isinf(seconds) else seconds


def when(seen: Seen[Any], now: float) -> dict[str, Any]:
    """Which look a page is made of."""
    return {
        "at": seen.at or None,
        "age": max(0.0, now - seen.at) if seen.at else None,
        "failure": failure(seen.error) if seen.error else None,
    }


def failure(error: Exception) -> str:
    """Why nothing was seen. An error that is not ours is named, not quoted: it may hold secrets."""
    if isinstance(error, NotAcquired):
        return printable(str(error))
    return f"the nodes could not be asked ({type(error).__name__}); the log says more"


def nodes(survey: Survey | None, error: Exception | None) -> list[dict[str, Any]]:
    """The nodes, as the last look found them; those of one that failed by their votes."""
    if isinstance(error, NotAcquired) and error.votes:
        return [
            {
                "name": printable(vote.node),
                "reachable": vote.vote is not Vote.SILENT,
                "error": printable(vote.detail),
                "rtt": None,
            }
            for vote in error.votes
        ]
    return [
        {
            "name": printable(look.name),
            "reachable": look.reachable,
            "error": printable(look.error),
            "rtt": look.rtt if look.reachable else None,
        }
        for look in (survey.looks if survey else ())
    ]


def change(it: Change) -> dict[str, Any]:
    """A line of a timeline."""
    return {
        "at": it.at,
        "after": it.after or None,
        "what": it.what,
        "kind": it.kind,
        "slot": it.slot,
        "who": it.who,
        "digest": it.digest,
        "nodes": it.nodes,
        "total": it.total,
    }


def matches(row: dict[str, Any], query: str) -> bool:
    """Whether each word of a search is in one of the row's names."""
    names = (row.get(name) for name in ("resource", "task", "task_id", "host", "digest"))
    text = "\n".join(str(name).casefold() for name in names if name)
    return all(word in text for word in query.casefold().split())


_SORTS = {
    "key": lambda row: (row["resource"], row["kind"], row["slot"]),
    "age": lambda row: (-(row["held_for"] or 0.0), row["resource"]),
    "waiting": lambda row: (-row["waiting"], row["resource"]),
    "votes": lambda row: (row["nodes"], row["resource"]),
}
SORTS = tuple(_SORTS)


def sort(rows: Iterable[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """In the order that was asked for; by key if there is no such order."""
    return sorted(rows, key=_SORTS.get(by, _SORTS["key"]))


def page_of(rows: Sequence[Any], number: int, size: int = PAGE) -> dict[str, Any]:
    """One page of many rows: what stands on it, and where it is."""
    pages = max(1, -(-len(rows) // size))
    number = min(max(1, number), pages)
    return {
        "rows": list(rows[(number - 1) * size : number * size]),
        "page": number,
        "pages": pages,
        "matched": len(rows),
    }
