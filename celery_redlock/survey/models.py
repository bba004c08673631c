"""What a survey of the nodes finds: values, and how they look to a program that reads JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..locking.pauses import Pause
from ..protocol.values import Owner

__all__ = ["KINDS", "Entry", "NodeLook", "Rival", "Survey"]

KINDS = ("lock", "start", "reservation", "tick", "mark", "fence", "line", "foreign")
"""What nodes keep: locks, starts that a rate counts, reservations of published tasks, a beat's
claims on ticks, marks of tasks that are done, the last fencing tokens, wait queues, and values that
are not of this library."""


@dataclass(frozen=True)
class NodeLook:
    """How one node answered.

    Attributes:
        name: Its address, without credentials.
        reachable: Whether it told all that it was asked for.
        error: Why not; empty if it did.
        rtt: Seconds from a small question to its answer; NaN if it did not answer.
    """

    name: str
    reachable: bool
    error: str = ""
    rtt: float = math.nan

    def data(self) -> dict[str, Any]:
        """Return it as JSON takes it, which has no NaN."""
        return {**vars(self), "rtt": None if math.isnan(self.rtt) else self.rtt}


@dataclass(frozen=True)
class Rival:
    """A token that fewer nodes hold than another under the same key.

    Attributes:
        owner: Who made it; None if that was not this library.
        digest: A short name of it.
        ttls: Per node, seconds left; None where it is not.
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
        slot: Which of several holders' or starts; 1 unless there are several. Of a reader, how
            many are older, and one: it changes as others come and end.
        owner: Whose the token is that most nodes hold: task, task id, host, pid, since when.
        digest: A short name of that token, safe to show; empty where there is none.
        ttls: Per node, seconds left of it; None where it is not there, infinite without a ttl.
        nodes: How many nodes hold it.
        total: How many nodes there are.
        quorum: How many a lock needs.
        held_for: Seconds since its owner asked for it, by two wall clocks; of a wait queue, how
            long its first has waited. None if that is not known.
        fence: The fencing token that was granted last; None where there is none.
        waiting: How many wait in the resource's queue.
        waits: How long the first of them have waited, in seconds: one of them in a survey.
        rivals: Other tokens that lie under the same key on other nodes.
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
        """Whether it is a reader's. Others may have the key beside it, so its digest names it."""
        return self.owner is not None and self.owner.shared

    @property
    def identity(self) -> tuple[str, str]:
        """What it goes by from one look to the next: its key; of a reader, its token as well."""
        return self.key, self.digest if self.shared else ""

    @property
    def place(self) -> str:
        """Which of several it is, for people; empty where there is one."""
        if self.shared:
            return f" reader {self.digest}"
        return f" slot {self.slot}" if self.slot > 1 else ""

    @property
    def held(self) -> bool:
        """Whether a quorum of nodes has it."""
        return self.nodes >= self.quorum

    @property
    def split(self) -> bool:
        """Whether the nodes have different tokens, none of which has a quorum."""
        return bool(self.rivals) and not self.held

    @property
    def leaked(self) -> bool:
        """Whether some node has it without a ttl, so that it never expires there."""
        return any(math.inf in ttls for ttls in (self.ttls, *(r.ttls for r in self.rivals)))

    @property
    def endless(self) -> bool:
        """Whether it has a ttl nowhere: then it is no lock of this library."""
        return all(ttl in (None, math.inf) for ttl in self.ttls)

    def leaked_on(self, node: int) -> bool:
        """Return whether the node of this index has it without a ttl."""
        return any(ttls[node] == math.inf for ttls in (self.ttls, *(r.ttls for r in self.rivals)))

    def data(self) -> dict[str, Any]:
        """Return it as JSON takes it, without secrets; docs/cli.md documents the shape.

        A ttl of -1 means that there is none, as in Redis; null that the key is not there.
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
    """All that was found.

    Attributes:
        entries: By resource, kind and slot.
        looks: How each node answered.
        at: When, in seconds since 1970.
        pauses: Those in force: all, or of the one resource that was asked for.
    """

    entries: tuple[Entry, ...]
    looks: tuple[NodeLook, ...]
    at: float
    pauses: tuple[Pause, ...] = ()

    def data(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
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
