"""The oracle sees what it is there to see."""

from __future__ import annotations

from pathlib import Path

from tests.support.bodies import Line, note, overlaps, read, runs


def body(resource: str, run: str, *times: float, ended: bool = True) -> list[Line]:
    kinds = ["enter", *["alive"] * (len(times) - 2), "exit" if ended else "alive"]
    return [
        Line(at, kind, resource, 1, "task", run)
        for at, kind in zip(times, kinds[: len(times)], strict=True)
    ]


def test_oracle_finds_an_overlap_in_any_order_of_lines() -> None:
    lines = body("r", "a", 1.0, 2.0) + body("r", "b", 1.9, 3.0)
    for order in (lines, lines[::-1]):
        ((first, second),) = overlaps(order)
        assert (first.begin, second.begin) == (1.0, 1.9)


def test_oracle_finds_an_overlap_with_a_body_begun_long_before() -> None:
    lines = body("r", "a", 1.0, 9.0) + body("r", "b", 2.0, 3.0) + body("r", "c", 4.0, 5.0)
    assert [second.begin for _first, second in overlaps(lines)] == [2.0, 4.0]


def test_oracle_ends_a_killed_body_at_its_last_sign_of_life() -> None:
    killed = body("r", "a", 1.0, 1.5, 2.0, ended=False)
    assert overlaps(killed + body("r", "b", 2.1, 3.0)) == []
    assert len(overlaps(killed + body("r", "b", 1.9, 3.0))) == 1
    assert [run.ended for run in runs(killed)] == [False]


def test_oracle_ignores_a_line_that_is_being_written(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    note("enter", "r", "task", "run", path)
    with open(path, "a") as file:
        file.write('[1.0, "ex')
    (line,) = read(path)
    assert (line.kind, line.resource, line.task, line.detail) == ("enter", "r", "task", "run")
