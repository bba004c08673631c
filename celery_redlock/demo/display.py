"""Shows the demonstration while it runs: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from types import TracebackType
from typing import TYPE_CHECKING, Any

from celery_redlock.demo.checker import Story, Verdict

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["LEGEND", "Display", "Terminal", "make_display"]

WIDE = 116
"""Columns that the table needs with bars in it."""


LEGEND = """\
  nodes     the five servers: U is up, x is down; a lock needs three
  done      charges that have run to their end
  put off   the lock was not to be had: held by another charge, or no quorum;
            the charge is sent again, and tried later
  held      order, by which charge, in which process, for how long
  wait      which charge waits for which order, in its process
  queued    per order, charges that wait in the broker
  ticks     messages of the periodic job, and which beat sent how many
"""
"""What the plain lines mean."""


class Display:
    """Plain lines: every event, and every second how far things are."""

    every = 1.0

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._next = 0.0

    def __enter__(self) -> None:
        print(LEGEND, flush=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def say(self, text: str) -> None:
        """Print something that is no event."""
        print(text, flush=True)

    def event(self, text: str) -> None:
        """Something was done."""
        print(f"{time.monotonic() - self.began:5.1f} s  *** {text}", flush=True)

    def show(self, story: Story, now: float) -> None:
        """Show how things are, if it is time to."""
        if now >= self._next and story.sent:
            self._next = now + self.every
            self.draw(story, now)

    def draw(self, story: Story, now: float) -> None:
        """Show how things are."""
        away = Counter(event["why"] for event in story.away)
        held = ", ".join(
            f"{body.order} by {body.task} in {body.pid} for {now - body.begin:.1f} s"
            for body in sorted(story.running(), key=lambda body: body.order)
        )
        waits = ", ".join(f"{event['task']} for {event['order']}" for event in waiting(story))
        queued = " ".join(f"{order}:{count}" for order, count in sorted(queue(story).items()))
        states = "".join("U" if up else "x" for _node, up in sorted(nodes(story).items()))
        print(
            f"{now - self.began:5.1f} s  nodes {states}  done {len(story.done()):3d}"
            f"  put off {away['held']} held, {away['no quorum']} no quorum"
            f"\n         held: {held or '-'}\n         wait: {waits or '-'}"
            f"\n         queued, by order: {queued or '-'}"
            f"\n         ticks: {len(story.ticks)}, {self._beats(story, now)}",
            flush=True,
        )

    def _beats(self, story: Story, now: float) -> str:
        sent = Counter(tick.beat for tick in story.ticks.values())
        said = [
            f"beat {beat}{'' if up else ' (dead)'}: {sent[beat]}"
            for beat, up in sorted(beats(story).items())
        ]
        last = max((tick.sent for tick in story.ticks.values()), default=None)
        return ", ".join([*said, f"the last {now - last:.1f} s ago" if last else "none yet"])

    def verdict(self, verdict: Verdict, failure: str) -> None:
        """Say what came out."""
        print("\nverdict, from the bodies' own logs:")
        for what, answer, good in verdict.lines():
            print(f"  {what + ' ':.<46} {answer}{'' if good else '   <-- FAILED'}")
        if failure:
            print(f"  {failure}")
        print("OK" if verdict.ok and not failure else "FAILED", flush=True)


class Terminal(Display):
    """A table that is drawn anew, by rich."""

    every = 0.1

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        from rich.console import Console
        from rich.live import Live

        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._events: deque[str] = deque(maxlen=8)

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def event(self, text: str) -> None:
        self._events.append(f"{time.monotonic() - self.began:5.1f} s  {text}")

    def draw(self, story: Story, now: float) -> None:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        sent, queued = Counter(story.sent.values()), queue(story)
        done = Counter(story.sent[task] for task in story.done())
        table = Table(title=f"{len(story.sent)} charges over {len(sent)} orders")
        for name, width in (("order", 5), ("held by", 20), ("for", 5), ("waits for it", 20)):
            table.add_column(name, min_width=width)
        wide = self._console.width >= WIDE
        for name in ("queued", "done"):
            table.add_column(name, min_width=23 if wide else 3)
        held = {body.order: body for body in story.running()}
        waits = {event["order"]: event for event in waiting(story)}
        for order in sorted(sent):
            body, next_one = held.get(order), waits.get(order)
            table.add_row(
                str(order),
                f"[green]{body.task} in {body.pid}[/]" if body else "[dim]nobody[/]",
                f"{now - body.begin:.1f} s" if body else "",
                f"[yellow]{next_one['task']} in {next_one['pid']}[/]" if next_one else "",
                f"[blue]{'▪' * queued[order] * wide}[/] {queued[order] or ''}",
                f"[green]{'▪' * done[order] * wide}[/] {done[order] or ''}",
            )
        servers = Text.from_markup(
            "nodes  "
            + "  ".join(
                f"[green]● {index + 1} up[/]" if up else f"[red]✗ {index + 1} DOWN[/]"
                for index, up in sorted(nodes(story).items())
            )
        )
        away = Counter(event["why"] for event in story.away)
        counts = Text(
            f"{now - self.began:5.1f} s   done {len(story.done())}   put off, sent again later:"
            f" held {away['held']}, no quorum {away['no quorum']}"
        )
        ticks = Text(f"ticks {len(story.ticks)}   {self._beats(story, now)}")
        events = Text("\n".join(self._events), style="cyan")
        self._live.update(Group(table, servers, counts, ticks, events), refresh=True)

    def verdict(self, verdict: Verdict, failure: str) -> None:
        from rich.table import Table

        good_all = verdict.ok and not failure
        table = Table(
            title="verdict, from the bodies' own logs",
            caption="[bold green]OK" if good_all else f"[bold red]FAILED[/] {failure}",
            show_header=False,
        )
        for what, answer, good in verdict.lines():
            table.add_row(what, answer, "[green]✓" if good else "[bold red]✗ FAILED")
        for event in self._events:
            self.say(event)
        self._console.print(table)


def make_display(plain: bool = False) -> Display:
    """A table where stdout is a terminal and rich is there, else plain lines."""
    if plain or not sys.stdout.isatty():
        return Display()
    try:
        return Terminal()
    except ImportError:
        return Display()


def queue(story: Story) -> Counter[int]:
    """Per order: charges that are sent, and neither done, nor running, nor waiting in a child."""
    off: set[Any] = story.done() | {body.task for body in story.running()}
    off |= {event["task"] for event in waiting(story)}
    return Counter(order for task, order in story.sent.items() if task not in off)


def waiting(story: Story) -> list[dict[str, Any]]:
    """The charges that were refused their lock and wait for it, by order."""
    return sorted(story.waiting.values(), key=lambda event: int(event["order"]))


def nodes(story: Story) -> dict[int, bool]:
    """Per node, whether it is up."""
    return {node: up for _at, node, up in story.nodes}


def beats(story: Story) -> dict[int, bool]:
    """Per beat, whether it is up."""
    return {beat: up for _at, beat, up in story.beats}
