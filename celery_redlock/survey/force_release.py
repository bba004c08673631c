"""Frees what an operator has seen, and nothing else.

By compare-and-delete of the very token that was shown. An `Entry` names it by its digest and its
owner; the token itself is read from the nodes again, used, and never shown.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from time import monotonic, sleep
from typing import TYPE_CHECKING

from ..protocol import quorum
from ..protocol.claim import Claim
from ..protocol.errors import QuorumUnavailable
from ..protocol.round import Round
from ..protocol.values import Owner, quorum_of, token_digest
from .models import Entry
from .reader import NodeLook, Reader, Seen, visit

if TYPE_CHECKING:
    from ..locking.redlock import Redlock

__all__ = ["Freed", "free", "stop_command"]


@dataclass(frozen=True)
class Freed:
    """What became of a key that was to be freed.

    Attributes:
        outcome: "freed"; "gone": it was free already; "changed": what is there is not what was
            shown, and was left alone.
        nodes: On how many nodes it was freed.
        silent: The nodes that did not answer; there it stays until its ttl.
        taken: Whether another has it already.
    """

    outcome: str
    nodes: int = 0
    silent: tuple[str, ...] = ()
    taken: bool = False


def free(redlock: Redlock, entry: Entry, timeout: float = 3.0) -> Freed:
    """Free what `entry` shows, on all nodes; who waits for it is called, as by any release.

    Whoever holds it is not stopped. It learns that its lease is lost when another has the key; if
    none has, its next extension takes the key back.

    Args:
        redlock: Where.
        entry: Of a survey or a look. Only its key, digest and owner matter.
        timeout: Seconds to wait for the nodes.

    Raises:
        QuorumUnavailable: Fewer than a quorum of nodes told what they have, or freed it.
    """
    looks, values = _look(redlock, entry, timeout)
    silent = tuple(node.name for node in looks if not node.reachable)
    total, needed = len(looks), quorum_of(len(looks))
    if total - len(silent) < needed:
        raise QuorumUnavailable(
            f"{entry.key}: {total - len(silent)} of {total} nodes told what they have; {needed} are"
            f" needed, and nothing was done: {', '.join(silent)} did not",
            resource=entry.resource,
        )
    tokens = Counter(value for value in values if value is not None)
    shown = [value for value in tokens if _is_shown(entry, value)]
    if not shown:
        return Freed("changed" if tokens else "gone", silent=silent)
    had = {n for n, value in enumerate(values) if value == shown[0]}
    ballot = _free(redlock, entry, shown[0], timeout)
    until = monotonic() + timeout
    while True:
        looks, values = _look(redlock, entry, timeout)
        kept = {n for n, value in enumerate(values) if value == shown[0]}
        if not kept or monotonic() > until:
            break
        sleep(0.02)  # it is on its way there, over another connection
    reached = {n for n, node in enumerate(looks) if node.reachable}
    rest = tuple(node.name for n, node in enumerate(looks) if n not in reached or n in kept)
    freed = len((had & reached) - kept)
    if not ballot.yes and len(had) >= needed:
        freed = 0  # a quorum says that it was not there any more: given back, expired, followed
    if total - len(rest) < needed:
        raise QuorumUnavailable(
            f"{entry.key}: freed on {freed} of {total} nodes; {', '.join(rest)} did not free it,"
            " for want of an answer or of the right to; there it stays until its ttl is over",
            resource=entry.resource,
        )
    others = Counter(value for value in values if value is not None)
    taken = max(others.values(), default=0) >= needed
    if not freed:
        return Freed("changed" if taken else "gone", silent=rest)
    return Freed("freed", freed, rest, taken)


def stop_command(task_id: str) -> str:
    """Return the shell command that stops a task; empty for an id that could be an option of it.

    The id lies on the nodes, where anybody who may write there has put it: as one word, whatever
    stands in it.
    """
    if not task_id or task_id.startswith("-"):
        return ""
    return f"celery -A APP control terminate TERM {shlex.quote(task_id)}"


def _look(
    redlock: Redlock, entry: Entry, timeout: float
) -> tuple[list[NodeLook], list[str | None]]:
    """What each node has under the entry's key."""
    key = entry.key.encode("utf-8", "surrogatepass")

    def errand(reader: Reader) -> dict[str, Seen]:
        return reader.read({entry.key: key})

    looks, found = visit(redlock.client.addresses, redlock.prefix, errand, timeout)
    seen = [one.get(entry.key) if one is not None else None for one in found]
    return looks, [None if one is None else _text(one.value) for one in seen]


def _text(value: bytes) -> str:
    try:
        return value.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return ""  # a claim cannot have it


def _is_shown(entry: Entry, value: str) -> bool:
    # An empty one stands for what cannot be compared: a key of another type.
    return bool(value) and token_digest(value) == entry.digest and Owner.of(value) == entry.owner


def _free(redlock: Redlock, entry: Entry, token: str, timeout: float) -> Round:
    name = entry.key[len(redlock.prefix) :]
    claim = Claim(name, token, redlock.ttl, len(redlock.client.addresses))
    return redlock.client.driver.run(lambda now: quorum.free(claim, now, timeout))
