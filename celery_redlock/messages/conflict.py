"""Carry out the decision of `policy.py` for a delivery that was refused its lock."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import tenacity
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from kombu.exceptions import EncodeError

from ..config.checks import CONFLICT_POLICIES, ConflictPolicy, allows_several
from ..config.options import TaskOptions
from ..locking import leases
from ..locking.redlock import Redlock
from ..protocol.errors import NotAcquired, QuorumUnavailable, RedlockError, ResourceHeld
from ..protocol.texts import event, printable, shown
from ..protocol.values import Holder, Owner, Vote
from ..runtime.blocking import blocking
from ..runtime.complaints import Once
from . import broker, revokes
from .headers import ATTEMPTS, MAX_ID_CHARS, RECEIPT, original_options, short_id
from .policy import backoff, is_split, parks
from .results import report_skipped, store_retry
from .skipped import Skipped

__all__ = ["Message", "ask", "end", "replace_holder", "send_again", "send_patiently"]

# All modules that log events of a task's lock use this one name.
logger = logging.getLogger("celery_redlock.task")

unavailable = Once()
"""Filter of log lines about a missing quorum: Celery already logs two lines for each attempt."""
SEND_PATIENCE_S = 10.0
"""Seconds for which the sending of a message is tried again, in its pool slot. If the message were
returned to the broker at once, it would come back at once: a loop, which a quorum queue ends by
dropping the message."""
POLL_INTERVAL_S = 0.5
"""Seconds of one attempt to take over a lock, before its holder is looked up again."""


@dataclass(frozen=True)
class Message:
    """A message that a worker delivers: its task and request, its lock, and its options."""

    task: Any
    request: Any
    redlock: Redlock
    resources: tuple[str, ...]
    options: TaskOptions

    @property
    def called(self) -> str:
        """The task and its id, for people."""
        return printable(f"{self.task.name}[{self.request.id}]")

    @property
    def resource(self) -> str:
        """Its resources as one text, for people."""
        return shown(self.resources)

    def skip(self, holder: Owner | None, policy: str, because: object) -> Skipped:
        """Send `task_skipped`, and return the result of the task."""
        report_skipped(self.task, self.request.id, self.resource, holder, policy)
        return Skipped(self.resource, str(because))


def ask(message: Message, refusal: ResourceHeld) -> ConflictPolicy:
    """Return the name of the policy that the user's function chooses for a conflict.

    Raises:
        RedlockError: The function failed, or returned something else.
    """
    function = message.options.on_conflict
    name = getattr(function, "__qualname__", None) or repr(function)
    called = f"{message.called}: its on_conflict, {name},"
    try:
        said = function(refusal.holder, message.request)  # type: ignore[operator]
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        wrong = f"failed: {error!r}; {refusal}"
        raise RedlockError(f"{called} {wrong}", resource=message.resource) from error
    if not isinstance(said, str) or said not in CONFLICT_POLICIES:
        policies = ", ".join(map(repr, CONFLICT_POLICIES))
        wrong = f"must return one of {policies}; it returned {said!r:.100}"
    elif said == "reject" and not message.task.acks_late:
        wrong = "returned 'reject', but the message is acknowledged already: set acks_late=True"
    elif said == "replace" and allows_several(message.options.limit):
        wrong = "returned 'replace', but with a limit it may revoke all who hold it: return 'wait'"
    elif said == "replace" and message.options.shared:
        wrong = "returned 'replace', which a reader cannot do: return 'wait'"
    elif said == "replace" and message.options.rate is not None:
        wrong = "returned 'replace', but with a rate nobody holds anything: return 'retry'"
    else:
        policy: ConflictPolicy = said  # type: ignore[assignment]  # it is one of them
        return policy
    raise RedlockError(f"{called} {wrong}", resource=message.resource)


def replace_holder(
    message: Message, refusal: ResourceHeld, until: float, acquire: Callable[[float], object]
) -> None:
    """Revoke the holder, and acquire the lock when the holder has ended.

    Args:
        message: The message that replaces the holder.
        refusal: The refusal with the holder.
        until: When to give up, by `time.monotonic`; seconds.
        acquire: Function that tries to acquire the lock for a number of seconds.

    Raises:
        ResourceHeld: The lock is not free in time, or its holder cannot be revoked.
    """
    asked: set[str] = set()  # ask once per holder, because each request sends it a signal
    while True:
        refusal.holder = blocking(leases.agreed(message.redlock.client, refusal))
        # After a split vote there is no holder to revoke: only try again.
        if not is_split(refusal) and (other := _revocable(message, refusal)).digest not in asked:
            asked.add(other.digest)
            _revoke(message, other)
        left = until - time.monotonic()
        if left <= 0:
            raise refusal
        try:
            acquire(min(POLL_INTERVAL_S, left))
            return
        except ResourceHeld as still:
            refusal = still  # the holder may be another one by now


def _revocable(message: Message, refusal: ResourceHeld) -> Holder:
    """Return the holder if it is a task that can be revoked; else raise the refusal."""
    holder = refusal.holder
    owner = holder.owner if holder else None
    held_by = owner.task_id if owner is not None else ""
    if holder is None or not held_by:
        why = "is no task"
    elif held_by == short_id(message.request.id):
        why = "has the id of this very task"
    elif owner is not None and owner.shared:
        why = "is one of any number of readers"
    elif len(held_by) > MAX_ID_CHARS:
        why = "has an id too long to be known in full"
    else:
        return holder
    logger.warning(
        "%s cannot replace its holder, which %s",
        message.called,
        why,
        extra=event("holder_not_replaced", message.resource),
    )
    raise refusal


def _revoke(message: Message, holder: Holder) -> None:
    """Ask all workers to stop the task that holds a lock."""
    assert holder.owner is not None
    name = printable(holder.owner.task_id)
    logger.info(
        "%s replaces task %s",
        message.called,
        name,
        extra=event("holder_replaced", message.resource),
    )
    try:
        revokes.end(message.task.app, holder.owner.task_id, holder.digest, terminate=True)
    except Exception as error:  # the broker is down, but the holder may end anyway
        logger.warning(
            "%s: cannot revoke task %s: %r",
            message.called,
            name,
            error,
            extra=event("holder_not_revoked", message.resource),
        )


def send_again(
    message: Message, refusal: NotAcquired, attempts: dict[str, Any], reason: str = ""
) -> NoReturn:
    """Send a message again, later, with the same id and none of the user's retries spent.

    Args:
        message: The message.
        refusal: The reason.
        attempts: The result of `headers.count_refusal`, which becomes a header of the message.
        reason: The reason in a word, for the log; by default "held" or "unavailable".

    Raises:
        Retry, Ignore: It is sent.
        Exception: It is not sent: see `_send`.
    """
    app, request, copy = message.task.app, message.request, attempts.get("copy", False)
    why = "held" if isinstance(refusal, ResourceHeld) else "unavailable"
    # The worker that receives the message will park it. There is one exception: if it could not
    # stay parked, or was refused before without being parked, too many messages are parked.
    parked = attempts.pop("parked", attempts[why] == 1) and parks(message.options)
    holder = refusal.holder if isinstance(refusal, ResourceHeld) else None
    if message.options.shared and holder and holder.owner:
        # It will not be parked if another delivery of this message is a reader: for everybody else
        # the key is free, so a worker would not keep it parked.
        parked = parked and holder.owner.task_id != short_id(request.id)
    by_broker = broker.delayed_by_broker(app, request)
    # If the broker cannot delay it, a worker keeps it meanwhile, which must not take too long.
    most = math.inf if by_broker else broker.max_unacknowledged_s(app) / 4
    pause = backoff(message.options, refusal, attempts, parked, most)
    pause = attempts["pause"] = float(math.ceil(pause)) if by_broker else pause
    level = _level(refusal, attempts[why], copy)
    line = "%s waits (%s, attempt %d, next in %.1f s): %s"
    logger.log(
        level,
        line,
        message.called,
        reason or why,
        attempts[why],
        pause,
        refusal,
        extra=event("task_waits", message.resource),
    )
    kept = broker.without_delays(request.headers)
    kept.pop(RECEIPT, None)  # the receipt belongs to this delivery only
    # Do not use self.retry(): it would spend the user's retries.
    again = message.task.signature_from_request(
        request,
        retries=request.retries,
        # Celery would put this task's own id into an empty parent_id.
        headers={**kept, ATTEMPTS: attempts, "parent_id": request.parent_id},
        **broker.resend_options(app, request, pause),
    )
    again.options.update(original_options(request))
    again.options.pop("redelivered", None)  # Celery copies it together with the exchange
    if not copy:
        store_retry(message.task, request, refusal)
    _send(message, again)
    if copy:
        # The first delivery has the same id: state RETRY would be its state, too, and might stay.
        raise Ignore(str(refusal))
    raise Retry(f"in {pause:.1f} s: {refusal}", exc=refusal, when=pause, sig=again)  # type: ignore[arg-type]


def _level(refusal: NotAcquired, count: int, copy: bool) -> int:
    """Return the log level for a message that is sent again for the `count`-th time."""
    if copy and count & (count - 1):  # not a power of two
        return logging.DEBUG  # a copy tries for as long as its first delivery is running
    if isinstance(refusal, QuorumUnavailable):
        away = frozenset(vote.node for vote in refusal.votes if vote.vote is Vote.SILENT)
        if not unavailable(away, time.monotonic()) and count > 1:
            return logging.DEBUG  # one line is enough for all tasks without a quorum
    ordinary = isinstance(refusal, ResourceHeld) and not refusal.permanent
    return logging.INFO if ordinary else logging.WARNING


def _send(message: Message, again: Any) -> None:
    """Send a message, and try again for a while if that fails.

    Raises:
        Reject: It cannot be sent, but it is not acknowledged yet and can be returned to the broker.
        RedlockError: It can never be sent.
        Exception: It can be neither sent nor returned. When a connection breaks, kombu may raise
            any exception.
    """
    if broker.has_invalid_address(message.request):
        raise RedlockError(
            f"{message.called} cannot be sent again: its message says that it came by an exchange"
            " or a routing key that is no text; find out who wrote it",
            resource=message.resource,
        )

    try:
        send_patiently(message.called, again.apply_async)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        # With late acknowledgement the message can be returned to the broker. Otherwise, or if the
        # broker would drop it, the task must fail: an error is better than a lost message.
        dropped = broker.may_be_dropped(message.task.app, message.request)
        if message.task.acks_late and broker.can_be_returned(message.request) and not dropped:
            raise Reject(error, requeue=True) from error
        raise


def send_patiently(called: str, send: Callable[[], Any]) -> Any:
    """Return what `send` returns; call it again for `SEND_PATIENCE_S` seconds if it fails.

    Args:
        called: The name of the message, for people.
        send: Function that sends it, or raises.

    Raises:
        Exception: The last error of `send`. A message that cannot be encoded is not tried again.
    """

    def warn(attempt: tenacity.RetryCallState) -> None:
        if attempt.attempt_number == 1 and attempt.outcome is not None:
            line = "%s cannot be sent again (%r); trying for %g s"
            logger.warning(
                line,
                called,
                attempt.outcome.exception(),
                SEND_PATIENCE_S,
                extra=event("sending_again_failed"),
            )

    return tenacity.Retrying(
        stop=tenacity.stop_after_delay(SEND_PATIENCE_S),
        wait=tenacity.wait_random_exponential(0.2, max=2.0),
        retry=tenacity.retry_if_not_exception_type((SoftTimeLimitExceeded, EncodeError)),
        before_sleep=warn,
        reraise=True,
    )(send)


def end(message: Message, how: str, refusal: NotAcquired) -> Skipped:
    """End a delivery without its lock; `how` is "skip", "reject" or "raise".

    Raises:
        Reject: `how` is "reject".
        NotAcquired: `how` is "raise".
    """
    if how == "skip":
        logger.info(
            "%s is skipped: %s",
            message.called,
            refusal,
            extra=event("task_skipped", message.resource),
        )
        holder = refusal.holder if isinstance(refusal, ResourceHeld) else refusal
        owner = holder.owner if isinstance(holder, Holder) else None
        return message.skip(owner, "skip", holder)
    if how == "reject":
        logger.info(
            "%s is rejected: %s",
            message.called,
            refusal,
            extra=event("task_rejected", message.resource),
        )
        raise Reject(str(refusal), requeue=False)
    _log_as_expected(message.task, refusal)
    raise refusal


class _EndsDelivery(type):
    """A metaclass that makes `isinstance` true only for refusals that end a delivery.

    If a body asks for another lock and does not catch its refusal, that is not an expected error.
    """

    def __instancecheck__(cls, error: object) -> bool:
        return isinstance(error, NotAcquired) and error.ends_delivery


class _Refusal(metaclass=_EndsDelivery):
    """The entry in `Task.throws` for refusals that end a delivery."""


def _log_as_expected(task: Any, refusal: NotAcquired) -> None:
    """Make Celery log a refusal in one line at level INFO, without a traceback."""
    refusal.ends_delivery = True
    given = task.throws if isinstance(task.throws, tuple) else (task.throws,)
    if _Refusal not in given:
        task.throws = (*given, _Refusal)
