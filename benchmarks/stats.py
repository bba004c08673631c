"""From lists of seconds to figures, and from figures to a table. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least `share` of `values` do not exceed."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary(rounds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the figures of one contestant's rounds, in seconds.

    p50 is the median of the rounds' medians, so that one disturbed round moves nothing; p99 is of
    all values together, since a round is too short to have one.
    """
    together = [value for values in rounds for value in values]
    return {"p50": median(median(values) for values in rounds), "p99": quantile(together, 0.99)}


def paired_ratio(rounds: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> float:
    """Return the median of the ratios of medians, round by round."""
    pairs = zip(rounds, baseline, strict=True)
    return median(median(values) / median(others) for values, others in pairs)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return lines of columns: the first aligned left, the others right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, ["-" * width for width in widths], *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.3f}" if seconds < 1 else f"{seconds * 1000:.0f}"
