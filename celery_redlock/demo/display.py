"""Shows the demonstration while it runs: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from types import TracebackType
from typing import Any

from celery_redlock.demo.judge import Story, Verdict

__all__ = ["Display", "Terminal", "make_display"]


class Display:
    """Plain lines: every event, and every second how far things are."""

    every = 1.0

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._next = 0.0

    def __enter__(self) -> None: ...

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
        waiting = waiting_by_order(story)
        holds = {body.order: f"{body.task}@{body.pid}" for body in story.running()}
        orders = "  ".join(
            f"{order}:{holds.get(order, '-').removeprefix('charge-')}+{waiting[order]}"
            for order in sorted(set(story.sent.values()))
        )
        print(
            f"{now - self.began:5.1f} s  nodes {node_marks(story)}  done {len(story.done()):3d}"
            f"  order:charge@pid+waiting  {orders}",
            flush=True,
        )

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

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
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

        table = Table(title="200 charges over 10 orders, 4 pool children", expand=False)
        for name in ("order", "held by", "for", "waiting", "done"):
            table.add_column(name, justify="right" if name in ("order", "for") else "left")
        held = {body.order: body for body in story.running()}
        waiting, sent = waiting_by_order(story), Counter(story.sent.values())
        done = Counter(story.sent[task] for task in story.done() if task in story.sent)
        for order in sorted(sent):
            body = held.get(order)
            table.add_row(
                str(order),
                f"[green]{body.task}[/] pid {body.pid}" if body else "[dim]nobody[/]",
                f"{now - body.begin:.1f} s" if body else "",
                f"[yellow]{'▪' * waiting[order]}[/] {waiting[order] or ''}",
                f"{'█' * done[order]}[dim]{'·' * (sent[order] - done[order])}[/] {done[order]}",
            )
        nodes = Text.from_markup(
            "nodes  "
            + "  ".join(
                f"[green]● {index + 1} up[/]" if up else f"[red]✗ {index + 1} DOWN[/]"
                for index, up in sorted(node_states(story).items())
            )
        )
        away = Counter(event["why"] for event in story.away)
        counts = Text(
            f"{now - self.began:5.1f} s   done {len(story.done())}   sent away:"
            f" held {away['held']}, no quorum {away['no quorum']}"
        )
        events = Text("\n".join(self._events), style="cyan")
        self._live.update(Group(table, nodes, counts, events), refresh=True)

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


def waiting_by_order(story: Story) -> Counter[int]:
    """Per order: charges that are sent, neither done nor running."""
    off: set[Any] = story.done() | {body.task for body in story.running()}
    return Counter(order for task, order in story.sent.items() if task not in off)


def node_states(story: Story) -> dict[int, bool]:
    """Per node, whether it is up."""
    return {node: up for _at, node, up in story.nodes}


def node_marks(story: Story) -> str:
    """The same, a character each."""
    return "".join("U" if up else "x" for _node, up in sorted(node_states(story).items()))
