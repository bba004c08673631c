"""One delivery of a message by a worker: it gets its lock, or it is sent away.

In the process that runs the body, right before the body: only there can a task still be sent away
(`Retry`, `Ignore` and `Reject` raised there are honoured, what a `task_prerun` receiver raises is
not).
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from celery import states
from celery.exceptions import Ignore, Reject, Retry

from .errors import NotAcquired, QuorumUnavailable, ResourceHeld, printable
from .hold import HeldLease, Unlocked, release_leftovers
from .lease import Owner
from .settings import TaskOptions

__all__ = [
    "ATTEMPTS",
    "LEASE",
    "Delivery",
    "Skipped",
    "first_call",
    "is_redelivered",
    "lease_of",
    "mark_copy",
]

# One name for all that happens to a task's lock, whichever module tells of it.
logger = logging.getLogger("celery_redlock.task")

ATTEMPTS = "redlock_attempts"
"""Message header: how often a task was sent again for want of its lock, since when, and whether it
is a copy of a message that was at work."""
LEASE = "redlock_lease"
"""Attribute of a request: the lock its delivery runs under."""

COUNTDOWN = 0.1
"""Seconds before a task is delivered again, at least: delivered at once it may overtake the worker
that still writes state RETRY over its SUCCESS (seen: 9 of 60)."""
FAR = 1e12
"""Seconds since 1970 that no clock shows; who sends more forges."""
FEW, MANY = 10**9, 10**6
"""Counts that no header may exceed: of retries, and of attempts."""
LONG = 200
"""Characters of a task's id; Celery's own have 36."""
SPLIT = 0.3
"""Seconds to try on, at least, where nobody holds it: of those who tried at once, one will have it.
Were all of them sent away, or skipped, the work would be done by none."""
PREDECESSOR = 2.0
"""Seconds to wait for a predecessor that has published us and is about to end."""


class Skipped(dict[str, Any]):
    """What a task returns that was skipped since another held its lock. A dict, to be stored.

    `Skipped.of(result)` finds it again in a result that went through a backend.
    """

    def __init__(self, resource: str, holder: str) -> None:
        super().__init__(celery_redlock="skipped", resource=resource, holder=holder)

    @classmethod
    def of(cls, result: object) -> Skipped | None:
        """The marker, if `result` is one; else None."""
        if isinstance(result, dict) and result.get("celery_redlock") == "skipped":
            return cls(str(result.get("resource", "")), str(result.get("holder", "")))
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self["resource"], self["holder"])


class Delivery:
    """One delivery of a message by a worker: its lock, and what it does without."""

    def __init__(self, task: Any, request: Any, held: HeldLease, options: TaskOptions) -> None:
        self._task = task
        self._request = request
        self._options = options
        self._held = held
        self._copy = _attempts(request).get("copy", False)
        held.owner = Owner(
            socket.gethostname(),
            os.getpid(),
            task_id=_short(request.id),
            retries=_count(request.retries, FEW),
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
            return self._conflict(refusal)
        except QuorumUnavailable as refusal:
            if self._options.on_unavailable == "run":
                logger.warning("%s runs WITHOUT its lock: %s", self._name, refusal)
                lease: HeldLease = Unlocked(self._held.resource, self._held._redlock)
                setattr(self._request, LEASE, lease)
                with lease:
                    return body()
            if self._options.on_unavailable == "raise":
                raise
            return self._later("unavailable", refusal)
        if self._copy and self._succeeded():
            logger.info("%s is done: this was a second delivery of it", self._name)
            raise Ignore  # acknowledged; its state, result and callbacks are those of the first
        # Counted from the next conflict: a retry of the user's would carry the count along.
        if isinstance(self._request.headers, dict):
            self._request.headers.pop(ATTEMPTS, None)
        return body()

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
        if owner.task_id == _short(self._request.id):
            # `self.replace()` gives its own id to what takes its place.
            replaced = bool(self._request.get("replaced_task_nesting"))
            return replaced or owner.retries < _count(self._request.retries, FEW)
        return owner.task_id == _short(self._request.parent_id)

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
        same_try = owner.retries == _count(self._request.retries, FEW)
        return same_try and owner.task_id == _short(self._request.id)

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

    def _conflict(self, refusal: ResourceHeld) -> Any:
        if self._copy:
            # To skip it or to fail would be told of the first delivery, which has the same id; and
            # if that one dies, this is the message that is left.
            return self._later("held", refusal)
        if self._options.on_conflict == "raise":
            raise refusal
        if self._options.on_conflict == "skip":
            logger.info("%s is skipped: %s", self._name, refusal)
            return Skipped(self._held.resource, str(refusal.holder))
        return self._later("held", refusal)

    def _later(self, why: str, refusal: NotAcquired) -> Any:
        """Send the message again, later, with the same id and none of the user's retries spent.

        Raises:
            Retry: It is sent.
            NotAcquired: It has been tried for too long.
        """
        options = self._options
        attempts = _attempts(self._request)
        count = attempts[why] = attempts[why] + 1
        if self._copy:
            attempts["copy"] = True
        waited = time.time() - attempts["since"]
        deadline = None if self._copy else options.retry_deadline
        if deadline is not None and waited >= deadline:
            logger.error("%s gives up after %.1f s: %s", self._name, waited, refusal)
            raise refusal
        ceiling = min(options.retry_backoff_max, options.retry_backoff * 2.0 ** min(count - 1, 60))
        countdown = max(COUNTDOWN, random.uniform(0, ceiling))  # full jitter
        ordinary = isinstance(refusal, ResourceHeld) and not refusal.for_ever
        logger.log(
            logging.INFO if ordinary else logging.WARNING,
            "%s waits (%s, attempt %d, next in %.1f s): %s",
            self._name,
            why,
            count,
            countdown,
            refusal,
        )
        headers = {**(self._request.headers or {}), ATTEMPTS: attempts}
        # Not self.retry(): that would spend the retries of the user.
        again = self._task.signature_from_request(
            self._request, countdown=countdown, retries=self._request.retries, headers=headers
        )
        try:
            again.apply_async()
        except Exception as error:
            # The broker is away. With late acknowledgement the message can go back to it;
            # otherwise the task must fail, for all to see, or it would be lost without a word.
            if self._task.acks_late:
                raise Reject(error, requeue=True) from error
            raise
        raise Retry(str(refusal), exc=refusal, when=countdown, sig=again)  # type: ignore[arg-type]


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


def is_redelivered(delivery_info: Any) -> bool:
    """Whether the broker says that this message was with a worker before."""
    return isinstance(delivery_info, Mapping) and bool(delivery_info.get("redelivered"))


def mark_copy(request: dict[str, Any]) -> None:
    """Note in a message's headers that its first delivery is at work."""
    given = request.get(ATTEMPTS)
    request[ATTEMPTS] = {**(given if isinstance(given, Mapping) else {}), "copy": True}


def _other_task(refusal: ResourceHeld) -> Owner | None:
    """Which delivery of a task holds the lock, if it is one."""
    owner = refusal.holder.owner if refusal.holder else None
    return owner if owner is not None and owner.task_id else None


def _split(refusal: ResourceHeld) -> bool:
    """Whether its nodes were shared among several who tried, so that none of them has a quorum."""
    holder = refusal.holder
    return holder is not None and not refusal.for_ever and holder.nodes < holder.quorum


def _attempts(request: Any) -> dict[str, Any]:
    """How often this message was sent again, from its headers: foreign input, not trusted far."""
    given = request.get(ATTEMPTS)
    given = given if isinstance(given, Mapping) else {}
    now = time.time()
    since = given.get("since")
    if isinstance(since, bool) or not isinstance(since, (int, float)) or not abs(since) < FAR:
        since = now
    attempts: dict[str, Any] = {"since": min(since, now)}
    if given.get("copy") is True:
        attempts["copy"] = True
    for why in ("held", "unavailable"):
        attempts[why] = _count(given.get(why), MANY)
    return attempts


def _count(given: Any, most: int) -> int:
    return min(max(0, given), most) if type(given) is int else 0


def _short(task_id: Any) -> str:
    """A task's id as it stands in a token, which must fit into what a connection takes at once."""
    text = "" if task_id is None else str(task_id)
    if len(text) <= LONG:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{text[:LONG]}#{digest}"
