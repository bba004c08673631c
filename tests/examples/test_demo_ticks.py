"""The demonstration's judge finds ticks that were sent twice, too late, or without a quorum."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from celery_redlock.demo.checker import Story, judge
from celery_redlock.demo.display import Display, Terminal
from celery_redlock.demo.ticks import INTERVAL, Tick, Ticks, judge_ticks
from celery_redlock.demo.timeline import draw

Event = dict[str, Any]

UP = [(0.0, 1, True), (0.1, 2, True)]
KILLED = [*UP, (4.5, 1, False)]


def every_second(first: int, last: int, beat: int = 1) -> list[Tick]:
    return [Tick(float(at), beat) for at in range(first, last + 1)]


def judged(
    ticks: list[Tick],
    beats: list[tuple[float, int, bool]] = UP,
    dark: list[tuple[float, float]] | None = None,
    end: float = 10.2,
) -> Ticks:
    return judge_ticks(ticks, beats, dark or [], end)


def test_one_tick_each_interval_is_fine() -> None:
    ticks = judged(every_second(1, 10))
    assert ticks.ok
    assert (ticks.sent, ticks.due, ticks.gap) == (10, 10, INTERVAL)


def test_it_does_not_matter_which_beat_sends() -> None:
    ticks = judged([*every_second(1, 4, beat=1), *every_second(5, 10, beat=2)], KILLED)
    assert ticks.ok
    assert ticks.deaths == [(1, 4.5)]
    assert ticks.after == [1.0]
    assert ticks.counts == {1: (4, 0), 2: (0, 6)}


def test_two_that_are_closer_than_half_an_interval_are_one_sent_twice() -> None:
    again = Tick(4.4, 2)
    ticks = judged([*every_second(1, 10), again])
    assert ticks.twice == [(Tick(4.0, 1), again)]
    assert not ticks.ok
    assert judged([*every_second(1, 10), Tick(4.5, 2)]).ok


def test_a_gap_of_more_than_two_intervals_is_too_long() -> None:
    assert judged([*every_second(1, 4), *every_second(6, 10)]).ok
    late = judged([*every_second(1, 4), Tick(6.1, 1), *every_second(7, 10)])
    assert late.gap == pytest.approx(2.1)
    assert not late.ok


def test_ticks_that_begin_late_or_end_early_are_a_gap() -> None:
    assert not judged(every_second(3, 10)).ok
    assert not judged(every_second(1, 8)).ok
    assert judged(every_second(2, 9)).ok


def test_without_a_quorum_the_wait_is_excused_and_not_what_follows() -> None:
    dark = [(4.2, 7.2)]
    before = every_second(1, 4)
    back = judged([*before, Tick(7.9, 2), Tick(8.9, 2), Tick(9.9, 2)], dark=dark)
    assert back.ok
    assert back.gap == INTERVAL
    assert back.due == 7
    late = judged([*before, Tick(9.3, 2)], dark=dark)
    assert late.gap == pytest.approx(2.1)
    assert not late.ok


def test_nothing_after_the_quorum_was_back_is_not_excused() -> None:
    assert not judged(every_second(1, 4), dark=[(4.2, 7.2)]).ok
    assert judged(every_second(1, 4), dark=[(4.2, math.inf)]).ok


def test_a_tick_without_a_quorum_is_found_save_one_that_was_just_claimed() -> None:
    ticks = [*every_second(1, 4), *every_second(8, 10)]
    assert judged([*ticks, Tick(5.0, 2)], dark=[(4.9, 7.5)]).ok
    unclaimed = judged([*ticks, Tick(5.5, 2)], dark=[(4.9, 7.5)])
    assert unclaimed.unclaimed == [Tick(5.5, 2)]
    assert not unclaimed.ok


def test_nothing_after_the_death_of_a_beat_is_a_failure_also_just_before_the_end() -> None:
    silent = judged(every_second(1, 4), KILLED, end=5.5)
    assert silent.gap < 2 * INTERVAL
    assert silent.after == [None]
    assert not silent.ok
    assert judged(every_second(1, 5), KILLED, end=5.5).ok


def test_why_one_may_be_missing_is_said_where_one_is() -> None:
    def said(ticks: Ticks) -> str:
        return ticks.lines()[0][1]

    dark = [(4.2, 7.2)]
    full = judged([*every_second(1, 4), Tick(7.3, 2), Tick(8.3, 2), Tick(9.3, 2)], dark=dark)
    assert said(full) == "7, ideal 7"
    fewer = judged([*every_second(1, 4), Tick(8.1, 2), Tick(9.1, 2)], dark=dark)
    assert fewer.ok
    assert said(fewer).startswith("6, ideal 7; the first comes up to 1 s after the start, or")


def test_no_tick_at_all_is_a_failure() -> None:
    assert not judged([]).ok


def test_where_no_beat_is_there_is_nothing_to_say() -> None:
    ticks = judged([], [])
    assert ticks.ok
    assert ticks.lines() == []


def happened(*ticks: tuple[float, int]) -> list[Event]:
    """Two beats, one charge, and these ticks; at 4.5 beat 1 is killed, at 6 s all is over."""

    def event(what: str, at: float, pid: int = 1, **facts: object) -> Event:
        return {"what": what, "at": at, "pid": pid, **facts}

    body = {"task": "charge", "order": 1}
    return [
        *(event("node", 0.0, node=index, up=True) for index in range(5)),
        *(event("beat", at, 20 + beat, beat=beat, up=up) for at, beat, up in KILLED),
        event("sent", 0.0, **body),
        event("enter", 1.0, 10, asked=1.0, seconds=5.0, **body),
        *(
            event("tick", sent + 0.1, 11, task=f"tick-{n}", sent=sent, beat=beat)
            for n, (sent, beat) in enumerate(ticks)
        ),
        event("exit", 6.0, 10, **body),
    ]


GOOD = [(1.0, 1), (2.0, 1), (3.0, 2), (4.0, 1), (5.0, 2)]


def test_a_message_that_is_delivered_again_is_one_tick() -> None:
    events = happened(*GOOD)
    (first,) = [event for event in events if event.get("task") == "tick-0"]
    story = Story.of([*events, {**first, "at": 1.4}])
    assert len(story.ticks) == 5
    assert judge(story).ok


def test_a_tick_sent_twice_fails_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(Story.of(happened(*GOOD))).ok
    verdict = judge(Story.of(happened(*GOOD, (4.2, 2))))
    assert not verdict.ok
    Display().verdict(verdict, "")
    said = capsys.readouterr().out
    assert "  ticks sent, one due every 1 s ................ 6, ideal 6\n" in said
    assert re.search(r"ticks sent twice \.+ 1 +<-- FAILED", said)
    assert re.search(r"tick sent twice \.+ by beat 1, 0.20 s later by 2 +<-- FAILED", said)
    assert "  longest gap between ticks, with a quorum ..... 1.00 s\n" in said
    assert "  gap over the death of beat 1 ................. 0.80 s\n" in said
    assert "  ticks by beat 1, killed ...................... 3 before the kill, 0 after\n" in said
    assert "  ticks by beat 2 .............................. 2 before the kill, 1 after\n" in said


def test_a_double_planted_in_a_journal_is_exit_code_1(tmp_path: Path) -> None:
    def judge_it(events: list[Event]) -> subprocess.CompletedProcess[str]:
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (tmp_path / "planted.journal").write_text(lines)
        command = [sys.executable, "-m", "celery_redlock.demo.checker", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=30)

    assert judge_it(happened(*GOOD)).returncode == 0
    result = judge_it(happened(*GOOD, (2.1, 2)))
    assert result.returncode == 1
    assert "FAILED  ticks sent twice: 1" in result.stdout


TOLD = "beat 1 (dead): 3, beat 2: 2, the last 0.5 s ago\n"


def test_plain_lines_tell_which_beat_sends(capsys: pytest.CaptureFixture[str]) -> None:
    Display().draw(Story.of(happened(*GOOD)), 5.5)
    assert f"ticks: 5, {TOLD}" in capsys.readouterr().out
    Display().draw(Story.of(happened()), 5.5)
    assert "ticks: 0, beat 1 (dead): 0, beat 2: 0, none yet\n" in capsys.readouterr().out


def test_the_table_tells_which_beat_sends() -> None:
    screen = io.StringIO()
    terminal = Terminal(Console(file=screen, width=80, force_terminal=True, color_system=None))
    with terminal:
        terminal.draw(Story.of(happened(*GOOD)), 5.5)
    assert f"ticks 5   {TOLD}" in re.sub(r" +\n", "\n", screen.getvalue())


def test_the_picture_shows_each_tick_and_which_were_wrong(tmp_path: Path) -> None:
    story = Story.of(happened(*GOOD, (4.2, 2)))
    path = tmp_path / "picture.svg"
    draw(story, judge(story), path)
    elements = list(ElementTree.parse(path).iter())
    kinds = [element.get("class") for element in elements]
    assert kinds.count("tick") == 5
    assert kinds.count("wrong") == 1
    texts = {element.text for element in elements}
    assert {"beat 1", "beat 2", "beat 1 killed"} <= texts
    assert any("6 ticks, 1 sent twice" in (text or "") for text in texts)
