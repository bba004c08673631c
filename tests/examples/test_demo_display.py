"""Who holds and who waits is to be seen, on a terminal and where there is none."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from celery_redlock.demo.checker import Story, judge
from celery_redlock.demo.display import Display, Terminal, make_display


@pytest.fixture
def story() -> Story:
    def event(what: str, at: float, pid: int = 1, **facts: object) -> dict[str, object]:
        return {"what": what, "at": at, "pid": pid, **facts}

    running = {"asked": 2.0, "seconds": 1.0}
    return Story.of(
        [
            *(event("node", 0.0, node=index, up=True) for index in range(5)),
            *(event("sent", 0.0, task=f"charge-{n}", order=n % 2 + 1) for n in range(6)),
            event("enter", 1.0, 10, task="charge-0", order=1, **running),
            event("exit", 2.0, 10, task="charge-0", order=1),
            event("enter", 2.0, 10, task="charge-2", order=1, **running),
            event("wait", 2.1, 11, task="charge-4", order=1),
            event("away", 2.2, 12, task="charge-1", order=2, why="no quorum"),
            event("node", 2.3, node=3, up=False),
        ]
    )


def test_plain_lines_tell_who_holds_and_who_waits(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    Display().draw(story, 2.5)
    said = capsys.readouterr().out
    assert "nodes UUUxU  done   1  put off 0 held, 1 no quorum" in said
    assert "held: 1 by charge-2 in 10 for 0.5 s\n" in said
    assert "wait: charge-4 for 1\n" in said
    assert "queued, by order: 2:3\n" in said


def test_plain_lines_begin_with_what_their_words_mean(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    display = Display()
    with display:
        legend = capsys.readouterr().out
    display.draw(story, 2.5)
    said = capsys.readouterr().out
    assert "U is up, x is down" in legend
    for word in ("nodes", "done", "put off", "held", "wait", "queued", "ticks"):
        assert word in said
        assert f"\n  {word} " in f"\n{legend}", word


@pytest.mark.parametrize("width", [80, 130])
def test_the_table_tells_who_holds_and_who_waits(story: Story, width: int) -> None:
    screen = io.StringIO()
    terminal = Terminal(Console(file=screen, width=width, force_terminal=True, color_system=None))
    terminal.event("node 4 is killed")
    with terminal:
        terminal.draw(story, 2.5)
    lines = screen.getvalue().splitlines()
    first = next(line for line in lines if re.match(r"│ 1 ", line))
    assert [cell.split() for cell in first.split("│")[1:5]] == [
        ["1"],
        ["charge-2", "in", "10"],
        ["0.5", "s"],
        ["charge-4", "in", "11"],
    ]
    assert any("4 DOWN" in line for line in lines)
    assert any("node 4 is killed" in line for line in lines)
    assert all(len(line) <= width for line in lines if "│" in line)


def test_the_verdict_says_what_failed(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    Display().verdict(judge(story), "waited too long")
    said = capsys.readouterr().out
    assert re.search(r"charges lost \.+ 5 of 6 +<-- FAILED", said)
    assert "waited too long" in said
    assert said.endswith("FAILED\n")


def test_plain_lines_where_it_is_no_terminal() -> None:
    assert type(make_display()) is Display
