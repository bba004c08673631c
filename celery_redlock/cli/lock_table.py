"""The table of locks in `ls` and `watch`: one line per lock, fitted to any width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..protocol.texts import printable
from ..survey.durations import span
from ..survey.models import Entry
from .formatting import COLUMN_GAP, agree, cells, cut, name_of, padded, state_of, ttl_text

__all__ = ["DROPPED", "lock_table"]

COLUMNS = ("key", "task", "task id", "host", "pid", "held for", "nodes", "ttl", "fence", "waiting")
DROPPED = ("fence", "pid", "host", "ttl", "task id", "waiting", "held for", "task")
"""Columns left out on a narrow terminal, in this order, until the rest fits."""
MIN_WIDTHS = {"key": 30, "task": 20}
"""Characters of a name for which other columns are dropped; a longer name is cut instead."""
SHORT_ID_CHARS = 8
"""Characters of a task id in a fitted table: enough to find the task."""


def lock_table(entries: Iterable[Entry], width: int | None, *, waiters: bool) -> list[str]:
    """Return the lines of the table, header first.

    Args:
        entries: The entries to show, one line each.
        width: Columns of the terminal; None for no limit: all columns, whole names and ids, and the
            ttl on each node.
        waiters: True if the workers were asked, so that the number of waiters is known. If False,
            that column is left out.
    """
    shown = list(entries)
    names = [name for name in COLUMNS if waiters or name != "waiting"]
    lines = _lines(shown, names, None)
    if width is None or max(map(cells, lines)) <= width:
        return lines
    return [cut(line, width) for line in _lines(shown, names, width)]


def _lines(entries: Sequence[Entry], names: Sequence[str], room: int | None) -> list[str]:
    whole = room is None
    rows = [_row(entry, whole=whole) for entry in entries]
    counted: set[str] = set()
    for row, entry in zip(rows, entries, strict=True):
        if entry.kind in ("lock", "start"):
            if entry.resource in counted:  # all slots share one wait queue: show its length once
                row["waiting"] = "-"
            counted.add(entry.resource)
    title = {"ttl": "ttl on each"} if whole else {}
    columns = {name: [title.get(name, name), *(row[name] for row in rows)] for name in names}
    widths = {name: max(map(cells, column)) for name, column in columns.items()}
    if room is not None:
        widths = _fitted(widths, room)
    lines = zip(*(columns[name] for name in widths), strict=True)
    return [padded(line, list(widths.values())) for line in lines]


def _row(entry: Entry, *, whole: bool) -> dict[str, str]:
    owner = entry.owner
    task_id = (owner.task_id if owner else "") or "-"
    row = {
        "key": name_of(entry),
        "task": (owner.task if owner else "") or "-",
        "task id": task_id if whole else task_id[:SHORT_ID_CHARS],
        "host": owner.host if owner else "-",
        "pid": str(owner.pid) if owner else "-",
        "held for": "-" if entry.held_for is None else span(entry.held_for),
        "nodes": f"{entry.nodes}/{entry.total}" + state_of(entry),
        "ttl": _ttls(entry.ttls, whole),
        "fence": "-" if entry.fence is None else str(entry.fence),
        "waiting": str(entry.waiting),
    }
    return {name: printable(cell) for name, cell in row.items()}


def _ttls(ttls: Sequence[float | None], whole: bool) -> str:
    if agree(ttls) and not whole:
        return ttl_text(min(ttl for ttl in ttls if ttl is not None))
    return " ".join(map(ttl_text, ttls))


def _fitted(widths: dict[str, int], room: int) -> dict[str, int]:
    """Return the columns that fit into `room`, with their widths."""
    left = dict(widths)

    def needed(least: dict[str, int]) -> int:
        total = sum(min(wide, least.get(name, wide)) for name, wide in left.items())
        return total + len(COLUMN_GAP) * (len(left) - 1)

    for name in DROPPED:
        if needed(MIN_WIDTHS) <= room:
            break
        left.pop(name, None)
    for name in ("task", "key"):
        over = needed({}) - room
        if name in left and over > 0:
            least = MIN_WIDTHS[name] if name == "task" else 1
            left[name] = max(min(left[name], least), left[name] - over)
    return left
