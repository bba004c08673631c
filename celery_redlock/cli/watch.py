"""`redlock watch`: the same as ls, live; without a terminal one line per change."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import click

from ..protocol.errors import QuorumUnavailable
from ..protocol.values import printable
from ..survey.models import Entry, Survey
from ..survey.snapshot import survey
from .context import NO_QUORUM, Site, as_json, on_site
from .formatting import Say, choosing, chosen, kinds_of, name_of, owner_text, span, state_of

__all__ = ["Changes", "command"]


@click.command("watch")
@choosing
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks at the nodes.",
)
@click.option(
    "--count", type=click.IntRange(min=1), help="Looks, until it ends; else until Ctrl-C."
)
@on_site
def command(
    site: Site,
    match: str,
    task: str | None,
    kinds: Sequence[str],
    everything: bool,
    timeout: float,
    interval: float,
    count: int | None,
) -> int:
    """What is held, live. Ctrl-C ends it.

    On a terminal a table; else, and with --json, a line for each change. What is taken and given
    back between two looks is not seen. Exit code 3 if too few nodes answered the last look.
    """
    redlock, wanted = site.redlock, kinds_of(kinds, everything)
    looks = 0
    trouble = ""
    try:
        with _screen(site) as say:
            while True:
                try:
                    seen = survey(redlock, match, kinds=wanted, timeout=timeout)
                    trouble = ""
                    say(seen, chosen(seen.entries, task), "")
                except QuorumUnavailable as error:
                    trouble = printable(str(error))
                    say(None, (), trouble)
                looks += 1
                if count is not None and looks >= count:
                    break
                time.sleep(interval)
    except KeyboardInterrupt:
        return 0
    return NO_QUORUM if trouble else 0


def _screen(site: Site) -> AbstractContextManager[Say]:
    if sys.stdout.isatty() and not site.as_json:
        try:
            from .live import screen
        except ImportError:  # no rich
            pass
        else:
            return screen()
    return nullcontext(Changes(site.as_json))


class Changes:
    """Says what has changed since the last look: a line each.

    Args:
        for_programs: As JSON.
    """

    def __init__(self, for_programs: bool) -> None:
        self._json = for_programs
        self._before: dict[str, Entry] = {}
        self._away: dict[str, str] = {}
        self._trouble = ""

    def __call__(self, seen: Survey | None, entries: Sequence[Entry], trouble: str) -> None:
        """One look: what was found; or, if it is None, why nothing was."""
        if seen is None:
            if not self._trouble:
                self._say(time.time(), "unavailable", trouble)
            self._trouble = trouble
            return
        if self._trouble:
            self._say(seen.at, "available", "a quorum of nodes answers again")
            self._trouble = ""
        self._nodes(seen)
        now = {entry.key: entry for entry in entries}
        for key, entry in self._before.items():
            if key not in now:
                held = "" if entry.held_for is None else f" after {span(entry.held_for)}, about"
                self._say(seen.at, "gone", f"- {name_of(entry)} is free{held}", entry)
        for key, entry in now.items():
            old = self._before.get(key)
            who = f"{name_of(entry)} {_on(entry)}"
            if old is None:
                self._say(seen.at, "new", f"+ {who}", entry)
            elif _sight(old) != _sight(entry):
                self._say(seen.at, "changed", f"~ {who}", entry)
        self._before = now

    def _nodes(self, seen: Survey) -> None:
        away = {look.name: look.error for look in seen.looks if not look.reachable}
        for name in self._away.keys() - away.keys():
            self._say(seen.at, "node", f"node {name} answers again")
        for name in away.keys() - self._away.keys():
            self._say(seen.at, "node", f"! node {name} does not answer: {away[name]}")
        self._away = away

    def _say(self, at: float, event: str, text: str, entry: Entry | None = None) -> None:
        if self._json:
            data: dict[str, Any] = {"at": at, "event": event}
            data |= {"said": text} if entry is None else {"entry": entry.data()}
            click.echo(as_json(data))
        else:
            click.echo(f"{time.strftime('%H:%M:%S', time.localtime(at))} {printable(text)}")
        sys.stdout.flush()  # whoever reads a pipe watches as well


def _sight(entry: Entry) -> tuple[object, ...]:
    """What makes a line if it changes. Not the count of nodes, which does with every straggler."""
    return entry.digest, entry.held, entry.split, entry.leaked


def _on(entry: Entry) -> str:
    held = "" if entry.held_for is None else f", for {span(entry.held_for)}"
    nodes = f"{entry.nodes}/{entry.total} nodes{state_of(entry)}"
    return f"{owner_text(entry.owner, entry.digest)}{held}, {nodes}"
