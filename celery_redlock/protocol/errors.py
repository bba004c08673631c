"""Every exception a user can meet, in one tree.

A message says what happened, to what, and what to do about it. Two failures are never folded into
one: a resource *held by another* is ordinary and its task waits its turn; a *missing quorum* is
infrastructure and somebody is paged.

What an error carries is a class attribute, given by its name when the error is made.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .texts import printable

if TYPE_CHECKING:
    from .lease import Lease
    from .values import Holder, NodeVote, Owner

__all__ = [
    "ConfigurationError",
    "DuplicateTask",
    "LeaseLost",
    "NodeError",
    "NotAcquired",
    "QuorumUnavailable",
    "RedlockError",
    "ResourceHeld",
]


class RedlockError(Exception):
    """Base of all errors of this library.

    Attributes:
        resource: The resource it is about, or None where it is about none.
    """

    __module__ = "celery_redlock"
    resource: str | None = None

    def __init__(self, message: str = "", **attributes: Any) -> None:
        super().__init__(printable(message))
        for name, value in attributes.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no attribute {name!r}")
            setattr(self, name, tuple(value) if isinstance(value, list) else value)


class ConfigurationError(RedlockError, ValueError):
    """A setting or an option cannot work; raised when decorating or starting, before any task.

    Attributes:
        no_node: Whether no node is named, and the broker is no Redis.
    """

    __module__ = "celery_redlock"
    no_node: bool = False


class NotAcquired(RedlockError):
    """The lock was not acquired. Catch this one to treat both reasons alike.

    Attributes:
        votes: What each node answered, one per node.
        ends_delivery: Whether a task fails with it because its own lock was refused: by
            `on_conflict="raise"`, say.
    """

    __module__ = "celery_redlock"
    votes: tuple[NodeVote, ...] = ()
    ends_delivery: bool = False


class ResourceHeld(NotAcquired):
    """A quorum answered and too many nodes said that another holds the resource. Ordinary.

    Attributes:
        holder: Who holds it, as far as the nodes told; None if they did not agree on one.
        conflicting: If several resources were asked for: those that were found held.
    """

    __module__ = "celery_redlock"
    holder: Holder | None = None
    conflicting: tuple[str, ...] = ()

    @property
    def permanent(self) -> bool:
        """Whether nobody will free it: another program's key that has no ttl lies there."""
        return self.holder is not None and self.holder.expires_in == math.inf


class QuorumUnavailable(NotAcquired):
    """Fewer than a quorum of the nodes answered in time. Infrastructure: look at the nodes.

    Attributes:
        retry_after: Seconds until enough nodes can have a vote, where so many were started a short
            time ago that no quorum can come before; None if the next try may succeed.
    """

    __module__ = "celery_redlock"
    retry_after: float | None = None


class DuplicateTask(RedlockError):
    """A task was not published, or not run: another has reserved its key (`on_duplicate="raise"`).

    Attributes:
        task_id: The id of the task that has.
    """

    __module__ = "celery_redlock"

    def __init__(self, message: str = "", task_id: str = "", **attributes: Any) -> None:
        super().__init__(message, **attributes)
        # What a result backend without pickle keeps of an exception.
        self.args = (*self.args, task_id)
        self.task_id = task_id

    def __str__(self) -> str:
        return str(self.args[0])


class LeaseLost(RedlockError):
    """The lease ended before its holder released it; another may hold the resource now.

    A result backend without pickle keeps the text alone: the attributes of an error that is read
    from it are None, and `votes` is empty.

    Attributes:
        lease: The lease as it was last known.
        reason: `"refused"` (a quorum no longer holds our token), `"expired"` (the deadline passed
            without a quorum of extensions), `"max_lifetime"`; or `"stalled"`: no progress was
            reported, and the lock is kept until the work has ended.
        owner: Who held it: host, process and, in a task, its id.
        task: The name of the task that held it; empty outside tasks.
        held_for: Seconds from the grant until the loss was noticed; None where nobody measured it.
        votes: What each node answered last, one per node.
    """

    __module__ = "celery_redlock"
    lease: Lease | None = None
    reason: str | None = None
    owner: Owner | None = None
    task: str | None = None
    held_for: float | None = None
    votes: tuple[NodeVote, ...] = ()

    def __init__(
        self, message: str = "the lease was lost before the work ended", **attributes: Any
    ) -> None:
        super().__init__(message, **attributes)

    def __reduce__(self) -> tuple[Any, ...]:
        # A task's result is for others to read; the token is not.
        lease = self.lease and replace(self.lease, token="")
        return type(self), self.args, {**self.__dict__, "lease": lease}


class NodeError(RedlockError):
    """One node failed. It becomes a SILENT vote and a log line; users never meet it.

    Attributes:
        node: The node's address, without credentials.
    """

    node: str = ""
