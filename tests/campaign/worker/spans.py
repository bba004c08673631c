"""Arithmetic of time: lists of spans, each (begin, end), sorted, apart from each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[float, float]
Spans = list[Span]


def union(spans: Iterable[Span]) -> Spans:
    """Return the parts that are in any of them; they may overlap, in any order."""
    found: Spans = []
    for begin, end in sorted(span for span in spans if span[0] < span[1]):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def both(one: Sequence[Span], two: Sequence[Span]) -> Spans:
    """Return the parts that are in both."""
    found: Spans = []
    i = j = 0
    while i < len(one) and j < len(two):
        begin, end = max(one[i][0], two[j][0]), min(one[i][1], two[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < two[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(one: Sequence[Span], two: Sequence[Span]) -> Spans:
    """Return the parts of the first that are not in the second."""
    edges = [-float("inf"), *(edge for span in two for edge in span), float("inf")]
    return both(one, list(zip(edges[::2], edges[1::2], strict=True)))


def fewer(spans: Iterable[Span], than: int, of: Sequence[Span]) -> Spans:
    """The parts of `of` in which fewer `than` of these run at the same time."""
    steps = sorted((at, step) for span in spans for at, step in ((span[0], 1), (span[1], -1)))
    many: Spans = []
    count = 0
    since = 0.0
    for at, step in steps:
        before, count = count, count + step
        if before < than <= count:
            since = at
        elif count < than <= before:
            many.append((since, at))
    return without(of, union(many)) if than > 0 else []


def longest(spans: Iterable[Span]) -> tuple[float, Span]:
    """Return the length of the longest span, and the span."""
    return max(((end - begin, (begin, end)) for begin, end in spans), default=(0.0, (0.0, 0.0)))
