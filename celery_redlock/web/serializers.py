"""The content of the pages as plain data: the same for a template and for JSON.

It claims no more than was seen. An entry's `state` allows for nodes that did not answer, a list
carries the time of its survey, and if the last survey failed, the error is shown beside the data
from before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..protocol.errors import NotAcquired
from ..protocol.texts import printable
from ..protocol.values import Vote
from ..survey.models import NodeLook
from .history import state_of

if TYPE_CHECKING:
    from ..survey.models import Entry, Survey
    from .health import Health

__all__ = ["SORTS", "entry", "failure", "matches", "nodes", "page_of"]

ROWS_PER_PAGE = 50
"""Rows per page: a page stays under 200 kB, and a screen or two long."""


def entry(it: Entry, looks: Sequence[NodeLook]) -> dict[str, Any]:
    """Return one entry: the data of `Entry.data`, its state, and the vote of each node on it."""
    silent = sum(not look.reachable for look in looks)
    votes = []
    for node, look in enumerate(looks):
        other = any(rival.ttls[node] is not None for rival in it.rivals)
        has = it.ttls[node] is not None
        votes.append("has" if has else "other" if other else "none" if look.reachable else "silent")
    state = state_of(it, silent)
    return {
        **it.data(),
        "place": it.place.strip(),
        "state": state,
        "votes": votes,
        "left": quorum_left(it),
        "silent": silent,
        "trouble": state != "held" or it.kind == "foreign",
    }


def quorum_left(it: Entry) -> float | None:
    """Return the seconds until fewer than a quorum of nodes have it, unless it is extended.

    None if fewer have it now, or if it never expires. The holder's own deadline is earlier.
    """
    left = sorted((ttl for ttl in it.ttls if ttl is not None), reverse=True)
    if len(left) < it.quorum or math.isinf(left[it.quorum - 1]):
        return None
    return left[it.quorum - 1]


def failure(error: Exception) -> str:
    """Return why a survey failed. A foreign error is only named: its text may hold secrets."""
    if isinstance(error, NotAcquired):
        return printable(str(error))
    return f"the nodes could not be asked ({type(error).__name__}); the log says more"


def nodes(
    survey: Survey | None, error: Exception | None, health: Health | None
) -> list[dict[str, Any]]:
    """Return the nodes as the last survey found them; if it failed, by their votes.

    A node is `reachable` if it returned all its keys. A node may also `answer`, and refuse that.
    """
    looks = survey.looks if survey else health.looks if health else ()
    if isinstance(error, NotAcquired) and error.votes:
        looks = tuple(NodeLook(v.node, v.vote is not Vote.SILENT, v.detail) for v in error.votes)
    unknown: dict[str, Any] = {"version": None, "uptime": None, "votes_in": None, "findings": []}
    return [
        {
            "name": printable(look.name),
            "reachable": look.reachable,
            "answers": look.reachable,
            "error": printable(look.error),
            "rtt": look.data()["rtt"] if look.reachable else None,
            **(health.nodes[index] if health is not None else unknown),
        }
        for index, look in enumerate(looks)
    ]


def matches(row: dict[str, Any], query: str) -> bool:
    """Return True if each word of a search occurs in one of the row's names."""
    names = (row.get(name) for name in ("resource", "task", "task_id", "host", "digest"))
    text = "\n".join(str(name).casefold() for name in names if name)
    return all(word in text for word in query.casefold().split())


SORTS = {
    "key": lambda row: (row["resource"], row["kind"], row["slot"]),
    "age": lambda row: (-(row["held_for"] or 0.0), row["resource"]),
    "waiting": lambda row: (-row["waiting"], row["resource"]),
    "votes": lambda row: (row["nodes"], row["resource"]),
}


def page_of(rows: Sequence[Any], number: int) -> dict[str, Any]:
    """Return one page of many rows: its rows, its number, and the totals."""
    pages = max(1, -(-len(rows) // ROWS_PER_PAGE))
    number = min(max(1, number), pages)
    first = (number - 1) * ROWS_PER_PAGE
    return {
        "rows": list(rows[first : first + ROWS_PER_PAGE]),
        "page": number,
        "pages": pages,
        "matched": len(rows),
    }
