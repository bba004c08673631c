"""The judge of the demonstration finds what went wrong, also where one only planted it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from celery_redlock.demo.checker import Story, Verdict, judge
from celery_redlock.demo.journal import Journal, Reader
from celery_redlock.demo.timeline import draw

Event = dict[str, Any]


def sent(task: str, order: int = 1) -> Event:
    return {"what": "sent", "at": 0.0, "pid": 1, "task": task, "order": order}


def body(
    task: str, begin: float, end: float | None, *, pid: int = 10, order: int = 1, asked: float = -1
) -> Iterator[Event]:
    facts = {"pid": pid, "order": order, "task": task}
    asked = begin if asked < 0 else asked
    yield {"what": "enter", "at": begin, "asked": asked, "seconds": 1.0, **facts}
    if end is not None:
        yield {"what": "exit", "at": end, **facts}


def node(at: float, index: int, up: bool) -> Event:
    return {"what": "node", "at": at, "pid": 1, "node": index, "up": up}


def five_up() -> list[Event]:
    return [node(0.0, index, True) for index in range(5)]


def three_killed(at: float) -> list[Event]:
    return [node(at, index, False) for index in range(3)]


def verdict_on(*events: Event) -> Verdict:
    return judge(Story.of(sorted(events, key=lambda event: float(event["at"]))))


def test_bodies_one_after_another_are_fine() -> None:
    verdict = verdict_on(sent("a"), sent("b"), *body("a", 1, 2), *body("b", 2, 3, pid=11))
    assert verdict.ok
    assert (verdict.done, verdict.seconds) == (2, 2.0)


def test_bodies_of_different_orders_may_run_at_once() -> None:
    other = body("b", 1.5, 3, pid=11, order=2)
    assert verdict_on(sent("a"), sent("b", 2), *body("a", 1, 2), *other).ok


def test_an_overlap_is_found_also_behind_a_shorter_body_in_between() -> None:
    verdict = verdict_on(
        *(sent(task) for task in "abc"),
        *body("a", 1, 9),
        *body("b", 2, 3, pid=11),
        *body("c", 8, 10, pid=12),
    )
    assert [(a.task, b.task) for a, b in verdict.overlaps] == [("a", "b"), ("a", "c")]
    assert not verdict.ok


def test_a_charge_that_never_finished_is_lost() -> None:
    verdict = verdict_on(sent("a"), sent("b"), *body("a", 1, 2))
    assert verdict.lost == ["b"]
    assert not verdict.ok


def test_nothing_done_is_no_success() -> None:
    assert not verdict_on().ok


def kill(at: float, child: int = 10) -> Event:
    return {"what": "kill", "at": at, "pid": 1, "child": child}


def test_a_killed_body_ends_at_its_death_and_its_charge_must_be_run_again() -> None:
    died = [sent("a"), *body("a", 1, None), kill(2.0)]
    assert verdict_on(*died).lost == ["a"]
    verdict = verdict_on(*died, *body("a", 2.25, 3, pid=11))
    assert verdict.ok
    assert [one.ending for one in verdict.killed] == ["killed"]
    assert verdict.blocked == [0.25]


def test_a_body_before_the_death_of_the_holder_is_an_overlap() -> None:
    verdict = verdict_on(sent("a"), *body("a", 1, None), kill(2.0), *body("a", 1.9, 3, pid=11))
    assert len(verdict.overlaps) == 1


def test_a_body_that_neither_left_nor_was_killed_overlaps_all_that_follow() -> None:
    verdict = verdict_on(sent("a"), sent("b"), *body("a", 1, None), *body("b", 60, 61, pid=11))
    assert len(verdict.overlaps) == 1


def test_a_line_written_just_before_the_kill_is_believed() -> None:
    verdict = verdict_on(sent("a"), *body("a", 1, 2.001), kill(2.0))
    assert verdict.ok
    assert verdict.killed == []


def test_a_body_without_a_quorum_is_found() -> None:
    world = [*five_up(), *three_killed(5.0), sent("a")]
    assert len(verdict_on(*world, *body("a", 6, 7)).unlocked) == 1
    assert not verdict_on(*world, *body("a", 6, 7)).ok
    assert verdict_on(*world, *body("a", 4.9, 7)).ok
    assert verdict_on(*world, node(8.0, 1, True), *body("a", 8.1, 9)).ok


def test_a_body_whose_lock_was_granted_just_before_may_begin_just_after() -> None:
    world = [*five_up(), *three_killed(5.0), sent("a")]
    assert verdict_on(*world, *body("a", 5.01, 6, asked=4.99)).ok
    assert not verdict_on(*world, *body("a", 5.01, 6, asked=5.001)).ok
    assert not verdict_on(*world, *body("a", 5.9, 6, asked=4.99)).ok


def test_finished_charges_are_counted_by_nodes_up() -> None:
    world = [*five_up(), node(5.0, 0, False), sent("a"), sent("b"), sent("c")]
    bodies = [*body("a", 1, 2), *body("b", 3, 5.5), *body("c", 6, 7)]
    assert verdict_on(*world, *bodies).phases == [(5, 4.0, 1), (4, 2.0, 2)]


def test_what_is_done_without_a_quorum_is_said_to_have_begun_before() -> None:
    world = [*five_up(), *three_killed(5.0), sent("a"), sent("b")]
    first = [*body("b", 1, 2, pid=11, order=2)]

    def said(verdict: Verdict) -> dict[str, str]:
        return {what: answer for what, answer, _good in verdict.lines()}

    fine = said(verdict_on(*world, *first, *body("a", 4.9, 7)))
    assert fine["charges done with 5 nodes up"] == "1 in 4.0 s"
    assert fine["charges done with 2 nodes up"] == "1 in 2.0 s, begun while a quorum was up"
    wrong = said(verdict_on(*world, *first, *body("a", 6, 7)))
    assert wrong["charges done with 2 nodes up"] == "1 in 2.0 s"


def plant(directory: Path, *events: Event) -> None:
    with open(directory / "planted.journal", "a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def judged(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "celery_redlock.demo.checker", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_an_overlap_planted_in_a_journal_is_exit_code_1(tmp_path: Path) -> None:
    plant(tmp_path, sent("a"), *body("a", 1, 2))
    assert judged(tmp_path).returncode == 0
    plant(tmp_path, *body("script", 1.5, 1.6, pid=99))
    result = judged(tmp_path)
    assert result.returncode == 1
    assert "FAILED  bodies of one order that overlapped: 1" in result.stdout


def test_a_journal_is_read_as_it_grows_and_never_half_a_line(tmp_path: Path) -> None:
    reader, journal = Reader(tmp_path), Journal(tmp_path)
    journal.write("ready", at=1.0)
    assert [event["what"] for event in reader.new()] == ["ready"]
    path = next(tmp_path.iterdir())
    with open(path, "a") as file:
        file.write('{"what": "sent", "at"')
    assert reader.new() == []
    with open(path, "a") as file:
        file.write(': 2.0, "task": "a"}\n')
    assert [event["task"] for event in reader.new()] == ["a"]
    assert reader.new() == []


def test_the_picture_shows_every_body_and_what_was_wrong(tmp_path: Path) -> None:
    events = [*five_up(), *three_killed(5.0), node(8.0, 0, True), sent("a"), sent("b")]
    events += [*body("a", 1, None), kill(2.0), *body("b", 1.5, 9, pid=11)]
    events += [{"what": "away", "at": 6.0, "pid": 11, "order": 1, "task": "a", "why": "held"}]
    story = Story.of(sorted(events, key=lambda event: float(event["at"])))
    path = tmp_path / "picture.svg"
    draw(story, judge(story), path)
    texts = [text.text or "" for text in ElementTree.parse(path).iter() if text.text]
    told = [text for text in texts if ", pid 1" in text]
    assert len(told) == 2
    assert "killed" in told[0]
    assert {"node 1 killed", "node 1 back", "child 10 killed", "no quorum"} <= set(texts)
    assert any(text.startswith("1 overlaps") for text in texts)


@pytest.mark.parametrize("events", [[], [sent("a")]])
def test_a_picture_of_nothing_is_a_picture(tmp_path: Path, events: list[Event]) -> None:
    story = Story.of(events)
    draw(story, judge(story), tmp_path / "picture.svg")
    assert ElementTree.parse(tmp_path / "picture.svg").getroot().tag.endswith("svg")
