"""The table of locks of `ls` and `watch`: one line a lock, at any width."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from ..protocol.values import printable
from ..survey.durations import span
from ..survey.models import Entry
from .formatting import name_of, state_of, ttl_text

__all__ = ["DROPPED", "lock_table"]

COLUMNS = ("key", "task", "task id", "host", "pid", "held for", "nodes", "ttl", "fence", "waiting")
DROPPED = ("fence", "pid", "host", "ttl", "task id", "waiting", "held for", "task")
"""The columns that are left out on a narrow terminal, one after the other, until the rest fits."""
ENOUGH = {"key": 30, "task": 20}
"""Characters of a name that are worth a column of `DROPPED`; longer names are cut before it."""
SHORT_ID_CHARS = 8
"""Of a task's id where the table is fitted: enough to find it."""
AGREE_S = 1.0
"""Nodes whose ttls differ by less than this agree: they were asked one after the other."""
GAP = "  "


def lock_table(entries: Iterable[Entry], width: int | None, *, waiters: bool) -> list[str]:
    """Return the lines of the table, its head first.

    Args:
        entries: What to show, a line each.
        width: Columns of the terminal; None for no limit: all columns, whole names and ids, and the
            ttl on each node.
        waiters: Whether it is known how many wait: if the workers were asked. Else that column is
            left out.
    """
    shown = list(entries)
    names = [name for name in COLUMNS if waiters or name != "waiting"]
    lines = _lines(shown, names, None)
    if width is None or max(map(_cells, lines)) <= width:
        return lines
    return [_cut(line, width) for line in _lines(shown, names, width)]


def _lines(entries: Sequence[Entry], names: Sequence[str], room: int | None) -> list[str]:
    whole = room is None
    rows = [_row(entry, whole=whole) for entry in entries]
    title = {"ttl": "ttl on each"} if whole else {}
    columns = {name: [title.get(name, name), *(row[name] for row in rows)] for name in names}
    widths = {name: max(map(_cells, column)) for name, column in columns.items()}
    if room is not None:
        widths = _fitted(widths, room)
    lines = zip(*(columns[name] for name in widths), strict=True)
    return [_padded(line, list(widths.values())) for line in lines]


def _row(entry: Entry, *, whole: bool) -> dict[str, str]:
    owner = entry.owner
    task_id = (owner.task_id if owner else "") or "-"
    cells = {
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
    return {name: printable(cell) for name, cell in cells.items()}


def _ttls(ttls: Sequence[float | None], whole: bool) -> str:
    left = [ttl for ttl in ttls if ttl is not None]
    agree = len(left) == len(ttls) and (len({*left}) == 1 or max(left) - min(left) < AGREE_S)
    shown = [min(left)] if agree and not whole else ttls
    return " ".join(map(ttl_text, shown))


def _fitted(widths: dict[str, int], room: int) -> dict[str, int]:
    """Return the columns that fit into `room`, and how wide each is."""
    left = dict(widths)

    def needed(least: dict[str, int]) -> int:
        total = sum(min(wide, least.get(name, wide)) for name, wide in left.items())
        return total + len(GAP) * (len(left) - 1)

    for name in DROPPED:
        if needed(ENOUGH) <= room:
            break
        left.pop(name, None)
    for name in ("task", "key"):
        over = needed({}) - room
        if name in left and over > 0:
            least = ENOUGH[name] if name == "task" else 1
            left[name] = max(min(left[name], least), left[name] - over)
    return left


def _padded(cells: Sequence[str], widths: Sequence[int]) -> str:
    cut = (_cut(cell, width) for cell, width in zip(cells, widths, strict=True))
    padded = (cell + " " * (width - _cells(cell)) for cell, width in zip(cut, widths, strict=True))
    return GAP.join(padded).rstrip()


def _cells(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )


def _cut(text: str, width: int) -> str:
    """Return a text that takes so many columns at most: without its middle, if it is longer."""
    if _cells(text) <= width:
        return text
    if width < 5:
        return text[:width] if text.isascii() else ""
    head, tail = text, text
    while _cells(head) > (width - 2) - (width - 2) // 3:
        head = head[:-1]
    while _cells(tail) > (width - 2) // 3:
        tail = tail[1:]
    return f"{head}..{tail}"
