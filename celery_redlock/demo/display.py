"""Live display of the demonstration: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from celery_redlock.demo.checker import Verdict
from celery_redlock.demo.journal import Story

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Display", "Terminal", "make_display"]

FIVE = "the five servers: U is up, x is down; a lock needs three"
LEGEND = """\
  nodes     {nodes}
  done      charges that have run to their end
  put off   the lock was not granted: another charge held it, or there was no quorum;
            the charge is sent again, and tried later
  held      order, by which charge, in which process, for how long
  wait      which charge waits for which order, in its process
  queued    per order, charges that wait in the broker
  ticks     messages of the periodic job, and which beat sent how many
"""
"""Legend of the plain lines."""


class Display:
    """Plain lines: every event, and the state every second."""

    every = 1.0
    """Seconds between two pictures."""
    nodes = FIVE
    """Description of the nodes, for the legend."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._next = 0.0

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """Show the state while the block runs."""
        print(LEGEND.format(nodes=self.nodes), flush=True)
        yield

    def say(self, text: str) -> None:
        """Print a text that is not an event."""
        print(text, flush=True)

    def event(self, text: str) -> None:
        """Print an event."""
        self.say(f"{time.monotonic() - self.began:5.1f} s  *** {text}")

    def show(self, story: Story, now: float) -> None:
        """Show the state, if it is time to."""
        if now >= self._next and story.sent:
            self._next = now + self.every
            self.draw(story, now)

    def draw(self, story: Story, now: float) -> None:
        """Show the state."""
        held = [
            f"{body.order} by {body.task} in {body.pid} for {now - body.begin:.1f} s"
            for body in sorted(story.running(), key=lambda body: body.order)
        ]
        waits = [f"{event['task']} for {event['order']}" for event in _waiting(story)]
        queued = [f"{order}:{count}" for order, count in sorted(_queued(story).items())]
        summary, ticks = self.summary(story, now)
        said = [
            f"held: {', '.join(held) or '-'}",
            f"wait: {', '.join(waits) or '-'}",
            f"queued, by order: {' '.join(queued) or '-'}",
        ]
        self.say("\n         ".join([summary, *said, ticks]))

    def summary(self, story: Story, now: float) -> tuple[str, str]:
        """Return two lines: one on nodes and charges, one on ticks."""
        away = Counter(event["why"] for event in story.away)
        nodes = {node: up for _at, node, up in story.nodes}
        states = "".join("U" if up else "x" for _node, up in sorted(nodes.items()))
        sent = Counter(tick.beat for tick in story.ticks.values())
        beats = {beat: up for _at, beat, up in story.beats}
        said = [f"beat {b}{'' if up else ' (dead)'}: {sent[b]}" for b, up in sorted(beats.items())]
        last = max((tick.sent for tick in story.ticks.values()), default=None)
        said.append(f"the last {now - last:.1f} s ago" if last else "none yet")
        return (
            f"{now - self.began:5.1f} s  nodes {states}  done {len(story.done()):3d}"
            f"  put off {away['held']} held, {away['no quorum']} no quorum",
            f"ticks: {len(story.ticks)}, {', '.join(said)}",
        )

    def verdict(self, verdict: Verdict, failure: str) -> None:
        """Print the verdict."""
        self.say("\nverdict, from the bodies' own logs:")
        for what, answer, good in verdict.lines():
            self.say(f"  {what + ' ':.<46} {answer}{'' if good else '   <-- FAILED'}")
        if failure:
            self.say(f"  {failure}")
        self.say("OK" if verdict.ok and not failure else "FAILED")


class Terminal(Display):
    """A table, drawn by rich over the previous one."""

    every = 0.1

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        from rich.console import Console
        from rich.live import Live

        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._events: deque[str] = deque(maxlen=8)

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        with self._live:
            yield
        self.say("\n".join(self._events))

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def event(self, text: str) -> None:
        self._events.append(f"{time.monotonic() - self.began:5.1f} s  {text}")

    def draw(self, story: Story, now: float) -> None:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        sent, queued = Counter(story.sent.values()), _queued(story)
        done = Counter(story.sent[task] for task in story.done())
        table = Table(title=f"{len(story.sent)} charges over {len(sent)} orders")
        for name, width in (("order", 5), ("held by", 20), ("for", 5), ("waits for it", 20)):
            table.add_column(name, min_width=width)
        for name in ("queued", "done"):
            table.add_column(name, min_width=3, justify="right")
        held = {body.order: body for body in story.running()}
        waits = {event["order"]: event for event in _waiting(story)}
        for order in sorted(sent):
            body, next_one = held.get(order), waits.get(order)
            table.add_row(
                str(order),
                f"[green]{body.task} in {body.pid}[/]" if body else "[dim]nobody[/]",
                f"{now - body.begin:.1f} s" if body else "",
                f"[yellow]{next_one['task']} in {next_one['pid']}[/]" if next_one else "",
                str(queued[order] or ""),
                str(done[order] or ""),
            )
        events = Text("\n".join(self._events), style="cyan")
        self._live.update(Group(table, *map(Text, self.summary(story, now)), events), refresh=True)


def make_display(plain: bool = False) -> Display:
    """Return a table if stdout is a terminal and rich is installed, else plain lines."""
    if sys.stdout.isatty() and not plain:
        with contextlib.suppress(ImportError):
            return Terminal()
    return Display()


def _queued(story: Story) -> Counter[int]:
    """Return per order the number of charges that are neither done, nor running, nor in a child."""
    off = story.done() | {body.task for body in story.running()}
    off |= {event["task"] for event in story.waiting.values()}
    return Counter(order for task, order in story.sent.items() if task not in off)


def _waiting(story: Story) -> list[dict[str, Any]]:
    """Return the charges that were refused their lock and wait for it, by order."""
    return sorted(story.waiting.values(), key=lambda event: int(event["order"]))
