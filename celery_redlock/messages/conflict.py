"""What a delivery does that was refused its lock: the conflict policies, and sending it again."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from typing import Any

import tenacity
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from ..config.checks import CONFLICT_POLICIES
from ..config.options import TaskOptions
from ..protocol.errors import (
    ConfigurationError,
    NotAcquired,
    QuorumUnavailable,
    RedlockError,
    ResourceHeld,
)
from ..protocol.values import Holder, Vote, printable
from ..runtime.complaints import Once
from .broker import (
    delayed_by_broker,
    has_way_back,
    later_at,
    misaddressed,
    on_last_delivery,
    unacknowledged_for,
    without_delays,
)
from .headers import ATTEMPTS, LONG, attempts_of, serializer_of, short_id, stuck_for
from .parkable import at_work
from .signals import task_skipped
from .skipped import Skipped

__all__ = ["ConflictPolicy", "check_rejecting", "is_split"]

# One name for all that happens to a task's lock, whichever module tells of it.
logger = logging.getLogger("celery_redlock.task")

unavailable = Once()
"""Whether this process says again that there is no quorum; Celery has two lines an attempt."""
SPREAD = 1.0
"""Seconds over which tasks are spread that were put off until one moment; each worker reads the
uptime of a server to a second."""
COUNTDOWN = 0.1
"""Seconds before a task is delivered again, at least: delivered at once it may overtake the worker
that still writes state RETRY over its SUCCESS (seen: 9 of 60)."""
COPY = 30.0
"""Seconds before a copy is delivered again, at most, doubled from `retry_backoff` on: when its
first delivery dies, it is to run soon; but the first may be at work for hours, and each of its
looks costs two rounds and a message."""
SEND = 10.0
"""Seconds for which a message that cannot be sent again is tried again, in its slot. Given back to
the broker at once it would come back at once: a loop, which a quorum queue ends by dropping it."""
PARKED = 0.3
"""Seconds before a task is delivered again, at most, where workers park what meets a held lock."""
LOOK = 0.5
"""Seconds between two looks at who holds what a task is waiting to take over."""


def check_rejecting(task: Any, options: TaskOptions) -> None:
    """Refuse a task that is to reject its message when it has been acknowledged already.

    Raises:
        ConfigurationError: `reject` is its policy, and `acks_late` is not set.
    """
    given = {"on_conflict": options.on_conflict, "on_deadline": options.on_deadline}
    for name, policy in given.items():
        if policy == "reject" and not task.acks_late:
            raise ConfigurationError(
                f"{task.name}: {name} is 'reject', but its messages are acknowledged before its"
                " body begins, and can no longer be rejected then: set acks_late=True, or choose"
                " 'raise' or 'skip'"
            )


class ConflictPolicy:
    """A delivery that did not get its lock.

    Args:
        task: The task.
        request: Its request.
        options: How it is locked.
        resource: What it is refused.
        copy: Whether it is a second delivery of a message that may still be at work.
        again: Whether the broker may have delivered its message more than once.
        begun: When it first asked for the lock, by `time.monotonic`; seconds.
    """

    def __init__(
        self,
        task: Any,
        request: Any,
        options: TaskOptions,
        resource: str,
        *,
        copy: bool = False,
        again: bool = False,
        begun: float,
    ) -> None:
        self._task = task
        self._request = request
        self._options = options
        self._resource = resource
        self._copy = copy
        self._again = again
        self._begun = begun

    def policy(self, refusal: ResourceHeld) -> str:
        """What to do about it: the name of a policy, of the user's function if there is one.

        Raises:
            RedlockError: The function failed, or returned something else.
        """
        policy = self._options.on_conflict
        if self._copy:
            # To skip it or to fail would be told of the first delivery, which has the same id; and
            # if that one dies, this is the message that is left.
            return "retry"
        if not callable(policy):
            return policy
        called = f"{self._called}: its on_conflict, {_name(policy)},"
        try:
            said = policy(refusal.holder, self._request)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            raise RedlockError(
                f"{called} failed: {error!r}; {refusal}", resource=self._resource
            ) from error
        if not isinstance(said, str) or said not in CONFLICT_POLICIES:
            raise RedlockError(
                f"{called} must return one of {', '.join(map(repr, CONFLICT_POLICIES))}; it"
                f" returned {said!r:.100}",
                resource=self._resource,
            )
        if said == "reject" and not self._task.acks_late:
            raise RedlockError(
                f"{called} returned 'reject', but the message is acknowledged already: set"
                " acks_late=True",
                resource=self._resource,
            )
        if said == "replace" and self._options.limit > 1:
            raise RedlockError(
                f"{called} returned 'replace', but with limit={self._options.limit} it may revoke"
                " all who hold it for one place: return 'wait'",
                resource=self._resource,
            )
        return said

    def conflict(self, policy: str, refusal: ResourceHeld) -> Any:
        """Another holds it, and has for as long as the policy waits: what it says then."""
        if self._copy or policy == "retry":
            return self.later("held", refusal)
        if policy in ("wait", "replace"):
            return self._give_up(time.monotonic() - self._begun, refusal)
        return self._end(policy, refusal)

    def replace(self, refusal: ResourceHeld, acquire: Callable[[float], None]) -> None:
        """Have the holder revoked, and take the lock when it is free: when the holder is dead.

        Args:
            refusal: Tells who holds it.
            acquire: Tries for so many seconds.

        Raises:
            ResourceHeld: It is not free in time, or its holder cannot be revoked.
        """
        until = self._begun + self._options.waits["replace"]
        asked: set[str] = set()
        while True:
            if not is_split(refusal):
                self._revoke(refusal, asked)
            left = until - time.monotonic()
            if left <= 0:
                raise refusal
            try:
                return acquire(min(LOOK, left))
            except ResourceHeld as still:
                refusal = still  # perhaps by another by now

    def _revoke(self, refusal: ResourceHeld, asked: set[str]) -> None:
        """Ask all workers to stop the task that holds it; once, as each time is a signal."""
        owner = refusal.holder.owner if refusal.holder else None
        held_by = owner.task_id if owner is not None else ""
        why = ""
        if not held_by:
            why = "is no task"
        elif held_by == short_id(self._request.id):
            why = "has the id of this very task"
        elif len(held_by) > LONG:
            why = "has an id too long to be known in full"
        if why:
            logger.warning("%s cannot replace its holder, which %s", self._called, why)
            raise refusal
        if held_by in asked:
            return
        asked.add(held_by)
        logger.info("%s replaces task %s", self._called, printable(held_by))
        try:
            self._task.app.control.revoke(held_by, terminate=True)
        except Exception as error:  # the broker is away; the holder may end all the same
            logger.warning("%s: cannot revoke task %s: %r", self._called, printable(held_by), error)

    def later(self, why: str, refusal: NotAcquired) -> Any:
        """Send the message again, later, with the same id and none of the user's retries spent.

        Raises:
            Retry, Ignore: It is sent.
            NotAcquired, Reject: It has been tried for too long.
        """
        options = self._options
        attempts = attempts_of(self._request)
        count = attempts[why] = attempts[why] + 1
        if self._copy:
            attempts["copy"] = True
        if self._again:
            attempts["again"] = True
        holder = refusal.holder if isinstance(refusal, ResourceHeld) else None
        stuck = stuck_for(self._request, attempts, holder.digest if holder else None)
        deadline = None if self._copy else options.retry_deadline
        if deadline is not None and stuck >= deadline:
            return self._give_up(stuck, refusal)
        # Whoever receives it parks it, unless too many are parked: it has come from the pool then.
        parked = (attempts.pop("parked", False) or count == 1) and at_work(self._request)
        countdown = self._countdown(count, parked and why == "held", refusal)
        attempts["pause"] = countdown
        ordinary = isinstance(refusal, ResourceHeld) and not refusal.permanent
        level = logging.INFO if ordinary else logging.WARNING
        if self._copy and count & (count - 1):
            level = logging.DEBUG  # it looks as long as its first is at work
        elif isinstance(refusal, QuorumUnavailable):
            away = frozenset(vote.node for vote in refusal.votes if vote.vote is Vote.SILENT)
            if not unavailable(away, time.monotonic()) and count > 1:
                level = logging.DEBUG  # while there is no quorum, every attempt of every task
        logger.log(
            level,
            "%s waits (%s, attempt %d, next in %.1f s): %s",
            self._called,
            why,
            count,
            countdown,
            refusal,
        )
        when = later_at(self._task.app, self._request, countdown)
        headers = {**without_delays(self._request.headers), ATTEMPTS: attempts}
        serializer = serializer_of(self._request)
        # Not self.retry(): that would spend the retries of the user.
        again = self._task.signature_from_request(
            self._request,
            retries=self._request.retries,
            headers=headers,
            **when,
            **({"serializer": serializer} if serializer else {}),
        )
        self._send(again)
        if self._copy:
            # State RETRY would be that of the first delivery, and might outlive it.
            raise Ignore(str(refusal))
        raise Retry(str(refusal), exc=refusal, when=countdown, sig=again)  # type: ignore[arg-type]

    def _countdown(self, count: int, parked: bool, refusal: NotAcquired) -> float:
        """Seconds until the message is to be delivered again, for the n-th time."""
        options, app = self._options, self._task.app
        ceiling = min(options.retry_backoff_max, options.retry_backoff * 2.0 ** min(count - 1, 60))
        if self._copy:
            ceiling = min(ceiling, COPY)
        if parked:
            ceiling = PARKED
        by_broker = delayed_by_broker(app, self._request)
        if not by_broker:  # a worker holds it meanwhile
            ceiling = min(ceiling, unacknowledged_for(app) / 4)
        countdown = max(COUNTDOWN, random.uniform(0, ceiling))  # full jitter
        known = refusal.retry_after if isinstance(refusal, QuorumUnavailable) else None
        if known is not None:  # before that moment every try fails, on whichever worker
            countdown = known + random.uniform(COUNTDOWN, SPREAD)
        return float(math.ceil(countdown)) if by_broker else countdown

    def _send(self, again: Any) -> None:
        """Send it; where that fails, for a while: kombu raises anything as its connection breaks.

        Raises:
            Reject: It cannot be sent, but given back to the broker: it was not acknowledged yet.
            RedlockError: It can never be sent.
            Exception: It cannot be sent, nor given back.
        """
        if misaddressed(self._request):
            raise RedlockError(
                f"{self._called} cannot be sent again: its message says that it came by an exchange"
                " or a routing key that is no text; find out who wrote it",
                resource=self._resource,
            )
        try:
            for attempt in tenacity.Retrying(
                stop=tenacity.stop_after_delay(SEND),
                wait=tenacity.wait_random_exponential(0.2, max=2.0),
                retry=tenacity.retry_if_not_exception_type(SoftTimeLimitExceeded),
                before_sleep=self._cannot_send,
                reraise=True,
            ):
                with attempt:
                    again.apply_async()
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            # With late acknowledgement the message can go back to the broker; otherwise, and if the
            # broker would drop it, the task must fail, for all to see: not be lost without a word.
            dropped = on_last_delivery(self._task.app, self._request)
            if self._task.acks_late and has_way_back(self._request) and not dropped:
                raise Reject(error, requeue=True) from error
            raise

    def _cannot_send(self, attempt: tenacity.RetryCallState) -> None:
        if attempt.attempt_number == 1 and attempt.outcome is not None:
            error = attempt.outcome.exception()
            logger.warning(
                "%s cannot be sent again (%r); trying for %g s", self._called, error, SEND
            )

    def _give_up(self, waited: float, refusal: NotAcquired) -> Any:
        how = self._options.on_deadline
        level = logging.ERROR if how == "raise" else logging.WARNING
        logger.log(level, "%s gives up after %.1f s: %s", self._called, waited, refusal)
        return self._end(how, refusal)

    def _end(self, how: str, refusal: NotAcquired) -> Any:
        if how == "skip":
            holder = refusal.holder if isinstance(refusal, ResourceHeld) else refusal
            logger.info("%s is skipped: %s", self._called, refusal)
            task_skipped.send(
                sender=self._task,
                resource=self._resource,
                task_id=self._request.id,
                holder=holder.owner if isinstance(holder, Holder) else None,
                where="run",
                policy="skip",
            )
            return Skipped(self._resource, str(holder))
        if how == "reject":
            logger.info("%s is rejected: %s", self._called, refusal)
            raise Reject(str(refusal), requeue=False)
        raise refusal

    @property
    def _called(self) -> str:
        return printable(f"{self._task.name}[{self._request.id}]")


def is_split(refusal: ResourceHeld) -> bool:
    """Whether its nodes were shared among several who tried, so that none of them has a quorum."""
    holder = refusal.holder
    return holder is not None and not refusal.permanent and holder.nodes < holder.quorum


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", None) or repr(function))
