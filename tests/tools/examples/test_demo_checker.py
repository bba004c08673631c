"""The checker of the demonstration finds what went wrong; the display shows what is held."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from celery_redlock.demo.checker import Ticks, Verdict
from celery_redlock.demo.display import Display, Terminal
from celery_redlock.demo.journal import INTERVAL, Journal, Story, Tick
from celery_redlock.demo.timeline import draw

Event = dict[str, Any]


def event(what: str, at: float, pid: int = 1, **facts: object) -> Event:
    return {"what": what, "at": at, "pid": pid, **facts}


def sent(task: str, order: int = 1) -> Event:
    return event("sent", 0.0, task=task, order=order)


def body(
    task: str, begin: float, end: float | None, *, pid: int = 10, order: int = 1
) -> Iterator[Event]:
    yield event("enter", begin, pid, order=order, task=task, seconds=1.0)
    if end is not None:
        yield event("exit", end, pid, order=order, task=task)


def node(at: float, index: int, up: bool) -> Event:
    return event("node", at, node=index, up=up)


FIVE_UP = [node(0.0, index, True) for index in range(5)]


def plant(directory: Path, *events: Event) -> subprocess.CompletedProcess[str]:
    with open(directory / "planted.journal", "a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    command = [sys.executable, "-m", "celery_redlock.demo.checker", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def kill(at: float) -> Event:
    return event("kill", at, child=10)


THREE_KILLED = [*FIVE_UP, *(node(5.0, index, False) for index in range(3))]


def told(*events: Event) -> Story:
    return Story(sorted(events, key=lambda event: float(event["at"])))


def verdict_on(*events: Event) -> Verdict:
    return Verdict(told(*events))


FINE: dict[str, list[Event]] = {
    "one after another": [*body("a", 1, 2), *body("b", 2, 3, pid=11)],
    "of two orders at once": [*body("a", 1, 2), *body("b", 1.5, 3, pid=11, order=2)],
    "killed, and again": [
        *body("a", 1, None),
        kill(2),
        *body("a", 2.25, 3, pid=11),
        *body("b", 4, 5),
    ],
    "a line just before the kill": [*body("a", 1, 2.001), kill(2), *body("b", 3, 4)],
    "begun before the dark": [*THREE_KILLED, *body("a", 4.9, 7), *body("b", 1, 2)],
    "granted just before the dark": [*THREE_KILLED, *body("a", 5.4, 7), *body("b", 1, 2)],
    "after the dark": [*THREE_KILLED, node(8, 1, True), *body("a", 8.1, 9), *body("b", 1, 2)],
}
WRONG: dict[str, tuple[list[Event], str]] = {
    "before the other's end": ([*body("a", 1, 2), *body("b", 1.9, 3, pid=11)], "overlaps"),
    "before the other's death": (
        [*body("a", 1, None), kill(2), *body("a", 1.9, 3, pid=11), *body("b", 4, 5)],
        "overlaps",
    ),
    "neither left nor killed": ([*body("a", 1, None), *body("b", 60, 61, pid=11)], "overlaps"),
    "in the dark": ([*THREE_KILLED, *body("a", 5.6, 7), *body("b", 1, 2)], "unlocked"),
    "never run": ([*body("a", 1, 2)], "lost"),
    "killed and not again": ([*body("a", 1, None), kill(2), *body("b", 2, 3)], "lost"),
}


@pytest.mark.parametrize("events", FINE.values(), ids=FINE)
def test_checker_of_the_demo_accepts_a_good_journal(events: list[Event]) -> None:
    verdict = verdict_on(sent("a"), sent("b"), *events)
    assert verdict.ok and verdict.done == 2


@pytest.mark.parametrize(("events", "where"), WRONG.values(), ids=WRONG)
def test_checker_of_the_demo_finds_each_wrong(events: list[Event], where: str) -> None:
    verdict = verdict_on(sent("a"), sent("b"), *events)
    assert not verdict.ok
    assert len(getattr(verdict, where)) == 1


def test_checker_of_the_demo_rejects_an_empty_journal() -> None:
    assert not verdict_on().ok


def test_checker_of_the_demo_blocks_an_order_after_a_kill_until_the_next_body() -> None:
    verdict = verdict_on(sent("a"), *body("a", 1, None), kill(2.0), *body("a", 2.25, 3, pid=11))
    assert ([one.ending for one in verdict.killed], verdict.blocked) == (["killed"], [0.25])
    assert verdict_on(sent("a"), *body("a", 1, 2.001), kill(2.0)).killed == []


def test_overlap_planted_in_a_journal_is_exit_code_1(tmp_path: Path) -> None:
    assert plant(tmp_path, sent("a"), *body("a", 1, 2)).returncode == 0
    result = plant(tmp_path, *body("script", 1.5, 1.6, pid=99))
    assert result.returncode == 1
    assert "FAILED  bodies of one order that overlapped: 1" in result.stdout


def test_journal_is_read_as_it_grows_and_never_half_a_line(tmp_path: Path) -> None:
    reader, writer = Journal(tmp_path), Journal(tmp_path)
    writer.write("ready", at=1.0)
    assert [event["what"] for event in reader.new()] == ["ready"]
    path = next(tmp_path.iterdir())
    for text, tasks in [('{"what": "sent", "at"', []), (': 2.0, "task": "a"}\n', ["a"]), ("", [])]:
        with open(path, "a") as file:
            file.write(text)
        assert [event["task"] for event in reader.new()] == tasks


# -- Ticks: sent twice, too late, or without a quorum ----------------------------------------------

UP = [(0.0, 1, True), (0.1, 2, True)]
KILLED = [*UP, (4.5, 1, False)]
DARK = [(4.2, 7.2)]


def at(*times: float, beat: int = 1) -> list[Tick]:
    return [Tick(time, beat) for time in times]


def every_second(first: int, last: int, beat: int = 1) -> list[Tick]:
    return at(*map(float, range(first, last + 1)), beat=beat)


def judged(
    ticks: list[Tick],
    beats: list[tuple[float, int, bool]] = UP,
    dark: list[tuple[float, float]] | None = None,
    end: float = 10.2,
) -> Ticks:
    return Ticks(ticks, beats, dark or [], end)


@pytest.mark.parametrize(
    ("ticks", "gap"),
    [
        (judged(every_second(1, 10)), INTERVAL),
        (judged(every_second(2, 9)), 2.0),
        (judged([*every_second(1, 4), *every_second(6, 10)]), 2.0),
        (judged([*every_second(1, 10), Tick(4.5, 2)]), INTERVAL),
        (judged([*every_second(1, 4), *at(7.9, 8.9, 9.9)], dark=DARK), INTERVAL),
        (judged(every_second(1, 4), dark=[(4.2, math.inf)]), INTERVAL),
        (judged(every_second(1, 5), KILLED, end=5.5), INTERVAL),
        (judged([], []), 0.0),
    ],
    ids=[
        *("one an interval", "late and early", "one missing", "half an interval", "after the dark"),
        *("dark to the end", "on after a death", "no beat"),
    ],
)
def test_checker_of_ticks_accepts_good_ticks(ticks: Ticks, gap: float) -> None:
    assert ticks.ok
    assert ticks.gap == pytest.approx(gap, abs=0.21)


@pytest.mark.parametrize(
    ("ticks", "gap"),
    [
        (judged([*every_second(1, 4), Tick(6.1, 1), *every_second(7, 10)]), 2.1),
        (judged(every_second(3, 10)), 3.0),
        (judged(every_second(1, 8)), 2.2),
        (judged([*every_second(1, 4), Tick(9.3, 2)], dark=DARK), 2.1),
        (judged(every_second(1, 4), dark=DARK), 3.0),
        (judged([]), 10.2),
    ],
    ids=["two missing", "begins late", "ends early", "late after the dark", "dead dark", "none"],
)
def test_checker_of_ticks_finds_a_gap_that_is_too_long(ticks: Ticks, gap: float) -> None:
    assert ticks.gap == pytest.approx(gap)
    assert not ticks.ok


def test_checker_of_ticks_finds_a_tick_without_a_quorum_unless_just_claimed() -> None:
    ticks = [*every_second(1, 4), *every_second(8, 10)]
    assert judged([*ticks, Tick(5.0, 2)], dark=[(4.9, 7.5)]).ok
    unclaimed = judged([*ticks, Tick(5.5, 2)], dark=[(4.9, 7.5)])
    assert unclaimed.unclaimed == [Tick(5.5, 2)]
    assert not unclaimed.ok


def test_checker_of_ticks_requires_another_beat_to_go_on_after_a_kill() -> None:
    ticks = judged([*every_second(1, 4, beat=1), *every_second(5, 10, beat=2)], KILLED)
    assert ticks.ok
    assert (ticks.deaths, ticks.after, ticks.counts) == ({1: 4.5}, {1: 1.0}, {1: 4, 2: 6})
    silent = judged(every_second(1, 4), KILLED, end=5.5)
    assert silent.gap < 2 * INTERVAL and silent.after == {1: None}
    assert not silent.ok


def happened(*ticks: tuple[float, int]) -> list[Event]:
    """Two beats, one charge, and these ticks; at 4.5 beat 1 is killed, at 6 s all is over."""
    return [
        *FIVE_UP,
        *(event("beat", at, 20 + beat, beat=beat, up=up) for at, beat, up in KILLED),
        sent("charge"),
        *body("charge", 1.0, 6.0),
        *(
            event("tick", sent + 0.1, 11, task=f"tick-{n}", sent=sent, beat=beat)
            for n, (sent, beat) in enumerate(ticks)
        ),
    ]


GOOD = [(1.0, 1), (2.0, 1), (3.0, 2), (4.0, 1), (5.0, 2)]


def test_tick_sent_twice_fails_the_verdict_and_is_in_the_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert Verdict(Story(happened(*GOOD))).ok
    story = Story(happened(*GOOD, (4.2, 2)))
    verdict = Verdict(story)
    assert not verdict.ok
    Display().verdict(verdict, "")
    said = capsys.readouterr().out
    assert "  ticks sent, one due every 1 s ................ 6\n" in said
    assert re.search(r"ticks sent twice \.+ 1 +<-- FAILED", said)
    assert re.search(r"tick sent twice \.+ by beat 1, 0.20 s later by 2 +<-- FAILED", said)
    assert "  longest gap between ticks, with a quorum ..... 1.00 s\n" in said
    assert "  gap over the death of beat 1 ................. 0.80 s\n" in said
    assert "  ticks by beat 1, killed ...................... 3\n" in said
    assert "  ticks by beat 2 .............................. 3\n" in said

    draw(story, verdict, tmp_path / "picture.svg")
    elements = list(ElementTree.parse(tmp_path / "picture.svg").iter())
    kinds = [element.get("class") for element in elements]
    assert (kinds.count("tick"), kinds.count("wrong")) == (5, 1)
    texts = {element.text for element in elements}
    assert {"beat 1", "beat 2", "beat 1 killed"} <= texts
    assert any("6 ticks, 1 sent twice" in (text or "") for text in texts)


# -- The display: held locks and waiting tasks, on a terminal and without one ----------------------

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
