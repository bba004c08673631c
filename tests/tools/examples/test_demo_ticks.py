"""The demonstration's checker finds ticks that were sent twice, too late, or without a quorum."""

from __future__ import annotations

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from celery_redlock.demo.checker import Ticks, Verdict
from celery_redlock.demo.display import Display
from celery_redlock.demo.journal import INTERVAL, Story, Tick
from celery_redlock.demo.timeline import draw
from tests.support.stories import FIVE_UP, Event, body, event, sent

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
