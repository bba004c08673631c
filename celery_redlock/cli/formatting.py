"""Text for people: entries of a survey, their owners and their times."""

from __future__ import annotations

import math
import time
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import click

from ..protocol.errors import QuorumUnavailable
from ..protocol.texts import of_nodes, printable
from ..protocol.values import NOT_WAITED_FOR, Owner, Vote
from ..survey.durations import span
from ..survey.models import Entry, Survey
from ..survey.waiting import MAX_WAITED_S

__all__ = [
    "agree",
    "entry_lines",
    "lines",
    "name_of",
    "owner_text",
    "print_unreachable",
    "state_of",
]
__all__ += ["start_lines", "ttl_text", "wait_lines", "without_quorum"]

COLUMN_GAP = "  "
AGREE_S = 1.0
"""Seconds. Ttls that differ by less agree: the nodes were asked one after the other."""


def name_of(entry: Entry) -> str:
    """Return the name of a resource, with the kind of the entry unless it is a plain lock."""
    kind = "" if entry.kind == "lock" else f" ({entry.kind})"
    return f"{entry.resource}{entry.place}{kind}"


def state_of(entry: Entry) -> str:
    """Return what is odd about an entry, to follow its count of nodes; empty if nothing is."""
    odd = ["split"] if entry.split else [] if entry.held else ["no quorum"]
    odd += ["no ttl"] if entry.leaked else []
    return " " + ", ".join(odd) if odd else ""


def owner_text(owner: Owner | None, digest: str) -> str:
    """Return an owner on one line."""
    who = "another program's value"
    if owner is not None:
        task = " ".join(part for part in (owner.task, owner.task_id) if part)
        who = (f"{task}, " if task else "") + f"pid {owner.pid} on {owner.host}"
    return f"{who}, token {digest}" if digest else who


def entry_lines(entry: Entry, seen: Survey) -> list[str]:
    """Return lines about one key: its holder, and the answer of each node if they differ."""
    since = "" if entry.held_for is None else f" for {span(entry.held_for)}"
    who = owner_text(entry.owner, entry.digest)
    nodes = f"{of_nodes(entry.nodes, entry.total)}{state_of(entry)}"
    said = [f"{entry.kind}{entry.place}: {who},{since} on {nodes}"]
    if agree(entry.ttls) and not entry.leaked:
        said[0] += f", {_left(min(t for t in entry.ttls if t is not None))}"
    else:
        for ttl, look in zip(entry.ttls, seen.looks, strict=True):
            left = _left(ttl) if look.reachable else f"does not answer: {look.error}"
            said.append(f"    {look.name}  {left}")
    for rival in entry.rivals:
        there = zip(rival.ttls, seen.looks, strict=True)
        on = ", ".join(look.name for ttl, look in there if ttl is not None)
        said.append(f"  but {owner_text(rival.owner, rival.digest)} on {on}")
    return said


def start_lines(entries: Iterable[Entry], most: int | None = None, pace: str = "") -> list[str]:
    """Return one line about the starts that a rate counts; an empty list if there are none.

    Args:
        entries: All entries of a key.
        most: Starts allowed per window, if known.
        pace: The text of the rate, if known.
    """
    left = [
        sorted((t for t in entry.ttls if t is not None), reverse=True)[entry.quorum - 1]
        for entry in entries
        if entry.kind == "start" and entry.held
    ]
    if not left:
        return []
    of = f" of {most}" if most is not None else ""
    said = f"starts: {len(left)}{of} are counted" + (f" by {pace}" if pace else "")
    what = "the next may be" if most is not None and len(left) >= most else "one more is free"
    at = time.strftime("%H:%M:%S", time.localtime(time.time() + min(left)))
    return [f"{said}; {what} in {min(left):.1f} s, at {at}"]


def agree(ttls: Sequence[float | None]) -> bool:
    """Return True if all nodes have the key, with about the same ttl left."""
    left = [ttl for ttl in ttls if ttl is not None]
    return len(left) == len(ttls) and (len({*left}) == 1 or max(left) - min(left) < AGREE_S)


def _left(ttl: float | None) -> str:
    if ttl is None:
        return "not there"
    return "has no ttl: it never expires" if ttl == math.inf else f"{ttl:.1f} s left"


def ttl_text(ttl: float | None) -> str:
    """Return a ttl on one node as a short text; `-` where the key is missing."""
    if ttl is None:
        return "-"
    return "never" if ttl == math.inf else f"{ttl:.0f}" if ttl >= 10 else f"{ttl:.1f}"


def wait_lines(waits: Iterable[Mapping[str, Any]], unasked: str) -> list[str]:
    """Return a line for each task that waits in a worker; last `unasked`, unless it is empty."""
    said = [
        f"  waits {span(wait['waited'])} in {wait['worker']}"
        f" ({'in a pool slot' if wait.get('where') == 'slot' else 'parked'}):"
        f" {wait.get('task')} {wait.get('task_id')}{_next(wait)}"
        for wait in waits
    ]
    return said + ([f"  ({unasked})"] if unasked else [])


def _next(wait: Mapping[str, Any]) -> str:
    """Return when a task that waits for its rate may start, if its worker has reported it."""
    seconds = wait.get("next_in")
    known = isinstance(seconds, (int, float)) and 0 <= seconds < MAX_WAITED_S
    return f", by its rate; the next may start in {seconds:.1f} s" if known else ""


def without_quorum(error: QuorumUnavailable, answering: Collection[str] = ()) -> list[str]:
    """Return the error's text, and a line for each node.

    Args:
        error: The error.
        answering: Names of nodes that are known to answer, although their vote does not count.
    """
    votes = ", ".join(map(str, error.votes))
    said = [str(error).removesuffix(votes).removesuffix(": ")]
    for vote in error.votes:
        answer = "answers"
        if vote.vote is Vote.SILENT:
            answers = vote.node in answering or "has no vote" in vote.detail
            what = "answers, but has no vote" if answers else "does not answer"
            answer = f"{what}: {vote.detail}"
        answer = "was not waited for" if vote.detail == NOT_WAITED_FOR else answer
        said.append(f"node {vote.node} {answer}")
    return said


def lines(*parts: str) -> str:
    """Return lines of untrusted text, made printable."""
    return "\n".join(map(printable, parts))


def print_unreachable(seen: Survey) -> None:
    """Print the nodes that did not answer to stderr."""
    for look in seen.looks:
        if not look.reachable:
            click.echo(printable(f"node {look.name} does not answer: {look.error}"), err=True)


# -- Tables ----------------------------------------------------------------------------------------


def padded(line: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line of a table, with each cell padded or cut to its column's width."""
    fitted = ((cut(cell, width), width) for cell, width in zip(line, widths, strict=True))
    return COLUMN_GAP.join(cell + " " * (width - cells(cell)) for cell, width in fitted).rstrip()


def cells(text: str) -> int:
    """Return the width of a text in terminal columns."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )


def cut(text: str, width: int) -> str:
    """Return a text cut to at most `width` columns, by leaving out its middle."""
    if cells(text) <= width:
        return text
    if width < 5:
        return text[:width] if text.isascii() else ""
    head, tail = text, text
    while cells(head) > (width - 2) - (width - 2) // 3:
        head = head[:-1]
    while cells(tail) > (width - 2) // 3:
        tail = tail[1:]
    return f"{head}..{tail}"
