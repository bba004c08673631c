"""The screen of `redlock watch`, with rich."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..protocol.values import printable
from ..survey.models import Entry, Survey
from .formatting import Say, counted, rows

__all__ = ["screen"]


@contextmanager
def screen() -> Iterator[Say]:
    """Shows each look in place of the one before; the last one stays."""
    console = Console()
    with Live(console=console, auto_refresh=False) as live:

        def say(seen: Survey | None, entries: Sequence[Entry], trouble: str) -> None:
            live.update(_page(seen, entries, trouble, console.size), refresh=True)

        yield say


def _page(
    seen: Survey | None, entries: Sequence[Entry], trouble: str, size: ConsoleDimensions
) -> RenderableType:
    if seen is None:
        return Text(trouble, style="red")
    clock = time.strftime("%H:%M:%S", time.localtime(seen.at))
    head = Text(f"{clock}  {counted(len(entries), 'key')} in use", style="bold")
    notes = [
        Text(printable(f"node {look.name} does not answer: {look.error}"), style="yellow")
        for look in seen.looks
        if not look.reachable
    ]
    shown = max(1, size.height - 5 - len(notes))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    head_row, *others = rows(entries, size.width)
    for column in head_row:
        table.add_column(column, overflow="fold")
    for cells in others[:shown]:
        table.add_row(*(Text(cell) for cell in cells))
    if len(entries) > shown:
        notes.append(Text(f"and {len(entries) - shown} more, held for less long: see ls"))
    return Group(head, *notes, table) if entries else Group(head, *notes)
