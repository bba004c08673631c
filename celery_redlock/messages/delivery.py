"""One delivery of a message by a worker: it runs under its lock, or is ended or sent again.

This happens in the process that runs the body, right before the body. There Celery honours `Retry`,
`Ignore` and `Reject`; it ignores the exceptions of `task_prerun` receivers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NoReturn

from celery import states
from celery.exceptions import Ignore

from ..locking.done_mark import look_up
from ..locking.held import HeldLease
from ..locking.pauses import Pause, paused
from ..locking.stack import release_leftovers
from ..locking.unlocked import Unlocked
from ..protocol.errors import NotAcquired, QuorumUnavailable, ResourceHeld
from ..protocol.names import mark_of
from ..protocol.texts import event
from ..protocol.values import Owner
from . import headers
from .broker import max_unacknowledged_s, without_delays
from .conflict import Message, ask, end, replace_holder, send_again
from .headers import ATTEMPTS, MAX_RETRIES, header_of, short_id
from .policy import decide, is_split
from .results import report_skipped, state_of, stored_end

__all__ = ["Delivery", "DoneBefore", "first_call", "lease_of", "unlocked"]

# All modules that log events of a task's lock use this one name.
logger = logging.getLogger("celery_redlock.task")

LEASE = "redlock_lease"
"""Attribute of a request for the lock its delivery runs under."""

SPLIT_PATIENCE_S = 0.3
"""Minimum seconds to go on trying after a split vote: one of the deliveries that tried at the same
time will get the lock. If all of them were sent again or skipped, nobody would do the work."""
PREDECESSOR_PATIENCE_S = 2.0
"""Seconds to wait for the task that published this message and is about to end."""
MIN_REDELIVERY_S = 1.0
"""Seconds before which no broker delivers a message to another worker: all brokers count in whole
seconds."""
RECHECK_S = 0.5
"""Seconds of waiting for a lock after which pauses are read again: the key may be paused by now."""
MIN_MARK_LIFE_S = 180.0
"""Minimum seconds for which the nodes remember that a delivery is done, so that a copy of its
message can see it. A copy comes to the head of its queue, and tries every half minute at least."""


class _Done(Exception):
    """Internal signal that another delivery of this message has done its work."""


class DoneBefore(Ignore):
    """An `Ignore` for a delivery whose work is done: the other has stored state and result."""


class Delivery:
    """One delivery of a message by a worker, and the acquisition of its lock."""

    def __init__(self, message: Message, held: HeldLease) -> None:
        request, task = message.request, message.task
        self._message = message
        self._options = message.options  # `_keep_trying` puts in the policy that a function returns
        self._request = request
        self._held = held
        self._begun = time.monotonic()
        attempts, waited = headers.mapping_of(request, ATTEMPTS), headers.waited(request)
        self._copy = attempts.get("copy") is True
        # True if the broker reports that a worker had this message before. If that worker holds the
        # lock, it may be dead.
        self._redelivered = headers.is_redelivered(request.delivery_info)
        # True if there may be another delivery of this very message. A message that is kept for too
        # long is delivered to another worker as well, which may be faster. A message that was sent
        # again exists twice if its acknowledgement did not reach the broker.
        self._may_have_copies = bool(
            attempts.get("held")
            or attempts.get("unavailable")
            or self._copy
            or self._redelivered
            or (waited >= MIN_REDELIVERY_S and waited >= max_unacknowledged_s(task.app))
        )
        assert held.request.owner is not None  # every delivery has an owner
        self._owner = held.request.owner
        if self._may_have_copies or task.acks_late:
            life = max(MIN_MARK_LIFE_S, 2 * message.options.retry_backoff_max)
            held.mark = mark_of(self._owner, held.resources), life
        release_leftovers()
        setattr(request, LEASE, held)  # from here on the signal handlers release it

    def run(self, body: Callable[[], Any]) -> Any:
        """Run the body under the lock, or do what its options require after a refusal."""
        message, request = self._message, self._request
        try:
            self._acquire()
            if time.monotonic() - self._begun >= RECHECK_S and (pause := self.paused()) is not None:
                self._held.release()
                self.put_off(pause)
        except (ResourceHeld, QuorumUnavailable) as refusal:
            return self._refused(refusal, body)
        except _Done:
            logger.info(
                "%s is done: this was a second delivery of it",
                message.called,
                extra=event("task_done_before", message.resource),
            )
            report_skipped(message.task, request.id, message.resource, None, "done")
            raise DoneBefore from None  # acknowledged
        # A retry by the user copies these headers. It must not copy our count of refusals, nor the
        # traces of a delay, because with these RabbitMQ might drop it.
        if isinstance(request.headers, dict):
            request.headers = without_delays(request.headers)
            request.headers.pop(ATTEMPTS, None)
        return body()

    def paused(self) -> Pause | None:
        """Return the pause that keeps its body from beginning; None without one."""
        return paused(self._message.redlock, self._message.resources)

    def put_off(self, pause: Pause) -> NoReturn:
        """Send the message again, whatever its policy is, because its key is paused.

        Raises:
            Retry, Ignore: It is sent.
        """
        refusal = ResourceHeld(str(pause), resource=self._message.resource)
        stuck = headers.attempts_of(self._request)["stuck"]  # unchanged: no holder is in its way
        send_again(self._message, refusal, {**self._attempts(refusal), "stuck": stuck}, "paused")

    def _attempts(self, refusal: NotAcquired) -> dict[str, Any]:
        """Return the attempts header for the message if it is sent again."""
        attempts = headers.count_refusal(self._request, refusal)
        return {**attempts, "copy": True} if self._copy else attempts

    def _refused(self, refusal: NotAcquired, body: Callable[[], Any]) -> Any:
        """Do what the policy requires after a refusal, when it may not wait here any longer."""
        message = self._message
        attempts = self._attempts(refusal)
        action = decide(self._options, refusal, attempts)
        if action.do == "run":
            logger.warning(
                "%s runs WITHOUT its lock: %s",
                message.called,
                refusal,
                extra=event("task_unlocked", message.resource),
            )
            return unlocked(message, body)
        if action.do == "retry":
            send_again(message, refusal, attempts)
        how, stuck = action.do, attempts["stuck"]
        if how in ("wait", "replace"):
            how, stuck = action.then, time.monotonic() - self._begun
        if action.gives_up or how != action.do:
            level = logging.ERROR if how == "raise" else logging.WARNING
            logger.log(
                level,
                "%s gives up after %.1f s: %s",
                message.called,
                stuck,
                refusal,
                extra=event("task_gave_up", message.resource),
            )
        elif isinstance(refusal, QuorumUnavailable):
            logger.warning(
                "%s fails, because it cannot be locked: %s",
                message.called,
                refusal,
                extra=event("task_failed_unlocked", message.resource),
            )
        return end(message, how, refusal)

    # -- The lock ---------------------------------------------------------------------------------

    def _acquire(self) -> None:
        """Acquire the lock, unless another delivery of the message is running or done.

        Raises:
            _Done: Another delivery has done the work.
        """
        rated = self._options.rate is not None
        if rated:  # look it up first: a start counts, and keeps no other delivery out
            self._first_is_running()
        try:
            self._try()
        except ResourceHeld as refusal:
            if not rated:
                self._first_is_running(refusal)
            self._keep_trying(refusal)
        if not rated and self._first_is_running():
            self._held.release()
            raise ResourceHeld(
                f"{self._held.resource}: its first delivery holds another of its slots",
                resource=self._held.resource,
            )

    def _try(self) -> None:
        """Try to acquire the lock for as long as the delivery may wait in this process."""
        options = self._message.options
        # A delivery that replaces the holder does not wait for it first. Neither does one whose
        # policy is a function: its `wait` is 0.
        wait = 0.0 if options.on_conflict == "replace" else self._held.request.wait
        patience = options.waits["retry"]  # a copy may wait for long, but not in a pool slot
        if self._copy:
            wait = min(wait, patience)
        # Under a rate, another running delivery is in nobody's way.
        rated = options.rate is not None
        redelivered = self._redelivered and not self._copy and not rated
        try:
            self._held.acquire(wait=0.0 if redelivered else wait)
        except ResourceHeld as refusal:
            holder = None if rated else _holding_task(refusal)
            if holder is not None and (self._predecessor(holder) or self._has_ended(holder)):
                # It is about to release its lock, so wait for that under any policy.
                self._held.acquire(wait=PREDECESSOR_PATIENCE_S)
            elif is_split(refusal):
                self._held.acquire(wait=max(SPLIT_PATIENCE_S, wait))
            elif redelivered:
                # The holder may be an earlier delivery of this message that is still running, after
                # a lost connection to the broker, or a `visibility_timeout`.
                self._copy = self._owner.is_copy_of(holder)
                self._held.acquire(wait=min(wait, patience) if self._copy else wait)
            else:
                raise

    def _keep_trying(self, refusal: ResourceHeld) -> None:
        """Go on trying, if the policy is to replace the holder or the user's function wants it.

        Otherwise raise the refusal.
        """
        message = self._message
        asks = callable(message.options.on_conflict) and not self._copy
        if asks:
            self._options = self._options.replace(on_conflict=ask(message, refusal))
        action = decide(self._options, refusal, {"copy": self._copy})
        if action.do == "replace":
            replace_holder(message, refusal, self._begun + action.wait, self._held.acquire)
        elif asks:
            self._held.acquire(wait=action.wait)
        else:
            raise refusal

    # -- Another delivery of the message ----------------------------------------------------------

    def _first_is_running(self, refusal: ResourceHeld | None = None) -> bool:
        """Return True if another delivery of this message is running; this one is then a copy.

        Raises:
            _Done: The other delivery has done the work.
        """
        if not self._may_have_copies:
            return False
        try:
            done, at_work = look_up(self._held)
        except QuorumUnavailable as error:
            if self._message.options.on_unavailable == "retry":
                raise
            logger.warning(
                "%s goes on, although it may be done already: %s",
                self._message.called,
                error,
                extra=event("done_mark_unread", self._message.resource),
            )
            done = at_work = False  # to run twice is better than never
        if done or (self._copy and not self._held.lost and self._succeeded()):
            raise _Done
        if refusal is not None:  # its holder may be one of many readers
            at_work = at_work or self._owner.is_copy_of(_holding_task(refusal))
        self._copy = self._copy or at_work
        return at_work

    def _succeeded(self) -> bool:
        """Return True if the result backend has a success of the first delivery."""
        try:
            return state_of(self._message.task, self._request.id) == states.SUCCESS
        except Exception as error:  # no backend, or it is down: to run twice is better than never
            logger.warning(
                "%s goes on, although it may be done already: %r",
                self._message.called,
                error,
                extra=event("done_mark_unread", self._message.resource),
            )
            return False

    # -- Another task -----------------------------------------------------------------------------

    def _predecessor(self, owner: Owner) -> bool:
        """Return True if the holder has published this message: a chain link, or our last try.

        It published the message before releasing its lock, so it is about to end.
        """
        if owner.task_id == short_id(self._request.id):
            # `self.replace()` gives the task's own id to the task that takes its place.
            replaced = bool(header_of(self._request, "replaced_task_nesting"))
            return replaced or owner.retries < headers.count(self._request.retries, MAX_RETRIES)
        return owner.task_id == short_id(self._request.parent_id)

    def _has_ended(self, owner: Owner) -> bool:
        """Return True if the holder's result is stored already: it is about to release its lock.

        For example, the holder is in the group whose chord has this task as its body. For a task
        that would only be sent again this is not checked.
        """
        options = self._message.options
        if options.on_conflict == "retry" or options.hold_for:
            return False
        ours = owner.task_id == short_id(self._request.id)
        return not ours and stored_end(self._message.task, owner.task_id) is not None


def unlocked(message: Message, body: Callable[[], Any]) -> Any:
    """Run a body without its lock. A call of its own task inside of it counts as nested."""
    lease: HeldLease = Unlocked(message.resources, message.redlock)
    setattr(message.request, LEASE, lease)
    with lease:
        return body()


def first_call(request: Any) -> bool:
    """Return True if a worker calls the body: not a plain, an eager or a nested call."""
    return (
        request is not None
        and not request.called_directly
        and not request.is_eager
        and lease_of(request) is None
    )


def lease_of(request: Any) -> HeldLease | None:
    """Return the lock that a delivery runs under; None if it has none yet.

    A message's headers become attributes of its request, so the attribute may be of any type.
    """
    held = getattr(request, LEASE, None)
    return held if isinstance(held, HeldLease) else None


def _holding_task(refusal: ResourceHeld) -> Owner | None:
    """Return the owner of the lock if it is a task's delivery; else None."""
    owner = refusal.holder.owner if refusal.holder else None
    return owner if owner is not None and owner.task_id else None
