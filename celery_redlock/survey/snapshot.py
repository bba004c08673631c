"""Survey of the locks on the nodes: of all keys, or of one resource.

It is a snapshot of nodes that were read at slightly different moments: a lock that was being
acquired or released meanwhile may look split. No decision about a lock depends on it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..locking.pauses import counted
from ..protocol.errors import ConfigurationError, QuorumUnavailable
from ..protocol.names import (
    FENCE_SUFFIX,
    LINE_SUFFIX,
    MARK_SUFFIX,
    MAX_SLOTS,
    PAUSE_NAMES,
    RESERVED_SUFFIX,
    SLOT_SUFFIX,
    START_SUFFIX,
    TRUSTED_KEY,
    base_of,
    mark_of,
    matching,
    plain,
)
from ..protocol.replies import DONE
from ..protocol.texts import are_needed, of_nodes
from ..protocol.values import NodeVote, Owner, Vote, quorum_of, token_digest
from ..stores.kinds import Reader
from ..stores.reading import FOREIGN, QUEUE, KeyValue, to_bytes, to_text
from .models import KINDS, Entry, NodeLook, Rival, Survey
from .reader import read_nodes

if TYPE_CHECKING:
    from ..locking.redlock import Redlock

__all__ = ["KINDS", "Entry", "NodeLook", "Rival", "Survey"]
__all__ += ["look", "look_at", "look_for", "survey"]

NodeData = Mapping[str, KeyValue]
"""The keys of one node, by name without the prefix."""

_SUFFIXES = {
    FENCE_SUFFIX: "fence",
    RESERVED_SUFFIX: "reservation",
    START_SUFFIX: "start",
    MARK_SUFFIX: "mark",
    LINE_SUFFIX: "line",
}
_SPECIAL = re.compile(r"[\\*?\[]")
_NODE_KEY = re.compile(rf"(nonce:[0-9a-f]{{32}}|{TRUSTED_KEY})\Z")
"""Keys that a handshake writes (`handshake.py`): they concern a node, not a lock."""
_SECONDS = re.compile(r"\d{1,12}\.\d{3}\Z")
"""The stamp that a beat writes into a token, where a lock has the stamp of a delivery."""
_FORBIDDEN = re.compile("permission|can't run this command")
"""Errors for a missing right; the second one comes from scripts, from Redis 7 on."""
QUEUE_MEMBERS = 100
"""Members of a wait queue to read, for one resource."""
_ANY_FENCE = b"0"
"""Stands for all fencing tokens. Each node counts by itself: a difference is not a split vote."""


def survey(
    redlock: Redlock,
    match: str = "*",
    *,
    kinds: Collection[str] = ("lock", "reservation"),
    timeout: float = 3.0,
) -> Survey:
    """Return all keys on the nodes below the prefix.

    Args:
        redlock: The lock whose nodes and prefix are surveyed.
        match: The resources to return, as a glob (`*`, `?`, `[a-z]`, `[^a-z]`; a backslash makes
            the next character literal) over their whole names.
        kinds: The kinds to return, of `KINDS`.
        timeout: Seconds without an answer after which a node counts as silent.

    Raises:
        ValueError: A kind is not one of `KINDS`.
        QuorumUnavailable: Fewer than a quorum of nodes returned all their keys.
    """
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"no kind of entry: {sorted(unknown)}; there are {', '.join(KINDS)}")
    wanted = frozenset(kinds)
    head = _SPECIAL.split(match, maxsplit=1)[0]
    fits = matching(match)

    def query(reader: Reader) -> NodeData:
        keys = reader.scan(head)
        read = set()
        for name in keys:
            resource, kind, _slot = _parse(name)
            # By its value, a key named like a lock may turn out to be a tick, and any key foreign.
            may_be = {kind, "foreign", *(("tick",) if kind == "lock" else ())}
            if (
                fits(resource)
                and name not in PAUSE_NAMES
                and not _NODE_KEY.match(name)
                and wanted & may_be
            ):
                read.add(name)
                if kind == "lock":  # an entry of a lock also shows these two
                    read |= {resource + FENCE_SUFFIX, resource + LINE_SUFFIX}
        wanted_keys = {name: keys[name] for name in read & keys.keys()}
        return _read(reader, {**wanted_keys, **_keys(redlock, PAUSE_NAMES)}, 1)

    return _survey(redlock, query, timeout, wanted)


def look(redlock: Redlock, resource: str, timeout: float = 3.0) -> tuple[Entry, ...]:
    """Return everything known about one resource; an empty tuple if nothing is.

    Args:
        redlock: The lock whose nodes and prefix are read.
        resource: Its name, without prefix and suffix.
        timeout: Seconds without an answer after which a node counts as silent.

    Raises:
        QuorumUnavailable: Fewer than a quorum of nodes returned all its keys.
    """
    return look_at(redlock, resource, timeout).entries


def look_at(redlock: Redlock, resource: str, timeout: float = 3.0) -> Survey:
    """Return the same as `look`, with the answer of each node."""
    numbers, bases = range(2, MAX_SLOTS + 1), (resource, resource + START_SUFFIX)
    slots = [f"{base}{SLOT_SUFFIX}{number}" for base in bases for number in numbers]
    others = [resource + suffix for suffix in _SUFFIXES]

    def query(reader: Reader) -> NodeData:
        every = _keys(redlock, [resource, *others, *slots, *PAUSE_NAMES])
        found = _read(reader, every, QUEUE_MEMBERS)
        # A mark has the id of the task that is done, but only a digest of the resources it had
        # locked. So marks of tasks that lock several resources are found by `survey` alone.
        owners = (_owner_of(one.value) for one in found.values())
        marks = {mark_of(owner, (resource,)) for owner in owners if owner and owner.task_id}
        return found | reader.values(_keys(redlock, sorted(marks)))

    found = _survey(redlock, query, timeout, frozenset(KINDS))
    return replace(found, pauses=tuple(p for p in found.pauses if p.fits(resource)))


def _keys(redlock: Redlock, names: Iterable[str]) -> dict[str, bytes]:
    return {name: to_bytes(redlock.prefix + name) for name in names}


def look_for(redlock: Redlock, key: str, timeout: float = 3.0) -> tuple[str, Survey]:
    """Return the resource of a key, given with or without the prefix, and its survey by `look_at`.

    Raises:
        ConfigurationError: There are entries both for the name with the prefix and without.
        QuorumUnavailable: `look_at` raised it.
    """
    bare = key.removeprefix(redlock.prefix)
    names = dict.fromkeys(_parse(name)[0] or name for name in (bare, key))
    seen = {name: look_at(redlock, name, timeout) for name in names}
    known = [name for name, look in seen.items() if look.entries]
    if len(known) > 1:
        raise ConfigurationError(
            f"{key!r} may be the key of {bare!r}, or a name that begins like the prefix, and both"
            f" are known: write {bare!r} for the one, {redlock.prefix + key!r} for the other"
        )
    resource = (*known, *seen)[0]
    return resource, seen[resource]


def _read(reader: Reader, keys: Mapping[str, bytes], members: int) -> dict[str, KeyValue]:
    found = reader.values(keys)
    queues = {name: keys[name] for name in found if name.endswith(LINE_SUFFIX)}
    rest = {name: value for name, value in found.items() if name not in queues}
    if reader.by_script:  # it cannot read the queues: return the rest without them
        return rest
    return rest | reader.queues(queues, members)


def _survey(
    redlock: Redlock, query: Callable[[Reader], NodeData], timeout: float, wanted: Collection[str]
) -> Survey:
    """Run a query at all nodes and merge their keys.

    Raises:
        QuorumUnavailable: Fewer than a quorum of nodes returned their keys.
    """
    at = time.time()
    looks, results = read_nodes(redlock.client.addresses, redlock.prefix, query, timeout)
    reached, quorum = sum(node.reachable for node in looks), quorum_of(len(looks))
    if reached < quorum:
        forbidden = any(_FORBIDDEN.search(node.error) for node in looks)
        hint = "; docs/cli.md has the ACL of users who only read" if forbidden else ""
        said = f"{of_nodes(reached, len(looks))} answered; {are_needed(quorum)}{hint}: "
        votes = [
            NodeVote(node.name, Vote.YES if node.reachable else Vote.SILENT, node.error)
            for node in looks
        ]
        raise QuorumUnavailable(said + ", ".join(map(str, votes)), votes=votes)
    nodes: list[NodeData] = [data or {} for data in results]
    names = {name for data in nodes for name in data}.difference(PAUSE_NAMES)
    entries = [one for name in names for one in _entries(name, nodes, redlock.prefix, at)]
    entries = [entry for entry in entries if entry.kind in wanted]
    entries.sort(key=lambda entry: (entry.resource, KINDS.index(entry.kind), entry.slot))
    answers = [data for data in results if data is not None]
    there = {name: [_text_and_ttl(data.get(name)) for data in answers] for name in PAUSE_NAMES}
    return Survey(tuple(entries), tuple(looks), at, counted(there, quorum))


def _entries(name: str, nodes: Sequence[NodeData], prefix: str, at: float) -> Iterator[Entry]:
    """Yield the entries under one name: each reader is one, with its rank by age as slot."""
    found = [data.get(name) for data in nodes]
    readers = [{} if one is None else dict(one.readers) for one in found]

    def since(token: bytes) -> tuple[float, bytes]:
        owner = _owner_of(token)
        return (owner.since if owner else 0.0), token

    for slot, token in enumerate(sorted({t for of in readers for t in of}, key=since), 1):
        one_s = [KeyValue(token, of[token]) if token in of else None for of in readers]
        yield replace(_entry(name, one_s, nodes, prefix, at), slot=slot)
    others = [None if of else one for one, of in zip(found, readers, strict=True)]
    if any(others):
        yield _entry(name, others, nodes, prefix, at)


def _text_and_ttl(found: KeyValue | None) -> tuple[str, float] | None:
    return None if found is None else (to_text(found.value), found.left)


def _entry(
    name: str,
    there: Sequence[KeyValue | None],
    nodes: Sequence[NodeData],
    prefix: str,
    at: float,
) -> Entry:
    """Return the entry of a name; `there` has the value under it on each node."""
    total, quorum = len(nodes), quorum_of(len(nodes))
    resource, kind, slot = _parse(name)
    ttls_of: dict[bytes, list[float | None]] = {}
    for index, found in enumerate(there):
        if found is not None:
            is_fence = kind == "fence" and found.value.isdigit()
            value = _ANY_FENCE if is_fence else found.value
            ttls_of.setdefault(value, [None] * total)[index] = found.left
    (top, ttls), *others = sorted(ttls_of.items(), key=lambda item: -_count(item[1]))
    owner = _owner_of(top)
    held_for = max(0.0, at - owner.since) if owner is not None and owner.since else None
    waiting, waits = _waiting([data.get(resource + LINE_SUFFIX) for data in nodes], quorum, at)
    fences = [data.get(resource + FENCE_SUFFIX) for data in nodes]
    fence = _last_fence(fences) if kind in ("fence", "lock") and slot == 1 else None
    kind = _kind_of(kind, name, top, owner)
    if kind == "foreign":
        held_for = None
    elif kind == "line":
        held_for = waits[0] if waits else None
    elif kind != "lock":
        waiting, waits = 0, ()
    has_token = kind not in ("fence", "mark", "line")
    return Entry(
        resource=resource,
        key=prefix + name,
        kind=kind,
        slot=slot,
        owner=owner if has_token else None,
        digest=_digest(top) if has_token else "",
        ttls=tuple(ttls),
        nodes=_count(ttls),
        total=total,
        quorum=quorum,
        held_for=held_for,
        fence=fence,
        waiting=waiting,
        waits=waits,
        rivals=tuple(Rival(_owner_of(v), _digest(v), tuple(left)) for v, left in others),
    )


def _kind_of(kind: str, name: str, value: bytes, owner: Owner | None) -> str:
    """Return the kind of a key, from the kind that its name suggests and from its value."""
    ours = {"fence": value.isdigit(), "mark": value == DONE.encode(), "line": value == QUEUE}
    if not ours.get(kind, owner is not None):
        return "foreign"
    if kind == "lock" and name.startswith("beat:") and owner is not None:
        return "tick" if not owner.task_id and _SECONDS.match(owner.stamp) else "lock"
    return kind


def _waiting(
    queues: Iterable[KeyValue | None], quorum: int, at: float
) -> tuple[int, tuple[float, ...]]:
    """Return the number of waiters, by a quorum of nodes, and how long the first have waited."""
    there = [queue for queue in queues if queue is not None and queue.value == QUEUE]
    counts = sorted((queue.waiting for queue in there), reverse=True)
    count = counts[quorum - 1] if len(counts) >= quorum else 0
    since: dict[bytes, float] = {}
    for queue in there:
        for member, score in queue.first:
            since[member] = min(score, since.get(member, score))
    # A score may be anything, also infinite: count no wait from before 1970.
    waits = sorted((min(max(0.0, at - score / 1e6), at) for score in since.values()), reverse=True)
    read = max((len(queue.first) for queue in there), default=0)
    return count, tuple(waits[: min(count, read)])


def _last_fence(fences: Iterable[KeyValue | None]) -> int | None:
    """Return the largest fencing token that a node has; each node counts by itself."""
    values = [fence.value for fence in fences if fence is not None]
    return max((int(v) for v in values if v.isdigit() and len(v) < 20), default=None)


def _parse(name: str) -> tuple[str, str, int]:
    """Return the resource, the kind and the slot of a key, by its suffix."""
    for suffix, kind in _SUFFIXES.items():
        if name.endswith(suffix) and len(name) > len(suffix):
            return plain(name[: -len(suffix)]) if kind == "line" else name[: -len(suffix)], kind, 1
    base = base_of(name)
    if base and base != name:
        resource, kind, _slot = _parse(base)
        return resource, kind, int(name[len(base) + len(SLOT_SUFFIX) :][:9])
    return name, "lock", 1


def _owner_of(value: bytes) -> Owner | None:
    return Owner.of(to_text(value))


def _digest(value: bytes) -> str:
    return token_digest(to_text(value)) if value != FOREIGN else ""


def _count(ttls: Iterable[float | None]) -> int:
    return sum(left is not None for left in ttls)
