"""The checker of the demonstration finds what went wrong, also where one only planted it."""

from __future__ import annotations

from pathlib import Path

import pytest

from celery_redlock.demo.checker import Verdict
from celery_redlock.demo.journal import Journal, Story
from tests.support.stories import FIVE_UP, Event, body, event, node, plant, sent


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
