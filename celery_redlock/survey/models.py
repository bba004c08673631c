"""Results of a survey: values, and their form as JSON data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..locking.pauses import Pause
from ..protocol.values import Owner

__all__ = ["KINDS", "Entry", "NodeLook", "Rival", "Survey"]

KINDS = ("lock", "start", "reservation", "tick", "mark", "fence", "line", "foreign")
"""Kinds of keys on nodes: locks, starts that a rate counts, reservations of published tasks, a
beat's claims on ticks, marks of tasks that are done, the last fencing tokens, wait queues, and
values that are not of this library."""


@dataclass(frozen=True)
class NodeLook:
    """The answer of one node.

    Attributes:
        name: Its address, without credentials.
        reachable: True if it returned all that it was asked for.
        error: The reason if it did not; else empty.
        rtt: Seconds from a small request to its answer; NaN if it did not answer.
    """

    name: str
    reachable: bool
    error: str = ""
    rtt: float = math.nan

    def data(self) -> dict[str, Any]:
        """Return it as JSON data: None instead of NaN, which JSON lacks."""
        return {**vars(self), "rtt": None if math.isnan(self.rtt) else self.rtt}


@dataclass(frozen=True)
class Rival:
    """A token that fewer nodes hold than another token under the same key.

    Attributes:
        owner: The owner in the token; None if this library did not make it.
        digest: A short name of the token.
        ttls: Per node, seconds left; None on a node that does not have it.
    """

    owner: Owner | None
    digest: str
    ttls: tuple[float | None, ...]


@dataclass(frozen=True)
class Entry:
    """One key, as all nodes together have it.

    Attributes:
        resource: The name, without prefix and suffix.
        key: The whole key.
        kind: One of `KINDS`.
        slot: Number of the slot, of a key with several holders or starts; else 1. For a reader, its
            rank by age, from 1: it changes as other readers come and end.
        owner: Owner of the token that most nodes hold: task, task id, host, pid, since when.
        digest: A short name of that token, safe to show; empty if there is no token.
        ttls: Per node, its seconds left; None on a node without it, infinite without a ttl.
        nodes: Number of nodes that hold it.
        total: Number of all nodes.
        quorum: Number of nodes that a lock needs.
        held_for: Seconds since its owner asked for it, by two wall clocks; for a wait queue, the
            seconds that its first waiter has waited. None if not known.
        fence: The fencing token that was granted last; None if there is none.
        waiting: Number of waiters in the resource's queue.
        waits: Seconds that the first of them have waited; in a survey of all keys, of one of them.
        rivals: Other tokens under the same key on other nodes.
    """

    resource: str
    key: str
    kind: str
    slot: int
    owner: Owner | None
    digest: str
    ttls: tuple[float | None, ...]
    nodes: int
    total: int
    quorum: int
    held_for: float | None = None
    fence: int | None = None
    waiting: int = 0
    waits: tuple[float, ...] = ()
    rivals: tuple[Rival, ...] = ()

    @property
    def shared(self) -> bool:
        """True for a reader. Others may have the key at the same time, so its digest names it."""
        return self.owner is not None and self.owner.shared

    @property
    def identity(self) -> tuple[str, str]:
        """The name that identifies it across surveys: its key; for a reader, its token as well."""
        return self.key, self.digest if self.shared else ""

    @property
    def place(self) -> str:
        """The slot or the reader, for people; empty if there is only one."""
        if self.shared:
            return f" reader {self.digest}"
        return f" slot {self.slot}" if self.slot > 1 else ""

    @property
    def held(self) -> bool:
        """True if a quorum of nodes has it."""
        return self.nodes >= self.quorum

    @property
    def split(self) -> bool:
        """True if the nodes have different tokens, none of which has a quorum."""
        return bool(self.rivals) and not self.held

    @property
    def leaked(self) -> bool:
        """True if a node has it without a ttl, so that it never expires there."""
        return any(math.inf in ttls for ttls in (self.ttls, *(r.ttls for r in self.rivals)))

    @property
    def endless(self) -> bool:
        """True if it has a ttl on no node, so that it cannot be a lock of this library."""
        return all(ttl in (None, math.inf) for ttl in self.ttls)

    def leaked_on(self, node: int) -> bool:
        """Return True if the node of this index has it without a ttl."""
        return any(ttls[node] == math.inf for ttls in (self.ttls, *(r.ttls for r in self.rivals)))

    def data(self) -> dict[str, Any]:
        """Return it as JSON data, without secrets; docs/cli.md documents the shape.

        A ttl of -1 means that the key has none, as in Redis; null that the key is not there.
        """
        return {
            "resource": self.resource,
            "key": self.key,
            "kind": self.kind,
            "slot": self.slot,
            **_owner_data(self.owner, self.digest, self.ttls),
            "nodes": self.nodes,
            "total": self.total,
            "quorum": self.quorum,
            "held": self.held,
            "split": self.split,
            "leaked": self.leaked,
            "held_for": self.held_for,
            "fence": self.fence,
            "waiting": self.waiting,
            "waits": list(self.waits),
            "rivals": [_owner_data(r.owner, r.digest, r.ttls) for r in self.rivals],
        }


@dataclass(frozen=True)
class Survey:
    """The result of a survey.

    Attributes:
        entries: The entries, sorted by resource, kind and slot.
        looks: The answer of each node.
        at: Time of the survey, in seconds since 1970.
        pauses: The pauses in force: all, or those of the one resource that was asked for.
    """

    entries: tuple[Entry, ...]
    looks: tuple[NodeLook, ...]
    at: float
    pauses: tuple[Pause, ...] = ()

    def data(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "at": self.at,
            "nodes": [look.data() for look in self.looks],
            "entries": [entry.data() for entry in self.entries],
            "pauses": [pause.data() for pause in self.pauses],
        }


def _owner_data(owner: Owner | None, digest: str, ttls: Sequence[float | None]) -> dict[str, Any]:
    names = ("task", "task_id", "host", "pid", "since", "shared")
    return {
        **{name: getattr(owner, name, None) for name in names},
        "digest": digest,
        "ttls": [-1.0 if left == math.inf else left for left in ttls],
    }
