"""`redlock watch`: `ls`, live; without a terminal one line per change."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import click

from ..protocol.errors import QuorumUnavailable
from ..protocol.texts import printable
from ..survey.durations import span
from ..survey.models import Entry, Survey
from .context import NO_QUORUM, Site, as_json, choosing, on_site
from .formatting import name_of, owner_text, state_of

__all__ = ["Changes", "command"]


@click.command("watch")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between two looks at the nodes.",
)
@click.option("--count", type=click.IntRange(min=1), help="Stop after this many looks.")
@on_site
@choosing
def command(
    site: Site, *, look: Callable[[], Survey], interval: float, count: int | None, **_timeout: float
) -> int:
    """Show held locks, refreshed live (Ctrl-C to quit).

    On a terminal it shows a table; otherwise, and with --json, a line for each change. It misses
    locks that are taken and released between two looks. Exit code 3 if too few nodes answered the
    last look.
    """
    # The lines of changes do not show the number of waiters.
    counts = site.as_json or sys.stdout.isatty()
    looks = 0
    try:
        with _screen(site) as show:
            while True:
                seen: Survey | str
                began = time.monotonic()
                try:
                    seen = site.with_parked(look)[0] if counts else look()
                except QuorumUnavailable as error:
                    seen = str(error)
                show(seen)
                looks += 1
                if looks == count:
                    return NO_QUORUM if isinstance(seen, str) else 0
                time.sleep(max(0.0, began + interval - time.monotonic()))
    except KeyboardInterrupt:
        return 0


def _screen(site: Site) -> AbstractContextManager[Callable[[Survey | str], None]]:
    if sys.stdout.isatty() and not site.as_json:
        with suppress(ImportError):  # no rich
            from .live import screen

            return screen(waiters=site.app is not None)
    return nullcontext(Changes(site.as_json))


class Changes:
    """Printer of the changes since the last survey: one line each; JSON for programs."""

    def __init__(self, for_programs: bool) -> None:
        self._json = for_programs
        self._before: dict[tuple[str, str], Entry] = {}
        self._away: dict[str, str] = {}
        self._paused: dict[str, str] = {}
        self._blind = False

    def __call__(self, seen: Survey | str) -> None:
        """Take one survey, or the reason why there is none, and print the changes."""
        if isinstance(seen, str):
            if not self._blind:
                self._print(time.time(), "unavailable", seen)
            self._blind = True
            return
        if self._blind:
            self._print(seen.at, "available", "a quorum of nodes answers again")
            self._blind = False
        away = {look.name: look.error for look in seen.looks if not look.reachable}
        for name in self._away.keys() - away.keys():
            self._print(seen.at, "node", f"node {name} answers again")
        for name in away.keys() - self._away.keys():
            self._print(seen.at, "node", f"! node {name} does not answer: {away[name]}")
        self._away = away
        kinds = {pause.token: "limited" if pause.limit else "paused" for pause in seen.pauses}
        paused = {one.token: f"{one.pattern} is {kinds[one.token]}" for one in seen.pauses}
        for token in self._paused.keys() - paused.keys():
            self._print(seen.at, "resumed", f"{self._paused[token]} no more")
        for pause in seen.pauses:
            if pause.token not in self._paused:
                self._print(seen.at, kinds[pause.token], f"! {pause}")
        self._paused = paused
        now = {entry.identity: entry for entry in seen.entries}
        for identity in self._before.keys() - now.keys():
            entry = self._before[identity]
            ended = "has ended" if entry.shared else "is free"
            held = "" if entry.held_for is None else f" after {span(entry.held_for)}, about"
            self._print(seen.at, "gone", f"- {name_of(entry)} {ended}{held}", entry)
        for identity, entry in now.items():
            old = self._before.get(identity)
            if old is None:
                self._print(seen.at, "new", f"+ {_line(entry)}", entry)
            elif _aspect(old) != _aspect(entry):
                self._print(seen.at, "changed", f"~ {_line(entry)}", entry)
        self._before = now

    def _print(self, at: float, event: str, text: str, entry: Entry | None = None) -> None:
        if self._json:
            data: dict[str, Any] = {"said": text} if entry is None else {"entry": entry.data()}
            click.echo(as_json({"at": at, "event": event, **data}))
        else:
            click.echo(f"{time.strftime('%H:%M:%S', time.localtime(at))} {printable(text)}")
        sys.stdout.flush()  # for programs that read a pipe


def _aspect(entry: Entry) -> tuple[object, ...]:
    """Return the values whose change makes a line. Not the count of nodes: stragglers change it."""
    return entry.digest, entry.held, entry.split, entry.leaked


def _line(entry: Entry) -> str:
    held = "" if entry.held_for is None else f", for {span(entry.held_for)}"
    nodes = f"{entry.nodes}/{entry.total} nodes{state_of(entry)}"
    return f"{name_of(entry)} {owner_text(entry.owner, entry.digest)}{held}, {nodes}"
