"""Names and counts in the words that people read. What only declares a task needs no more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["are_needed", "counted", "names_of", "of_nodes", "printable", "shown"]


def are_needed(count: int) -> str:
    """`1 is needed`, `2 are needed`."""
    return f"{count} {'is' if count == 1 else 'are'} needed"


def of_nodes(count: int, total: int) -> str:
    """`0 of 1 node`, `2 of 3 nodes`."""
    return f"{count} of {counted(total, 'node')}"


def counted(count: int, what: str) -> str:
    """`1 key`, `2 keys`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def names_of(resource: str | Iterable[str]) -> tuple[str, ...]:
    """One name or several: each once, in an order that is the same whoever asks."""
    if isinstance(resource, tuple) and len(resource) == 1:
        return resource
    return (resource,) if isinstance(resource, str) else tuple(sorted(set(resource)))


def shown(resources: Sequence[str]) -> str:
    """Some names as one, for people."""
    return " + ".join(resources)


def printable(text: str) -> str:
    """`text` as it may stand in a log: what a terminal would obey, or cannot encode, is escaped.

    Names of resources, ids of tasks and what nodes answer are foreign text.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
