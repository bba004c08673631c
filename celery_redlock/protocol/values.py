"""Values that describe locks: owners, holders, votes, queries. All of them are frozen."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from typing import ClassVar

from .texts import printable

__all__ = [
    "NOT_WAITED_FOR",
    "SHARED",
    "Holder",
    "NodeVote",
    "Owner",
    "Query",
    "QueueEntry",
    "Vote",
    "is_shared",
    "quorum_of",
    "token_digest",
]


def quorum_of(nodes: int) -> int:
    """Return the quorum of `nodes` masters: more than half of them."""
    return nodes // 2 + 1


SHARED = "~shared"
"""Suffix of a reader's token, and of the name of a reader that waits. Because it is part of the
token, any process that extends or releases a claim can see that it is a reader's, even if a node
has forgotten it."""


def is_shared(token: str) -> bool:
    """Return True if a token is a reader's. A resource has many readers at once, or one writer."""
    return token.endswith(SHARED)


class Vote(enum.Enum):
    """A node's answer. There are three, because *no answer* is neither a yes nor a no."""

    YES = "yes"
    NO = "no"
    SILENT = "silent"


NOT_WAITED_FOR = "not waited for"
"""The detail of a vote that could not have changed the outcome."""


@dataclass(frozen=True, slots=True)
class NodeVote:
    """One node's vote, for people.

    Attributes:
        node: The node's address, without credentials.
        vote: Its answer.
        detail: The holder (NO), or why there is no answer (SILENT).
    """

    node: str
    vote: Vote
    detail: str = ""

    def __str__(self) -> str:
        if self.detail == NOT_WAITED_FOR:
            return f"{self.node} {self.detail}"
        return f"{self.node} {self.vote.value}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, slots=True)
class Owner:
    """The process or task that asks for a lock, described for operators. It is part of the token.

    Attributes:
        host: Host name.
        pid: Process id on that host.
        task_id: The Celery task's id; empty outside Celery.
        retries: The number of times that Celery had retried that task.
        stamp: The id of one delivery of a message: a task id can be delivered twice at once.
        task: The Celery task's name; empty outside Celery.
        since: When it asked, by its own wall clock, in seconds since 1970; 0.0 if not known.
            For people to read: no decision depends on it.
        shared: True if it asked as a reader; likewise.
    """

    host: str
    pid: int
    task_id: str = ""
    retries: int = 0
    stamp: str = ""
    task: str = ""
    since: float = field(default=0.0, compare=False)
    shared: bool = field(default=False, compare=False)

    def token(self, nonce: str, now: float = 0.0) -> str:
        """Return the token of one attempt of this owner, made at `now` (seconds since 1970).

        `nonce` contains at least 128 random bits.
        """
        host = self.host.replace("|", "")
        task_id, task = _escape(self.task_id), _escape(self.task)
        asked = int(now * 1e3)
        return f"{self.stamp}|{host}|{self.pid}|{task_id}|{self.retries}|{task}|{asked}|{nonce}"

    @classmethod
    def of(cls, token: str) -> Owner | None:
        """Return the owner that made `token`; None if it is not a token of this library."""
        parts = token.split("|")
        if len(parts) != 8 or not all(_is_count(parts[i]) for i in (2, 4, 6)):
            return None
        stamp, host, pid, task_id, retries, task, asked, nonce = parts
        return cls(
            host=host,
            pid=int(pid),
            task_id=_unescape(task_id),
            retries=int(retries),
            stamp=stamp,
            task=_unescape(task),
            since=int(asked) / 1e3,
            shared=is_shared(nonce),
        )

    def is_copy_of(self, other: Owner | None) -> bool:
        """Return True if both are deliveries of one message, and not the same delivery.

        A message of another task is another message, even with the same id.
        """
        if other is None or other.stamp == self.stamp:
            return False
        mine = self.task_id, self.retries, self.task
        return mine == (other.task_id, other.retries, other.task)

    def __str__(self) -> str:
        named = f"{self.task}[{self.task_id}]" if self.task else f"task {self.task_id}"
        task = f"{named} of " if self.task_id else ""
        reader = ", a reader" if self.shared else ""
        return printable(f"{task}pid {self.pid} on {self.host}{reader}")


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a resource, as reported by the nodes.

    Attributes:
        resource: The resource that is held.
        owner: Who made the token, or None if the value under our name is another program's.
        nodes: The number of nodes that hold this token.
        quorum: The number of nodes that a lock needs. If `nodes` is less, this is a split vote, or
            the rest of one.
        expires_in: Seconds until so many nodes have dropped the token that another can be granted
            the lock, unless it is extended; None if that was not requested.
        digest: The first eight hex digits of the token's SHA-256, to compare in logs. The token
            itself is never shown, because with it anybody could release the lock.
    """

    __module__ = "celery_redlock"

    resource: str
    owner: Owner | None
    nodes: int
    quorum: int
    expires_in: float | None = None
    digest: str = ""

    def __str__(self) -> str:
        who = str(self.owner) if self.owner else "another program's key"
        nodes = f"{self.nodes} node{'' if self.nodes == 1 else 's'}"
        return f"{who} ({nodes}, token {self.digest})"


@dataclass(frozen=True, slots=True)
class Query:
    """A question to the nodes about the holders of some names.

    Attributes:
        resources: The names on the nodes.
        nodes: The number of nodes.
        shared: True to ask for a holder that keeps a new reader out, and not for any holder.
        ended: As in a claim. A query never sets a token, so it never comes too late.
        recall: As in a claim. A caller that needs a long memory asks again, with a claim.
    """

    resources: tuple[str, ...]
    nodes: int
    shared: bool = field(default=False, kw_only=True)
    ended: ClassVar[bool] = False
    recall: ClassVar[float] = 0.0


@dataclass(frozen=True, slots=True)
class QueueEntry(Query):
    """One waiter's place in the wait queues of some resources.

    Attributes:
        token: The address for a node's notification: the channel of the waiter's process, and the
            waiter's own name.
        since: When it first waited, in microseconds since 1970. The queues are in this order.
    """

    token: str
    since: int


@dataclass(frozen=True, slots=True)
class Mark(Query):
    """The mark of a node that has earned its vote.

    Attributes:
        text: The value of the mark (`NodeInfo.mark`).
    """

    text: str


def token_digest(token: str) -> str:
    """Return a short name of a token that is safe to log."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("|", "%7C")


def _unescape(text: str) -> str:
    return text.replace("%7C", "|").replace("%25", "%")


def _is_count(text: str) -> bool:
    # The length is limited because Python raises ValueError for numbers of thousands of digits.
    return text.isdecimal() and len(text) <= 20
