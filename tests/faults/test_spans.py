"""Arithmetic of spans of time."""

from __future__ import annotations

from tests.faults.spans import both, fewer, longest, union, without


def test_union_joins_what_touches() -> None:
    assert union([(3.0, 4.0), (1.0, 2.0), (2.0, 3.0), (6.0, 6.0), (7.0, 8.0)]) == [
        (1.0, 4.0),
        (7.0, 8.0),
    ]


def test_what_is_in_both_and_in_one_alone() -> None:
    one, two = [(1.0, 4.0), (6.0, 9.0)], [(2.0, 3.0), (3.5, 7.0)]
    assert both(one, two) == [(2.0, 3.0), (3.5, 4.0), (6.0, 7.0)]
    assert without(one, two) == [(1.0, 2.0), (3.0, 3.5), (7.0, 9.0)]
    assert without(one, []) == one


def test_fewer_than_so_many_at_a_time() -> None:
    spans = [(1.0, 5.0), (2.0, 3.0), (3.0, 4.0)]
    assert fewer(spans, 2, [(0.0, 6.0)]) == [(0.0, 2.0), (4.0, 6.0)]
    assert fewer(spans, 1, [(0.0, 6.0)]) == [(0.0, 1.0), (5.0, 6.0)]
    assert fewer(spans, 0, [(0.0, 6.0)]) == []


def test_the_longest() -> None:
    assert longest([(1.0, 2.0), (4.0, 7.0)]) == (3.0, (4.0, 7.0))
    assert longest([]) == (0.0, (0.0, 0.0))
