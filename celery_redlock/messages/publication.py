"""Publish under a reservation, and give a duplicate its result.

A reservation is taken before the message is sent, for a few seconds, and travels in a header of the
message. When the message is out, the reservation is prolonged; if the message cannot be sent, it is
released.

Messages that Celery itself sends (members of groups, chords and chains, callbacks, the task that
replaces another) already have an id that others wait for. They are sent in any case, and
`consume.py` decides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from celery import _state, states
from celery.result import EagerResult
from celery.utils.time import maybe_iso8601
from kombu.utils.uuid import uuid

from ..config.checks import MIN_TTL
from ..config.options import TaskOptions
from ..config.settings import enabled
from ..config.task_lock import TaskLock
from ..locking import leases
from ..locking.prolonging import acknowledging
from ..locking.redlock import Redlock
from ..protocol.claim import Claim
from ..protocol.errors import ConfigurationError, DuplicateTask, QuorumUnavailable, ResourceHeld
from ..protocol.texts import event, printable
from ..protocol.values import Holder
from ..runtime.blocking import blocking
from . import reservation
from .broker import seconds_until
from .consume import ReservedDelivery, reserved_delivery_of
from .headers import ATTEMPTS, MAX_ID_CHARS, RESERVATION, short_id
from .policy import decide_reserved
from .replaced import Places
from .reservation import HOUR, MONTH, RESERVING, WHILE_RUNNING, Reservation, claim_for
from .results import end_of, report_skipped
from .revokes import was_terminated
from .skipped import Skipped

__all__ = ["publish"]

logger = logging.getLogger("celery_redlock.task")

_celery_state: Any = _state  # its stubs lack most of it

PATIENCE_S = 0.5
"""Seconds for which publishing tries again if several publish at once and none gets a quorum, or if
the owner of the reservation has ended and is about to release it."""
MAX_REPLACED = 3
"""Maximum number of times that one call takes the place of others, if other calls do the same."""
_CANVAS_OPTIONS = (
    *("root_id", "parent_id", "group_id", "chord", "chain", "reply_to"),
    "replaced_task_nesting",
)
"""Options of a message that is part of something larger."""


def publish(
    task: Any,
    lock: TaskLock,
    given: Any,
    *,
    arguments: tuple[Any, Any],
    task_id: Any,
    options: dict[str, Any],
    original: Callable[..., Any],
) -> Any:
    """Call `apply_async` (`original`) of a task, with a reservation if this call needs one.

    `given` is the call's `lock` argument, or None.
    """
    app, headers = task.app, options.get("headers")
    chosen = lock.options_of_call(app, given) if given is not None else lock.options(app)
    if given is None and isinstance(headers, Mapping) and RESERVATION in headers:
        given = _first_call_options(headers[RESERVATION], task_id, chosen)
        chosen = chosen.replace(**given)
    reserves = chosen.scope in RESERVING or given
    if not reserves or app.conf.task_always_eager or not enabled(app.conf):
        return original(task, *arguments, task_id, **options)
    return _Publication(
        task=task,
        lock=lock,
        chosen=chosen,
        arguments=arguments,
        task_id=task_id,
        options=options,
        original=original,
    ).publish()


@dataclass(frozen=True, kw_only=True)
class _Publication:
    """One call of `apply_async`."""

    task: Any
    lock: TaskLock
    chosen: TaskOptions
    arguments: tuple[Any, Any]
    task_id: Any
    options: dict[str, Any]
    original: Callable[..., Any]

    def publish(self) -> Any:
        args, kwargs = self.arguments
        try:
            given = self.options.get("headers")
            headers = given.get if isinstance(given, Mapping) else None
            names = self.lock.resources(self.task, self.task.run, args or (), kwargs or {}, headers)
        except TypeError:
            # The arguments do not fit. Celery raises, or its worker does if Celery checks none.
            return self._send(self.task_id, None)
        kept = self._existing_reservation(names)
        if kept is not None:
            return self._send_with_existing(kept)
        ttl, lasts = self._times()
        delivery = self._delivery
        unreserved = delivery is not None and delivery.note.unreserved
        policy = self.chosen.on_duplicate
        note = Reservation(names, self.chosen.scope, policy, ttl, unreserved=unreserved)
        if note.scope not in RESERVING:  # the call has another scope than its task
            return self._send(self.task_id, note)
        return self._reserve(note, lasts)

    def _send(self, task_id: Any, note: Reservation | None) -> Any:
        if note is not None:
            headers = self.options.get("headers") or {}
            self.options["headers"] = {**headers, RESERVATION: note.header()}
        return self.original(self.task, *self.arguments, task_id, **self.options)

    def _reserve(self, note: Reservation, lasts: float) -> Any:
        """Take a reservation for `lasts` seconds and send the message, or treat it as duplicate."""
        redlock = Redlock.from_app(self.task.app)
        with Places(redlock, self.task, self.task_id, self.chosen.ttl) as places:
            return self._seek(redlock, note, lasts, places)

    def _seek(self, redlock: Redlock, note: Reservation, lasts: float, places: Places) -> Any:
        chosen, must_send = self.chosen, self._must_be_sent
        task_id = self.task_id or uuid()
        short = reservation.unsent_ttl(chosen.ttl)
        replaced, until = 0, None
        while True:
            claim = claim_for(redlock, note.resources, min(lasts, short), task_id, self.task.name)
            try:
                refusal = reservation.take(redlock, claim)
                if refusal is None:
                    sure = acknowledging(claim)  # note it before anybody can release the key
                    sent = self._send(task_id, replace(note, token=claim.token))
                    places.taken = True
                    if lasts > short:
                        # With `below` it stays as it is if its body has already extended it.
                        redlock.client.prolonging.soon(claim, lasts, sure, below=short)
                    return sent
            except BaseException:  # also an interrupt between the two steps
                reservation.abandon(redlock, claim)
                raise
            if isinstance(refusal, QuorumUnavailable):
                if chosen.on_unavailable == "raise":
                    raise refusal
                return self._send_without(task_id, note, refusal, places)
            if must_send:  # others wait for it: send even a duplicate, and `consume.py` decides
                return self._send(task_id, note)
            holder = refusal.holder if isinstance(refusal, ResourceHeld) else None
            if until is None:
                until = time.monotonic() + PATIENCE_S
            elif isinstance(refusal, ResourceHeld):
                holder = blocking(leases.agreed(redlock.client, refusal))
            if not _is_held_by_task(holder):
                # Several calls have asked at once, or another program has our key.
                if (holder is None or holder.owner is not None) and reservation.pause(until):
                    continue
                why = "no quorum of nodes agrees on one" if holder is None else f"{holder} has it"
                return self._send_without(task_id, note, why, places)
            assert holder is not None and holder.owner is not None
            if reservation.belongs_to_other_task(holder.owner, self.task):
                why = f"{holder} has it, which is another task: give each a template of its own"
                return self._send_without(task_id, note, why, places)
            other = holder.owner.task_id
            # If our id was used before, a stored end may be that of the earlier message.
            again = other == short_id(self.task_id)
            end = None if again else end_of(self.task, other, chosen.scope)
            late, freed = time.monotonic() >= until, replaced >= MAX_REPLACED
            step = decide_reserved(end, late=late, freed=freed)
            if step == "wait":
                reservation.pause(until)
                continue
            revoke = end is None and chosen.on_duplicate == "replace" and not freed
            if step == "free" or revoke:
                replaced += 1
                if self._release_queued(redlock, note, other, places, revoke=revoke):
                    continue
            if places.freed and not self._is_queued(redlock, note, other, places):
                if reservation.pause(until):
                    continue
                why = f"{holder} has it, and may not be published yet"
                return self._send_without(task_id, note, why, places)
            # Another call has taken the places that this one has freed.
            places.taken = bool(places.freed)
            return self._duplicate(task_id, note.resource, holder)

    def _send_without(self, task_id: Any, note: Reservation, why: object, places: Places) -> Any:
        """Send it without a reservation: a duplicate in the queue is better than no message."""
        called = printable(self.task.name)
        # A message that is sent again because of its lock has log lines of its own, and fewer.
        again = ATTEMPTS in (self.options.get("headers") or ())
        level = logging.DEBUG if again else logging.WARNING
        line = "%s is published without a reservation: %s"
        logger.log(level, line, called, why, extra=event("reservation_missing"))
        unreserved = note.unreserved or (note.on_duplicate == "replace" and not self._must_be_sent)
        sent = self._send(task_id, replace(note, unreserved=unreserved))
        places.taken = True
        return sent

    # -- A message that has a reservation ---------------------------------------------------------

    def _existing_reservation(self, names: tuple[str, ...]) -> Reservation | None:
        """Return the reservation that a retry, or a `self.replace()`, already has; else None."""
        if self.task_id is None:
            return None
        headers = self.options.get("headers")
        given = headers.get(RESERVATION) if isinstance(headers, Mapping) else None
        # Confirmed, because it is prolonged only on nodes that hold its token.
        note = Reservation.of(given, self.task_id, self._declared, confirmed=True)
        delivery = self._delivery
        if delivery is not None and (note is None or not note.token):
            note = delivery.note
        if note is None or note.resources != names or not (note.token or note.begun):
            return None
        return note

    def _send_with_existing(self, note: Reservation) -> Any:
        """Send a message with the reservation that it has."""
        if note.begun:
            return self._send(self.task_id, note)
        delivery = self._delivery
        if delivery is not None:
            delivery.pass_on()
        try:
            sent = self._send(self.task_id, note)
        except BaseException:
            if delivery is not None:
                delivery.passed_on = False
            raise
        if note.scope != "until_expired":
            redlock = Redlock.from_app(self.task.app)
            ttl = min(note.ttl + self._delay(), self._longest)
            reservation.prolong(
                redlock, [claim_for(redlock, note.resources, ttl, token=note.token)]
            )
        return sent

    # -- A duplicate -----------------------------------------------------------------------------

    def _duplicate(self, task_id: str, resource: str, holder: Holder) -> Any:
        owner, policy, called = holder.owner, self.chosen.on_duplicate, printable(self.task.name)
        assert owner is not None
        line = "%s is a duplicate, and is not published: %s"
        logger.info(line, called, holder, extra=event("duplicate_not_published", resource))
        report_skipped(self.task, task_id, resource, owner, policy, "publish")
        if policy == "raise":
            why = f"{called} is not published: {resource} is reserved by {owner}"
            raise DuplicateTask(why, owner.task_id, resource=resource)
        # An id that was shortened in the token cannot be used to look up a result.
        if policy == "skip" or len(owner.task_id) > MAX_ID_CHARS:
            marker = Skipped(resource, str(owner))
            return EagerResult(task_id, marker, states.SUCCESS, name=self.task.name)
        return self.task.AsyncResult(owner.task_id)

    def _release_queued(
        self, redlock: Redlock, note: Reservation, other: str, places: Places, *, revoke: bool
    ) -> bool:
        """Release the reservation of a queued task, unless its body is running.

        Return False if the body is running, or that is not known. If the task must be revoked once
        this call is out, its claim is added to `places`.
        """
        if len(other) > MAX_ID_CHARS:
            return False
        # A body that releases its reservation as it begins may have its lock already. Then it began
        # before this call, or will be skipped; this call is published in any case.
        begins = revoke and self.chosen.scope not in WHILE_RUNNING
        anyway = was_terminated(other) or begins
        freed = reservation.free_by_id(redlock, note.resources, other, self.chosen.limit, anyway)
        if revoke and isinstance(freed, Claim):
            places.freed.append(freed)
        return freed is not False

    def _is_queued(self, redlock: Redlock, note: Reservation, other: str, places: Places) -> bool:
        """Return True if `other` has the reservation, and its message is out or its body runs."""
        seen = reservation.look(redlock, claim_for(redlock, note.resources, MIN_TTL))
        if seen.owner is None or seen.owner.task_id != other:
            return False
        freed = {claim.token for claim in places.freed}
        return seen.token not in freed and seen.left > reservation.unsent_ttl(self.chosen.ttl)

    # -- Times -----------------------------------------------------------------------------------

    def _times(self) -> tuple[float, float]:
        """Return how long the key is reserved, from the earliest start and from now; seconds.

        Raises:
            ConfigurationError: The call asks for too long, or a text that it gives is not a time.
        """
        self._check_times()
        reserve_ttl, longest = self.chosen.reserve_ttl, self._longest
        if reserve_ttl is not None and reserve_ttl > longest:
            error = (
                f"{printable(self.task.name)}: one call can reserve its key for {longest:g} s at"
                f" most, and not for {reserve_ttl:g}: declare such a lock_reserve_ttl with the task"
            )
            if not self._must_be_sent:
                raise ConfigurationError(error)
            extra = event("reservation_long")  # others await the task
            logger.warning("%s; it is reserved for %g s", error, longest, extra=extra)
        # A message that comes again brings its own `expires`, which anybody may have written.
        expires = None
        kept = self.chosen.scope == "until_succeeded"  # the key outlives the message
        if reserve_ttl is None and self._delivery is None and not kept:
            expires = seconds_until(self.task.app, self.options.get("expires", self.task.expires))
        ttl = expires if expires is not None else reserve_ttl or HOUR
        lasts = ttl if expires is not None else ttl + self._delay()
        return min(max(ttl, MIN_TTL), longest), min(max(lasts, MIN_TTL), longest)

    def _check_times(self) -> None:
        """Refuse texts that are not times: Celery sends them, and its worker drops the message."""
        for name in ("eta", "expires"):
            when = self.options.get(name)
            try:
                maybe_iso8601(when if isinstance(when, str) else None)
            except ValueError:
                raise ConfigurationError(
                    f"{printable(self.task.name)}: {name} is {printable(repr(when))}, which is no"
                    " time: give a datetime, or a text such as '2030-01-31T12:00:00+00:00'"
                ) from None

    def _delay(self) -> float:
        """Return the seconds until the task may start."""
        later = self.options.get("countdown") or self.options.get("eta")
        return max(0.0, seconds_until(self.task.app, later) or 0.0)

    # --------------------------------------------------------------------------------------------

    @property
    def _declared(self) -> TaskOptions:
        return self.lock.options(self.task.app)

    @property
    def _longest(self) -> float:
        """Maximum seconds from now for which a call can reserve its key."""
        return max(MONTH, self._declared.reserve_ttl or 0.0)

    @property
    def _must_be_sent(self) -> bool:
        """True if others wait for this very message, or it has been sent before."""
        given = {name for name, value in self.options.items() if value}
        if self._delivery is not None or given & {"link", "link_error", "root_id", "parent_id"}:
            return True
        return self.task_id is not None and bool(given & {*_CANVAS_OPTIONS})

    @property
    def _delivery(self) -> ReservedDelivery | None:
        """The delivery of this very message that is running here, or None."""
        return _running_delivery(self.task_id)


def _first_call_options(header: Any, task_id: Any, declared: TaskOptions) -> dict[str, Any]:
    """Return the first call's options for a message sent again; {} for another's header."""
    delivery = _running_delivery(task_id)
    note = delivery.note if delivery is not None else Reservation.of(header, task_id, declared)
    if note is None or not (note.token or delivery):
        return {}
    return {"scope": note.scope, "on_duplicate": note.on_duplicate}


def _running_delivery(task_id: Any) -> ReservedDelivery | None:
    """Return the delivery that is running here, if its message has this id; else None."""
    task = _celery_state._task_stack.top
    delivery = reserved_delivery_of(task.request_stack.top) if task is not None else None
    return delivery if delivery is not None and delivery.task_id == task_id else None


def _is_held_by_task(holder: Holder | None) -> bool:
    """Return True if a task certainly holds the key: a quorum of nodes has its token."""
    if holder is None or holder.owner is None:
        return False
    return bool(holder.owner.task_id) and holder.nodes >= holder.quorum
