"""Every exception a user can meet, in one tree.

A message says what happened, to what, and what to do about it. Two failures are never folded into
one: a resource *held by another* is ordinary and its task waits its turn; a *missing quorum* is an
infrastructure failure that somebody is paged for.

Each attribute of an error has its default on the class; the constructor takes it by name.
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
        resource: The resource that it is about, or None.
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
    """A setting or an option that cannot work; raised when decorating or starting, before any task.

    Attributes:
        no_node: True if no node is configured, and the broker is not Redis.
    """

    __module__ = "celery_redlock"
    no_node: bool = False


class NotAcquired(RedlockError):
    """A lock that was not acquired. Catch this class to treat both reasons alike.

    Attributes:
        votes: The vote of each node.
        ends_delivery: True if a task fails with it because its own lock was refused, for example
            with `on_conflict="raise"`.
    """

    __module__ = "celery_redlock"
    votes: tuple[NodeVote, ...] = ()
    ends_delivery: bool = False


class ResourceHeld(NotAcquired):
    """A resource that another holds: a quorum answered, and too many nodes said NO. Ordinary.

    Attributes:
        holder: The holder that the nodes reported; None if they did not agree on one.
        conflicting: The resources that were found held, if several were asked for.
    """

    __module__ = "celery_redlock"
    holder: Holder | None = None
    conflicting: tuple[str, ...] = ()

    @property
    def permanent(self) -> bool:
        """True if it will never be free: the key belongs to another program and has no ttl."""
        return self.holder is not None and self.holder.expires_in == math.inf


class QuorumUnavailable(NotAcquired):
    """A missing quorum: too few nodes answered in time. Infrastructure: look at the nodes.

    Attributes:
        retry_after: Seconds until enough nodes have a vote, if so many were started a short time
            ago that there can be no quorum before; None if the next try may succeed.
    """

    __module__ = "celery_redlock"
    retry_after: float | None = None


class DuplicateTask(RedlockError):
    """A task that was not published, or not run, because another task has reserved its key.

    It is raised with `on_duplicate="raise"`.

    Attributes:
        task_id: The id of the other task.
    """

    __module__ = "celery_redlock"

    def __init__(self, message: str = "", task_id: str = "", **attributes: Any) -> None:
        super().__init__(message, **attributes)
        # A result backend without pickle keeps only `args` of an exception.
        self.args = (*self.args, task_id)
        self.task_id = task_id

    def __str__(self) -> str:
        return str(self.args[0])


class LeaseLost(RedlockError):
    """A lease that ended before its holder released it; another may hold the resource now.

    A result backend without pickle stores only the text. If the error is read from such a backend,
    its attributes are None, and `votes` is empty.

    Attributes:
        lease: The last known state of the lease.
        reason: `"refused"` (a quorum no longer holds our token), `"expired"` (the deadline passed
            without a quorum of extensions), `"max_lifetime"`; or `"stalled"`: no progress was
            reported, and the lock is kept until the work has ended.
        owner: Who held it: host, process and, in a task, its id.
        task: The name of the task that held it; empty outside tasks.
        held_for: Seconds from the grant until the loss was noticed; None if that was not measured.
        votes: The last vote of each node.
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
        # Anybody may read a task's result, but nobody else may have the token.
        lease = self.lease and replace(self.lease, token="")
        return type(self), self.args, {**self.__dict__, "lease": lease}


class NodeError(RedlockError):
    """A failure of one node. It becomes a SILENT vote and a log line; users never meet it.

    Attributes:
        node: The node's address, without credentials.
    """

    node: str = ""
