"""Durations as text, for the terminal and for the pages."""

from __future__ import annotations

__all__ = ["span"]


def span(seconds: float) -> str:
    """Return a duration as a short text: its two largest units."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(min(seconds, 1e12))
    parts: list[str] = []
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, whole = divmod(whole, size)
        if count or parts:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])
