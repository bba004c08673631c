"""Answers in JSON with something odd in one of their fields."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

__all__ = ["ODD", "bent", "paths"]

GONE = object()
"""Stands for a field that is missing."""
DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]
ODD: tuple[Any, ...] = (
    *(GONE, None, True, 0, -1, 2**64, 10**400, -(10**400), 1.5, math.nan, math.inf),
    *("", "x", "-1", "9" * 20, "9" * 400, "1e5", "\ud800", "\x1b[2J", "====", "AAA", "Lzpf"),
    *([], [[]], [None], ["x"], [{}], {}, {"x": {}}, {"code": []}, DEEP),
)
"""Values that no server means, of any type: those of the fields, and all others."""


def paths(said: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where there is something in an answer."""
    yield at
    if isinstance(said, (dict, list)):
        for name, one in said.items() if isinstance(said, dict) else enumerate(said):
            yield from paths(one, (*at, name))


def bent(said: Any, path: tuple[Any, ...], odd: Any) -> Any:
    """Return an answer with something odd at a path."""
    if not path:
        return {} if odd is GONE else odd
    said = copy.deepcopy(said)
    inner = said
    for name in path[:-1]:
        inner = inner[name]
    if odd is GONE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = odd
    return said
