"""One delivery of a message by a worker: it gets its lock, or it is sent away.

In the process that runs the body, right before the body: only there can a task still be sent away
(`Retry`, `Ignore` and `Reject` raised there are honoured, what a `task_prerun` receiver raises is
not).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from typing import Any

from celery import states
from celery.exceptions import Ignore

from .attempts import ATTEMPTS, FEW, attempts_of, count, is_redelivered, short_id
from .conflict import Refused
from .errors import QuorumUnavailable, ResourceHeld, printable
from .hold import HeldLease, Unlocked, release_leftovers
from .lease import Owner
from .options import TaskOptions

__all__ = ["LEASE", "Delivery", "first_call", "lease_of"]

# One name for all that happens to a task's lock, whichever module tells of it.
logger = logging.getLogger("celery_redlock.task")

LEASE = "redlock_lease"
"""Attribute of a request: the lock its delivery runs under."""

SPLIT = 0.3
"""Seconds to try on, at least, where nobody holds it: of those who tried at once, one will have it.
Were all of them sent away, or skipped, the work would be done by none."""
PREDECESSOR = 2.0
"""Seconds to wait for a predecessor that has published us and is about to end."""


class Delivery:
    """One delivery of a message by a worker: its lock, and what it does without."""

    def __init__(self, task: Any, request: Any, held: HeldLease, options: TaskOptions) -> None:
        self._task = task
        self._request = request
        self._options = options
        self._held = held
        self._copy = attempts_of(request).get("copy", False)
        held.owner = Owner(
            socket.gethostname(),
            os.getpid(),
            task_id=short_id(request.id),
            retries=count(request.retries, FEW),
            stamp=os.urandom(8).hex(),
        )
        release_leftovers()
        setattr(request, LEASE, held)  # from here on, the signal handlers release it

    def run(self, body: Callable[[], Any]) -> Any:
        try:
            try:
                # Whoever holds it now may not be there any more when we have waited.
                self._held.acquire(wait=0.0 if self._redelivered else None)
            except ResourceHeld as refusal:
                if self._predecessor(refusal):
                    self._held.acquire(wait=PREDECESSOR)
                elif _split(refusal):
                    self._held.acquire(wait=max(SPLIT, self._options.wait))
                elif self._redelivered:
                    self._copy = self._is_copy(refusal)
                    self._held.acquire()
                else:
                    raise
        except ResourceHeld as refusal:
            return self._refused.conflict(refusal)
        except QuorumUnavailable as refusal:
            if self._options.on_unavailable == "run":
                logger.warning("%s runs WITHOUT its lock: %s", self._name, refusal)
                lease: HeldLease = Unlocked(self._held.resources, self._held._redlock)
                setattr(self._request, LEASE, lease)
                with lease:
                    return body()
            if self._options.on_unavailable == "raise":
                raise
            return self._refused.later("unavailable", refusal)
        if self._copy and self._succeeded():
            logger.info("%s is done: this was a second delivery of it", self._name)
            raise Ignore  # acknowledged; its state, result and callbacks are those of the first
        # Counted from the next conflict: a retry of the user's would carry the count along.
        if isinstance(self._request.headers, dict):
            self._request.headers.pop(ATTEMPTS, None)
        return body()

    @property
    def _refused(self) -> Refused:
        resource = self._held.resource
        return Refused(self._task, self._request, self._options, resource, self._copy)

    @property
    def _name(self) -> str:
        return printable(f"{self._task.name}[{self._request.id}]")

    def _predecessor(self, refusal: ResourceHeld) -> bool:
        """Whether the holder is the one that published us: a chain link, or our last try.

        Its message is sent before its lock is freed, so it is about to end.
        """
        owner = _other_task(refusal)
        if owner is None:
            return False
        if owner.task_id == short_id(self._request.id):
            # `self.replace()` gives its own id to what takes its place.
            replaced = bool(self._request.get("replaced_task_nesting"))
            return replaced or owner.retries < count(self._request.retries, FEW)
        return owner.task_id == short_id(self._request.parent_id)

    @property
    def _redelivered(self) -> bool:
        """Whether the broker says that this message was with a worker before."""
        return not self._copy and is_redelivered(self._request.delivery_info)

    def _is_copy(self, refusal: ResourceHeld) -> bool:
        """Whether the holder is this very message, delivered before: it may still come to its end.

        Seen after a lost connection to the broker, and after a `visibility_timeout`.
        """
        owner = _other_task(refusal)
        if owner is None:
            return False
        same_try = owner.retries == count(self._request.retries, FEW)
        return same_try and owner.task_id == short_id(self._request.id)

    def _succeeded(self) -> bool:
        """Whether the result backend knows that the first delivery has come to its end."""
        backend = self._task.backend
        try:
            # Results of rpc:// are messages to the caller: not ours to look at.
            if backend.as_uri() == "rpc://":
                return False
            state: str = backend.get_state(self._request.id)
        except Exception as error:  # none, or it is away: better twice than never
            logger.warning("%s: cannot tell whether it is done: %r", self._name, error)
            return False
        return state == states.SUCCESS


def first_call(request: Any) -> bool:
    """Whether this is the body's first call in a delivery by a worker: not a plain or nested one"""
    return (
        request is not None
        and not request.called_directly
        and not request.is_eager
        and lease_of(request) is None
    )


def lease_of(request: Any) -> HeldLease | None:
    """The lock that a delivery runs under, if it has come to that.

    A message's headers become attributes of its request: what is no lease was put there by them.
    """
    held = getattr(request, LEASE, None)
    return held if isinstance(held, HeldLease) else None


def _other_task(refusal: ResourceHeld) -> Owner | None:
    """Which delivery of a task holds the lock, if it is one."""
    owner = refusal.holder.owner if refusal.holder else None
    return owner if owner is not None and owner.task_id else None


def _split(refusal: ResourceHeld) -> bool:
    """Whether its nodes were shared among several who tried, so that none of them has a quorum."""
    holder = refusal.holder
    return holder is not None and not refusal.for_ever and holder.nodes < holder.quorum
