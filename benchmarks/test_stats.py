"""The arithmetic behind the tables: `python -m pytest benchmarks`."""

from __future__ import annotations

import pytest

from benchmarks.issue import ROWS, met, rows, show
from benchmarks.stats import ms, paired_ratio, quantile, summary, table


def test_a_quantile_is_a_value_that_was_measured() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert quantile(values, 0.99) == 99
    assert quantile(values, 0.5) == 50
    assert quantile(values, 1.0) == 100
    assert quantile([7.0], 0.99) == 7


def test_a_quantile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


def test_one_disturbed_round_does_not_move_the_median_but_shows_in_p99() -> None:
    rounds = [[1.0, 1.0, 1.0], [50.0, 50.0, 50.0], [1.0, 2.0, 3.0]]
    assert summary(rounds) == {"p50": 2.0, "p99": 50.0}


def test_a_ratio_compares_rounds_that_ran_beside_each_other() -> None:
    # Between the rounds the machine changes; the medians of all, 3 and 3, would say 1.0.
    mine = [[2.0, 2.0], [20.0, 20.0], [3.0, 3.0]]
    baseline = [[1.0, 1.0], [10.0, 10.0], [3.0, 3.0]]
    assert paired_ratio(mine, baseline) == 2.0
    assert paired_ratio(baseline, baseline) == 1.0


def test_rounds_without_a_partner_are_refused() -> None:
    with pytest.raises(ValueError):
        paired_ratio([[1.0], [1.0]], [[1.0]])


def test_a_table_aligns_names_left_and_figures_right() -> None:
    assert table(["who", "ms"], [["a", "1.0"], ["longer", "12.0"]]).splitlines() == [
        "who       ms",
        "------  ----",
        "a        1.0",
        "longer  12.0",
    ]


def test_seconds_are_shown_as_milliseconds() -> None:
    assert ms(0.000_157_8) == "0.158"
    assert ms(2.0004) == "2000"


def test_the_issue_rows_are_those_of_the_sections_that_ran() -> None:
    results = {"publishing": {"ours": {"ratio": 0.61}, "bare": {"ratio": 0.88}}}
    (row,) = rows(results)
    assert (row["now"], row["goal"], row["limit"]) == (0.61, ">= 0.78", 0.88)
    assert "missed" in show([row])
    assert rows({}) == []
    assert len(ROWS) == 18


def test_a_goal_is_met_by_what_is_shown() -> None:
    assert met(1.604, "<= 1.6")
    assert not met(1.61, "<= 1.6")
    assert met(0.85, ">= 0.85")
