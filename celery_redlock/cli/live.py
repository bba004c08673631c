"""The screen of `redlock watch`. Only imported where rich is installed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..protocol.texts import counted, printable
from ..survey.models import Survey
from .lock_table import lock_table

__all__ = ["screen"]

RESERVED_LINES = 4
"""Screen lines reserved for clock, header, footer and cursor."""


@contextmanager
def screen(*, waiters: bool) -> Iterator[Callable[[Survey | str], None]]:
    """Show each survey, or why there is none, in place of the last one; the final one stays."""
    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        yield lambda seen: live.update(_page(seen, console.size, waiters), refresh=True)


def _page(seen: Survey | str, size: ConsoleDimensions, waiters: bool) -> RenderableType:
    if isinstance(seen, str):
        return Text(printable(seen), style="red")
    clock = time.strftime("%H:%M:%S", time.localtime(seen.at))
    head = Text(f"{clock}  {counted(len(seen.entries), 'key')} in use", style="bold")
    notes = [
        Text(printable(f"node {look.name} does not answer: {look.error}"), style="yellow")
        for look in seen.looks
        if not look.reachable
    ]
    notes += [Text(str(pause), style="yellow") for pause in seen.pauses]
    by_age = sorted(seen.entries, key=lambda entry: -(entry.held_for or 0.0))
    room = max(1, size.height - RESERVED_LINES - len(notes))
    if more := by_age[room:]:
        notes.append(Text(f"and {len(more)} more, held for less long: see ls"))
    if by_age:
        lines = lock_table(by_age[:room], size.width, waiters=waiters)
        notes += [Text(lines[0], style="bold"), *map(Text, lines[1:])]
    for line in notes:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(head, *notes)
