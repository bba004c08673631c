"""The display shows held locks and waiting tasks, on a terminal and without one."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from celery_redlock.demo.display import Display, Terminal
from celery_redlock.demo.journal import Story
from tests.support.stories import FIVE_UP, body, event, node, sent

SUMMARY = "nodes UUUxU  done   1  put off 0 held, 1 no quorum"
TICKS = "ticks: 1, beat 1 (dead): 1, beat 2: 0, the last 0.5 s ago"


@pytest.fixture
def story() -> Story:
    return Story(
        [
            *FIVE_UP,
            *(
                event("beat", 0.0, beat=beat, up=up)
                for beat, up in ((1, True), (2, True), (1, False))
            ),
            *(sent(f"charge-{n}", n % 2 + 1) for n in range(6)),
            *body("charge-0", 1.0, 2.0),
            *body("charge-2", 2.0, None),
            event("tick", 2.1, 12, task="tick-1", sent=2.0, beat=1),
            event("wait", 2.1, 11, task="charge-4", order=1),
            event("away", 2.2, 12, task="charge-1", order=2, why="no quorum"),
            node(2.3, 3, False),
        ]
    )


def test_plain_display_shows_holders_and_waiters_after_a_legend(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    display = Display()
    with display.live():
        legend = capsys.readouterr().out
    display.draw(story, 2.5)
    said = capsys.readouterr().out
    assert SUMMARY in said and TICKS in said
    assert "held: 1 by charge-2 in 10 for 0.5 s\n" in said
    assert "wait: charge-4 for 1\n" in said
    assert "queued, by order: 2:3\n" in said
    assert "U is up, x is down" in legend
    for word in ("nodes", "done", "put off", "held", "wait", "queued", "ticks"):
        assert word in said
        assert f"\n  {word} " in f"\n{legend}", word
    display.draw(Story([sent("a")]), 2.5)
    assert "ticks: 0, none yet\n" in capsys.readouterr().out


def test_table_display_shows_holders_and_waiters(story: Story) -> None:
    screen = io.StringIO()
    terminal = Terminal(Console(file=screen, width=80, force_terminal=True, color_system=None))
    terminal.event("node 4 is killed")
    with terminal.live():
        terminal.draw(story, 2.5)
    lines = screen.getvalue().splitlines()
    first = next(line for line in lines if re.match(r"│ 1 ", line))
    cells = [" ".join(cell.split()) for cell in first.split("│")[1:-1]]
    assert cells == ["1", "charge-2 in 10", "0.5 s", "charge-4 in 11", "", "1"]
    for told in (SUMMARY, TICKS, "node 4 is killed"):
        assert any(told in line for line in lines), told
    assert all(len(line) <= 80 for line in lines if "│" in line)
