"""Release by force exactly the token that an operator has seen.

Each node compares the token and deletes it. An `Entry` names the token by its digest and its owner;
the token itself is read from the nodes again, used, and never shown.
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
from ..protocol.texts import are_needed, of_nodes
from ..protocol.values import Owner, quorum_of, token_digest
from ..stores.reading import KeyValue, to_bytes
from .models import Entry, NodeLook
from .reader import read_nodes

if TYPE_CHECKING:
    from ..locking.redlock import Redlock

__all__ = ["SETTLED_S", "Freed", "force_release", "stop_command"]

SETTLED_S = 2.0
"""Seconds after which an attempt without a quorum has ended, with any node timeout."""
POLL_INTERVAL_S = 0.02
"""Seconds between two reads of a key that another connection deletes: a few round trips."""


@dataclass(frozen=True)
class Freed:
    """The outcome for a key: "freed"; "gone" (it was free already); "changed" (it is not the entry
    that was shown, and was not touched).
    """

    outcome: str
    nodes: int = 0  # the number of nodes on which it was freed
    silent: tuple[str, ...] = ()  # nodes that did not answer: it stays there until its ttl is over
    taken: bool = False  # True if another holder has it already


def force_release(
    redlock: Redlock, entry: Entry, timeout: float = 3.0, *, living: bool = True
) -> Freed:
    """Release the token of `entry` on all nodes, and wake the first waiter as any release does.

    Its holder is not stopped. It finds out that its lease is lost when another has the key; if no
    other has it, the holder's next extension takes the key back.

    Args:
        redlock: The lock whose nodes have the key.
        entry: An entry of a survey or a look. Only its key, digest and owner matter.
        timeout: Seconds to wait for the nodes.
        living: True to free it even if a quorum holds it. If False, the entry must have been seen
            on fewer nodes at least `SETTLED_S` ago, so that it cannot be an acquisition under way.

    Raises:
        QuorumUnavailable: Fewer than a quorum of nodes returned their keys, or freed it.
    """
    looks, tokens = _tokens(redlock, entry, timeout)
    total, needed = len(looks), quorum_of(len(looks))
    silent = tuple(node.name for node in looks if not node.reachable)
    if total - len(silent) < needed:
        raise QuorumUnavailable(
            f"{entry.key}: {of_nodes(total - len(silent), total)} answered the survey;"
            f" {are_needed(needed)}, and nothing was done: {', '.join(silent)} did not answer",
            resource=entry.resource,
        )
    shown = (t for t in tokens if t and token_digest(t) == entry.digest)
    token = next((t for t in shown if Owner.of(t) == entry.owner), None)
    if token is None:
        return Freed("gone" if set(tokens) == {None} else "changed", silent=silent)
    had = {index for index, other in enumerate(tokens) if other == token}
    if len(had) + len(silent) >= needed and not living:
        return Freed("changed", silent=silent)

    claim = Claim(entry.key[len(redlock.prefix) :], token, redlock.ttl, total)
    ballot = redlock.client.driver.run(lambda now: quorum.free(claim, now, timeout))
    until = monotonic() + timeout
    while True:
        looks, tokens = _tokens(redlock, entry, timeout)
        kept = {index for index, other in enumerate(tokens) if other == token}
        if not kept or monotonic() > until:
            break
        sleep(POLL_INTERVAL_S)  # the release may still be on its way, over another connection

    reached = {index for index, node in enumerate(looks) if node.reachable}
    rest = tuple(node.name for n, node in enumerate(looks) if n not in reached or n in kept)
    freed = len((had & reached) - kept)
    if not ballot.yes and len(had) >= needed:
        freed = 0  # a quorum no longer had it: released, expired, or followed by another token
    if total - len(rest) < needed:
        raise QuorumUnavailable(
            f"{entry.key}: freed on {of_nodes(freed, total)}; {', '.join(rest)} did not free it,"
            " because they did not answer or the user lacks the right; there it stays until its"
            " ttl is over",
            resource=entry.resource,
        )
    taken = max(Counter(t for t in tokens if t is not None).values(), default=0) >= needed
    if not freed:
        return Freed("changed" if taken else "gone", silent=rest)
    return Freed("freed", freed, rest, taken)


def stop_command(task_id: str) -> str:
    """Return the shell command that stops a task; empty if the id could be taken for an option.

    Whoever may write to the nodes chooses the id, so it is quoted as one word.
    """
    if not task_id or task_id.startswith("-"):
        return ""
    return f"celery -A APP control terminate TERM {shlex.quote(task_id)}"


def _tokens(
    redlock: Redlock, entry: Entry, timeout: float
) -> tuple[list[NodeLook], list[str | None]]:
    """Return the token of each node under the entry's key; "" if the value can be no token."""
    keys = {entry.key: to_bytes(entry.key)}
    looks, found = read_nodes(
        redlock.client.addresses, redlock.prefix, lambda reader: reader.values(keys), timeout
    )
    return looks, [_token_of(entry, one[entry.key]) if one else None for one in found]


def _token_of(entry: Entry, found: KeyValue) -> str | None:
    """Return the token under a key; of several readers' tokens the entry's own, if it is there."""
    tokens = [_token(token) for token in (found.value, *(token for token, _ in found.readers))]
    others = None if entry.shared and found.readers else tokens[0]  # other readers' tokens stay
    return next((token for token in tokens if token_digest(token) == entry.digest), others)


def _token(value: bytes) -> str:
    try:
        return value.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return ""
