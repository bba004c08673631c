"""Names and counts in the words that people read.

They are separate because a program that only declares tasks imports nothing else of this kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["are_needed", "counted", "event", "names_of", "of_nodes", "printable", "shown"]


def are_needed(count: int) -> str:
    """Return `1 is needed`, `2 are needed`, and so on."""
    return f"{count} {'is' if count == 1 else 'are'} needed"


def of_nodes(count: int, total: int) -> str:
    """Return `0 of 1 node`, `2 of 3 nodes`, and so on."""
    return f"{count} of {counted(total, 'node')}"


def counted(count: int, what: str) -> str:
    """Return `1 key`, `2 keys`, and so on."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def names_of(resource: str | Iterable[str]) -> tuple[str, ...]:
    """Return one name, or several: each once, in an order that does not depend on the caller."""
    if isinstance(resource, tuple) and len(resource) == 1:
        return resource
    return (resource,) if isinstance(resource, str) else tuple(sorted(set(resource)))


def shown(resources: Sequence[str]) -> str:
    """Return some names as one text, for people."""
    return " + ".join(resources)


def printable(text: str) -> str:
    """Return `text` with all characters escaped that a terminal would obey or cannot encode.

    Names of resources, ids of tasks and the answers of nodes are untrusted text, and go into logs.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def event(name: str, resource: str = "") -> dict[str, str]:
    """Return the `extra` of a log line: an id that stays when its words change, and its resource.

    docs/runbook.md has all ids.
    """
    return {"event": name, "resource": printable(resource)} if resource else {"event": name}
