"""One delivery of a message by a worker: it gets its lock, or it is sent away.

In the process that runs the body, right before the body: only there can a task still be sent away
(`Retry`, `Ignore` and `Reject` raised there are honoured, what a `task_prerun` receiver raises is
not).
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from celery import states
from celery.exceptions import Ignore

from ..config.options import TaskOptions
from ..locking.done_mark import look_up
from ..locking.held import HeldLease, Unlocked, release_leftovers
from ..protocol.errors import QuorumUnavailable, ResourceHeld
from ..protocol.names import mark_of
from ..protocol.values import Owner, printable
from .broker import unacknowledged_for, without_delays
from .conflict import ConflictPolicy, is_split
from .headers import ATTEMPTS, FEW, attempts_of, count, is_redelivered, said, short_id, waited
from .results import has_ended, state_of
from .signals import task_skipped

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
MARK_LIFE = 180.0
"""Seconds for which the nodes remember that a delivery is done, at least: for a copy of its message
to be delivered. It comes to the head of its queue, and looks again after half a minute at most."""


class _Done(Exception):
    """This delivery's message was worked on to its end by another delivery of it."""


class Delivery:
    """One delivery of a message by a worker: its lock, and what it does without."""

    def __init__(self, task: Any, request: Any, held: HeldLease, options: TaskOptions) -> None:
        self._task = task
        self._request = request
        self._options = options
        self._held = held
        self._begun = time.monotonic()
        attempts = attempts_of(request)
        self._copy = attempts.get("copy", False)
        # Whether there may have been another delivery of this very message. Kept for too long it is
        # delivered to another worker, which may be faster.
        self._again = (
            self._copy
            or attempts.get("again", False)
            or is_redelivered(request.delivery_info)
            or waited(request) >= unacknowledged_for(task.app)
        )
        self._owner = Owner(
            socket.gethostname(),
            os.getpid(),
            task_id=short_id(request.id),
            retries=count(request.retries, FEW),
            stamp=os.urandom(8).hex(),
            task=short_id(task.name),
        )
        held.request = replace(held.request, owner=self._owner)
        if self._again or task.acks_late:
            life = max(MARK_LIFE, 2 * options.retry_backoff_max)
            held.mark = mark_of(self._owner, held.resources), life
        release_leftovers()
        setattr(request, LEASE, held)  # from here on, the signal handlers release it

    def run(self, body: Callable[[], Any]) -> Any:
        policy = "retry"
        try:
            try:
                self._acquire()
            except ResourceHeld as refusal:
                self._first_at_work()
                policy = self._refused.policy(refusal)
                self._insist(policy, refusal)
            if self._first_at_work():
                self._held.release()
                raise ResourceHeld(
                    f"{self._held.resource}: its first delivery holds another of its slots",
                    resource=self._held.resource,
                )
        except ResourceHeld as refusal:
            return self._refused.conflict(policy, refusal)
        except QuorumUnavailable as refusal:
            if self._options.on_unavailable == "run":
                logger.warning("%s runs WITHOUT its lock: %s", self._name, refusal)
                lease: HeldLease = Unlocked(self._held.resources, self._held.redlock)
                setattr(self._request, LEASE, lease)
                with lease:
                    return body()
            if self._options.on_unavailable == "raise":
                raise
            return self._refused.later("unavailable", refusal)
        except _Done:
            logger.info("%s is done: this was a second delivery of it", self._name)
            task_skipped.send(
                sender=self._task,
                resource=self._held.resource,
                task_id=self._request.id,
                holder=None,
                where="run",
                policy="done",
            )
            raise Ignore from None  # acknowledged; state, result, callbacks are those of the first
        # Counted from the next conflict: a retry of the user's would carry the count along.
        # And a delay's traces, with which RabbitMQ might drop it.
        if isinstance(self._request.headers, dict):
            self._request.headers = without_delays(self._request.headers)
            self._request.headers.pop(ATTEMPTS, None)
        return body()

    def _acquire(self) -> None:
        """Try to take the lock, for as long as who holds it is to be waited for."""
        # A replacement, and who has yet to ask what to do, wait for nobody before.
        wait = 0.0 if self._options.on_conflict == "replace" else self._held.request.wait
        patience = self._options.waits["retry"]  # a copy may wait for long, but not in a slot
        if self._copy:
            wait = min(wait, patience)
        try:
            # Whoever holds it now may not be there any more when we have waited.
            self._held.acquire(wait=0.0 if self._redelivered else wait)
        except ResourceHeld as refusal:
            if self._predecessor(refusal) or self._has_ended(refusal):
                self._held.acquire(wait=PREDECESSOR)
            elif is_split(refusal):
                self._held.acquire(wait=max(SPLIT, wait))
            elif self._redelivered:
                self._copy = self._is_copy(refusal)
                self._held.acquire(wait=min(wait, patience) if self._copy else wait)
            else:
                raise

    def _insist(self, policy: str, refusal: ResourceHeld) -> None:
        """Go on trying, where the policy is not content with the refusal."""
        if policy == "replace":
            self._refused.replace(refusal, self._held.acquire)
        elif callable(self._options.on_conflict) and not self._copy:
            self._held.acquire(wait=self._options.waits[policy])
        else:
            raise refusal

    def _first_at_work(self) -> bool:
        """Whether another delivery of this very message is at work; this is a copy then.

        Raises:
            _Done: It has come to its end.
        """
        if not self._again:
            return False
        try:
            done, others = look_up(self._held)
        except QuorumUnavailable as error:
            if self._options.on_unavailable == "retry":
                raise
            logger.warning("%s: cannot tell whether it is done: %s", self._name, error)
            done, others = False, []  # better twice than never
        if done or (self._copy and not self._held.lost and self._succeeded()):
            raise _Done
        at_work = any(self._same(other) for other in others)
        self._copy = self._copy or at_work
        return at_work

    @property
    def _refused(self) -> ConflictPolicy:
        return ConflictPolicy(
            self._task,
            self._request,
            self._options,
            self._held.resource,
            copy=self._copy,
            again=self._again,
            begun=self._begun,
        )

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
            replaced = bool(said(self._request, "replaced_task_nesting"))
            return replaced or owner.retries < count(self._request.retries, FEW)
        return owner.task_id == short_id(self._request.parent_id)

    def _has_ended(self, refusal: ResourceHeld) -> bool:
        """Whether the holder's result is stored already: it is about to free its lock.

        Such as another member of the group whose chord's body this is. Who is to be sent again
        need not know.
        """
        if self._options.on_conflict == "retry" or self._options.hold_for:
            return False
        owner = _other_task(refusal)
        return (
            owner is not None
            and owner.task_id != short_id(self._request.id)
            and has_ended(self._task, owner.task_id)
        )

    @property
    def _redelivered(self) -> bool:
        """Whether the broker says that this message was with a worker before."""
        return not self._copy and is_redelivered(self._request.delivery_info)

    def _is_copy(self, refusal: ResourceHeld) -> bool:
        """Whether the holder is this very message, delivered before: it may still come to its end.

        Seen after a lost connection to the broker, and after a `visibility_timeout`.
        """
        owner = _other_task(refusal)
        return owner is not None and self._same(owner)

    def _same(self, owner: Owner) -> bool:
        """Whether a lock is held for this very message, by another delivery of it.

        Of another task it is another message, whoever gave it this id.
        """
        mine = self._owner
        same = (owner.task_id, owner.retries, owner.task) == (mine.task_id, mine.retries, mine.task)
        return same and owner.stamp != mine.stamp

    def _succeeded(self) -> bool:
        """Whether the result backend knows that the first delivery has come to its end."""
        try:
            return state_of(self._task, self._request.id) == states.SUCCESS
        except Exception as error:  # none, or it is away: better twice than never
            logger.warning("%s: cannot tell whether it is done: %r", self._name, error)
            return False


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
