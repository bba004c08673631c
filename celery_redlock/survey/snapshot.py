"""What is locked, as the nodes tell: all of it, or all that is known of one resource.

A snapshot, put together from nodes that were asked at slightly different moments: what was being
acquired or released meanwhile may look split. No decision of a lock hangs on it.
"""

from __future__ import annotations

import fnmatch
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.checks import MAX_SLOTS
from ..protocol.commands import (
    DONE,
    FENCE_SUFFIX,
    LINE_SUFFIX,
    MARK_SUFFIX,
    RESERVED_SUFFIX,
    SLOT_SUFFIX,
    base_of,
)
from ..protocol.errors import QuorumUnavailable
from ..protocol.names import mark_of
from ..protocol.values import NodeVote, Owner, Vote, quorum_of, token_digest
from .models import KINDS, Entry, NodeLook, Rival, Survey
from .reader import FOREIGN, Line, Reader, Seen, visit

if TYPE_CHECKING:
    from ..locking.redlock import Redlock

__all__ = [
    "KINDS",
    "Entry",
    "NodeLook",
    "Rival",
    "Survey",
    "look",
    "look_at",
    "resource_of",
    "survey",
]

_SUFFIXES = {
    FENCE_SUFFIX: "fence",
    RESERVED_SUFFIX: "reservation",
    MARK_SUFFIX: "mark",
    LINE_SUFFIX: "line",
}
_SPECIAL = re.compile(r"[\\*?\[]")
_NONCE = re.compile(r"nonce:[0-9a-f]{32}\Z")
"""A node's, from a handshake (`handshake.py`): gone in a minute, and nobody's lock."""
_SECONDS = re.compile(r"\d{1,12}\.\d{3}\Z")
"""What a beat writes where a delivery has its stamp."""
_FORBIDDEN = re.compile("permission|can't run this command")
"""What servers say of a right that is missing; the second within scripts, Redis 7."""
IN_LINE = 100
"""How many of a line are read, of one resource."""


class _Name(NamedTuple):
    resource: str
    kind: str
    slot: int


class _Haul(NamedTuple):
    """What was brought from one node, by name without the prefix."""

    seen: dict[str, Seen]
    lines: dict[str, Line]


def survey(
    redlock: Redlock,
    match: str = "*",
    *,
    kinds: Collection[str] = ("lock", "reservation"),
    timeout: float = 3.0,
) -> Survey:
    """All that lies on the nodes below the prefix.

    Args:
        redlock: Whose nodes and prefix.
        match: Which resources, as a glob (`*`, `?`, `[a-z]`, `[^a-z]`, a backslash before one
            that is meant) over their whole names.
        kinds: Which of `KINDS`.
        timeout: Seconds without an answer after which a node counts as away.

    Raises:
        ValueError: There is no such kind.
        QuorumUnavailable: Fewer than a quorum of nodes told all they have.
    """
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"no kind of entry: {sorted(unknown)}; there are {', '.join(KINDS)}")
    wanted = frozenset(kinds)
    special = _SPECIAL.search(match)
    head = match[: special.start()] if special else match
    fits = re.compile(fnmatch.translate(_as_fnmatch(match))).match

    def errand(reader: Reader) -> _Haul:
        keys = reader.scan(redlock.prefix, head)
        values: dict[str, bytes] = {}
        lines: dict[str, bytes] = {}
        beside: set[str] = set()
        key: bytes | None
        for name, key in keys.items():
            resource, kind, _slot = _parse(name)
            if not fits(resource) or _NONCE.match(name):
                continue
            if wanted & _may_be(kind):
                values[name] = key
                if kind == "line":
                    lines[name] = key
                elif kind == "lock":
                    beside.add(resource)
        for resource in beside:
            for suffix, where in ((FENCE_SUFFIX, values), (LINE_SUFFIX, lines)):
                if (key := keys.get(resource + suffix)) is not None:
                    where[resource + suffix] = key
        return _Haul(reader.read(values), reader.lines(lines, 1))

    return _merge(redlock, errand, timeout, wanted)


def look(redlock: Redlock, resource: str, timeout: float = 3.0) -> tuple[Entry, ...]:
    """All that is known of one resource; nothing if nothing is.

    Args:
        redlock: Whose nodes and prefix.
        resource: Its name, without prefix and suffix.
        timeout: Seconds without an answer after which a node counts as away.

    Raises:
        QuorumUnavailable: Fewer than a quorum of nodes told all they have.
    """
    return look_at(redlock, resource, timeout).entries


def look_at(redlock: Redlock, resource: str, timeout: float = 3.0) -> Survey:
    """The same, with how each node answered."""
    slots = [f"{resource}{SLOT_SUFFIX}{number}" for number in range(2, MAX_SLOTS + 1)]
    others = [resource + suffix for suffix in _SUFFIXES]
    keys = {name: _key(redlock, name) for name in (resource, *others, *slots)}

    def errand(reader: Reader) -> _Haul:
        seen = reader.read(keys)
        line = resource + LINE_SUFFIX
        lines = reader.lines({line: keys[line]} if line in seen else {}, IN_LINE)
        # A mark bears the id of the task that is done, and of what it had locked only a digest: of
        # one that locks more than this, `survey` finds it.
        owners = (Owner.of(_token(found.value)) for found in seen.values())
        marks = {mark_of(owner, (resource,)) for owner in owners if owner and owner.task_id}
        seen.update(reader.read({name: _key(redlock, name) for name in sorted(marks)}))
        return _Haul(seen, lines)

    return _merge(redlock, errand, timeout, frozenset(KINDS))


def resource_of(redlock: Redlock, key: str) -> str:
    """The resource that somebody means by a key, with or without prefix and suffix."""
    name = key[len(redlock.prefix) :] if key.startswith(redlock.prefix) else key
    return _parse(name).resource or name


def _merge(redlock: Redlock, errand: Any, timeout: float, wanted: frozenset[str]) -> Survey:
    """Send the errand to all nodes and put together what it brings.

    Raises:
        QuorumUnavailable: It came back from fewer than a quorum.
    """
    at = time.time()
    looks, brought = visit(redlock.client.addresses, redlock.prefix, errand, timeout)
    hauls: list[_Haul] = [haul or _Haul({}, {}) for haul in brought]
    reached = sum(node.reachable for node in looks)
    quorum = quorum_of(len(looks))
    if reached < quorum:
        forbidden = any(_FORBIDDEN.search(node.error) for node in looks)
        hint = "; docs/cli.md has the ACL rule for whoever looks" if forbidden else ""
        votes = [
            NodeVote(node.name, Vote.YES if node.reachable else Vote.SILENT, node.error)
            for node in looks
        ]
        raise QuorumUnavailable(
            f"{reached} of {len(looks)} nodes told what they have; {quorum} are needed: "
            + ", ".join(f"{node.name} {node.error or 'answered'}" for node in looks)
            + hint,
            votes=votes,
        )
    names = {name for haul in hauls for name in (*haul.seen, *haul.lines)}
    entries = []
    for name in names:
        entry = _entry(name, names, hauls, redlock.prefix, quorum, at)
        if entry is not None and entry.kind in wanted:
            entries.append(entry)
    entries.sort(key=lambda entry: (entry.resource, KINDS.index(entry.kind), entry.slot))
    return Survey(tuple(entries), tuple(looks), at)


def _entry(
    name: str, names: set[str], hauls: Sequence[_Haul], prefix: str, quorum: int, at: float
) -> Entry | None:
    """What the nodes have under one name."""
    resource, kind, slot = _parse(name)
    total = len(hauls)
    line: tuple[int, tuple[float, ...]] = (0, ())
    if (its_line := resource + LINE_SUFFIX) in names:
        line = _waiting([haul.lines.get(its_line) for haul in hauls], quorum, at)
    found = [haul.lines.get(name) or haul.seen.get(name) for haul in hauls]
    ttls_of: dict[bytes, list[float | None]] = {}
    for node, one in enumerate(found):
        if one is not None:
            value = one.value if isinstance(one, Seen) else b"line"
            ttls_of.setdefault(value, [None] * total)[node] = one.left
    if not ttls_of:
        return None
    fence = None
    if kind == "fence":  # each node has one of its own; the largest counts
        fence = _fence(hauls, name)
        ttls_of = _as_one(ttls_of, lambda value: value.isdigit())
    elif kind == "lock" and (its_fence := resource + FENCE_SUFFIX) in names:
        fence = _fence(hauls, its_fence)
    values = list(ttls_of)
    if len(values) > 1:
        values.sort(key=lambda value: -_count(ttls_of[value]))
    top = values[0]
    owner = Owner.of(_token(top))
    known = {"fence": top.isdigit(), "mark": top == DONE.encode(), "line": top == b"line"}
    held_for = max(0.0, at - owner.since) if owner is not None and owner.since else None
    if not known.get(kind, owner is not None):
        kind, held_for = "foreign", None
    elif kind == "lock" and name.startswith("beat:") and owner is not None:
        kind = "tick" if not owner.task_id and _SECONDS.match(owner.stamp) else kind
    elif kind == "line":
        held_for = line[1][0] if line[1] else None
    waiting, waits = line if kind in ("lock", "line", "foreign") else (0, ())
    secret = kind not in ("fence", "mark", "line")
    return Entry(
        resource,
        prefix + name,
        kind,
        slot,
        owner if secret else None,
        _digest(top) if secret else "",
        tuple(ttls_of[top]),
        _count(ttls_of[top]),
        total,
        quorum,
        held_for,
        fence,
        waiting,
        waits,
        tuple(Rival(Owner.of(_token(v)), _digest(v), tuple(ttls_of[v])) for v in values[1:]),
    )


def _waiting(lines: Sequence[Line | None], quorum: int, at: float) -> tuple[int, tuple[float, ...]]:
    """How many wait, as a quorum of nodes has it, and for how long the first do."""
    counts = sorted((line.total for line in lines if line is not None), reverse=True)
    count = counts[quorum - 1] if len(counts) >= quorum else 0
    since: dict[bytes, float] = {}
    for line in lines:
        for member, score in line.first if line is not None else ():
            since[member] = min(score, since.get(member, score))
    # A score may be anything, infinite too: nobody has waited since before 1970.
    waits = sorted((min(max(0.0, at - score / 1e6), at) for score in since.values()), reverse=True)
    most = max((len(line.first) for line in lines if line is not None), default=0)
    return count, tuple(waits[: min(count, most)])


def _fence(hauls: Iterable[_Haul], name: str) -> int | None:
    """The largest fencing token that a node has."""
    seen = (haul.seen.get(name) for haul in hauls)
    values = [one.value for one in seen if one is not None]
    return max((int(v) for v in values if v.isdigit() and len(v) < 20), default=None)


def _as_one(ttls_of: Mapping[bytes, list[float | None]], alike: Any) -> dict[bytes, Any]:
    """Values that differ from node to node and mean no split: under the first of them."""
    first = next((value for value in ttls_of if alike(value)), None)
    if first is None:
        return dict(ttls_of)
    one: list[float | None] = list(ttls_of[first])
    rest = {}
    for value, ttls in ttls_of.items():
        if not alike(value):
            rest[value] = ttls
        else:
            one = [new if new is not None else old for new, old in zip(ttls, one, strict=True)]
    return {first: one, **rest}


def _parse(name: str) -> _Name:
    """What a key is, by its end."""
    for suffix, kind in _SUFFIXES.items():
        if name.endswith(suffix) and len(name) > len(suffix):
            return _Name(name[: -len(suffix)], kind, 1)
    base = base_of(name)
    if base and base != name:
        return _Name(base, "lock", int(name[len(base) + len(SLOT_SUFFIX) :][:9]))
    return _Name(name, "lock", 1)


def _may_be(kind: str) -> set[str]:
    """What may turn out to be what a name says."""
    return {kind, "foreign", "tick"} if kind == "lock" else {kind, "foreign"}


def _as_fnmatch(match: str) -> str:
    """A glob of Redis as one of Python, which knows no backslash, and says ! for ^."""
    match = re.sub(r"\\(.)", lambda found: f"[{found[1]}]", match, flags=re.S)
    return match.replace("[^", "[!")


def _key(redlock: Redlock, name: str) -> bytes:
    return (redlock.prefix + name).encode("utf-8", "surrogatepass")


def _token(value: bytes) -> str:
    if value == FOREIGN:
        return ""
    try:
        return value.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return value.decode("utf-8", "surrogateescape")


def _digest(value: bytes) -> str:
    return token_digest(_token(value)) if value != FOREIGN else ""


def _count(ttls: Iterable[float | None]) -> int:
    return sum(left is not None for left in ttls)
