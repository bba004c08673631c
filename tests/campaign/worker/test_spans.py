"""Arithmetic of spans of time."""

from __future__ import annotations

from tests.campaign.worker.spans import both, fewer, longest, union, without


def test_union_of_spans_joins_touching_ones() -> None:
    assert union([(3.0, 4.0), (1.0, 2.0), (2.0, 3.0), (6.0, 6.0), (7.0, 8.0)]) == [
        (1.0, 4.0),
        (7.0, 8.0),
    ]


def test_both_and_without_intersect_and_subtract_spans() -> None:
    one, two = [(1.0, 4.0), (6.0, 9.0)], [(2.0, 3.0), (3.5, 7.0)]
    assert both(one, two) == [(2.0, 3.0), (3.5, 4.0), (6.0, 7.0)]
    assert without(one, two) == [(1.0, 2.0), (3.0, 3.5), (7.0, 9.0)]
    assert without(one, []) == one


def test_fewer_returns_spans_with_fewer_than_so_many_at_a_time() -> None:
    spans = [(1.0, 5.0), (2.0, 3.0), (3.0, 4.0)]
    assert fewer(spans, 2, [(0.0, 6.0)]) == [(0.0, 2.0), (4.0, 6.0)]
    assert fewer(spans, 1, [(0.0, 6.0)]) == [(0.0, 1.0), (5.0, 6.0)]
    assert fewer(spans, 0, [(0.0, 6.0)]) == []


def test_longest_returns_the_longest_span() -> None:
    assert longest([(1.0, 2.0), (4.0, 7.0)]) == (3.0, (4.0, 7.0))
    assert longest([]) == (0.0, (0.0, 0.0))
