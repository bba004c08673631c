"""Take care of a message's reservation, in the process that runs the body.

Before the body a reservation is confirmed, or released, depending on its scope. A message without a
reservation (`send_task`, beats, other languages, a duplicate inside a canvas) tries to take one. If
another message has it, this one is a duplicate and does not run. After the body the reservation is
released, unless the message comes back, or has been sent again.

While the body runs, a reservation is extended and registered like a lock. But with late
acknowledgement it must outlive its worker, because the message does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from celery import states

from ..locking.held import HeldLease
from ..locking.pauses import paused
from ..locking.unlocked import Unlocked
from ..protocol.claim import Claim
from ..protocol.errors import DuplicateTask, QuorumUnavailable
from ..protocol.texts import event, printable
from ..protocol.values import Owner
from ..runtime.clock import monotonic
from . import reservation
from .conflict import Message
from .delivery import PREDECESSOR_PATIENCE_S, Delivery, DoneBefore, unlocked
from .headers import ATTEMPTS, RESERVATION, header_of, is_redelivered, mapping_of, short_id
from .policy import decide_reserved
from .replaced import note_begun
from .reservation import HOUR, WHILE_RUNNING, Reservation, claim_for
from .results import comes_back, end_of, survives
from .skipped import Skipped

__all__ = ["ReservedDelivery", "note_of", "reserved_delivery_of"]

logger = logging.getLogger("celery_redlock.task")

RESERVED_DELIVERY = "redlock_arrival"
"""Attribute of a request for its `ReservedDelivery`."""


class _Replaced(Exception):
    """Internal signal that a later call has taken the place of this message."""


class ReservedDelivery:
    """A delivery and its reservation.

    Attributes:
        note: The description of its reservation: from the message, or else from its task's options.
        passed_on: True if its reservation belongs to another message by now.
        einfo: Celery's report of its failure or retry, once there is one.
    """

    def __init__(self, message: Message) -> None:
        self._message = message
        self._task, self._request = message.task, message.request
        self._redlock, self._options = message.redlock, message.options
        self._header = header_of(message.request, RESERVATION)
        # It was parked or refused before, so other deliveries probably wait behind it here.
        self._contended = bool(mapping_of(message.request, ATTEMPTS))
        self.note = self._reservation_in_header() or Reservation(
            message.resources,
            self._options.scope,
            self._options.on_duplicate,
            self._options.reserve_ttl or HOUR,
        )
        self._claim: Claim | None = None
        self.passed_on = False
        self.einfo: Any = None
        setattr(self._request, RESERVED_DELIVERY, self)

    @property
    def task_id(self) -> Any:
        """The id of the task."""
        return self._request.id

    def _reservation_in_header(self, confirmed: bool = False) -> Reservation | None:
        """Return the reservation in the header, if it is for the resources of this call."""
        if self._header is None:
            return None
        note = Reservation.of(self._header, self.task_id, self._options, confirmed=confirmed)
        return note if note is not None and note.resources == self._message.resources else None

    def run(self, held: HeldLease, body: Callable[[], Any]) -> Any:
        """Run the body if its reservation and then its lock allow it, and its key is not paused."""
        pause = paused(self._redlock, self._message.resources)
        if pause is not None:
            Delivery(self._message, held).put_off(pause)
        self._confirm_scope()
        scope = self.note.scope
        if scope != "while_executing" and not self.note.begun:
            holder: Owner | None = None
            try:
                holder = self._confirm()
            except _Replaced:
                return self._duplicate(None)
            except QuorumUnavailable as refusal:
                # Go on: its lock decides. If too few nodes answer for the lock as well, its own
                # policy applies.
                level = logging.WARNING if scope == "until_executing" else logging.DEBUG
                line = "%s may be a duplicate, but goes on: %s"
                extra = event("duplicate_unknown", self._message.resource)
                logger.log(level, line, self._message.called, refusal, extra=extra)
            if holder is not None:
                return self._duplicate(holder)
            if scope in ("until_executing", "until_and_while_executing"):
                body = partial(self._begin, body)
        if scope == "until_executing":
            return unlocked(self._message, body)
        return Delivery(self._message, held).run(body)

    def _confirm_scope(self) -> None:
        """Ask the nodes for the token if the header has a wider scope than the task.

        The scope of the header counts only if they hold it (see `Reservation.of`).
        """
        asked = self._reservation_in_header(confirmed=True)
        if asked is not None and asked.token and asked.scope != self.note.scope:
            claim = claim_for(self._redlock, asked.resources, asked.ttl, token=asked.token)
            if reservation.look(self._redlock, claim).token == asked.token:
                self.note = asked

    # -- Before the body -------------------------------------------------------------------------

    def _confirm(self) -> Owner | None:
        """Confirm the reservation, or take it; return the owner if another message has it."""
        if not self.note.token:
            return self._take()
        self._claim = claim = self._own_claim()
        if self.note.scope in ("until_executing", "until_and_while_executing"):
            return None  # its release in `_begin` will show if it was ours
        if self.note.scope == "until_expired":  # nothing extends it, so only look who has it
            return self._successor(claim)
        self._register(claim)
        ours = reservation.adopt(self._redlock, claim)
        if ours:
            self._watch(claim)
            return None
        self._stop_extending(claim)
        other = self._successor(claim) if ours is False else None
        # If the other task has ended, its reservation is free, or will be soon.
        return self._take() if other is not None and self._ended(other) else other

    def _successor(self, claim: Claim) -> Owner | None:
        """Return the owner of the reservation that was ours, if the owner's message is in a queue.

        If the reservation has only the short ttl that it gets before its message is sent, that
        message may never be sent. Then ours runs, and sets a mark (`note_begun`), so that our
        reservation is not restored.

        Raises:
            _Replaced: A later call has taken our place.
        """
        seen = reservation.look(self._redlock, claim)
        if seen.replaced:
            raise _Replaced
        if seen.token == claim.token:
            return None
        other = self._other_message(seen.owner)
        if other is not None and seen.left > reservation.unsent_ttl(self._options.ttl):
            return other
        note_begun(self._redlock, claim)
        return None

    def _own_claim(self) -> Claim:
        """Return a claim with the message's token, or with a new one if it has none."""
        # The ttl of the reservation while the body runs.
        ttl = self._options.ttl if self._dies_with_us else max(self.note.ttl, self._options.ttl)
        return claim_for(
            self._redlock,
            self.note.resources,
            ttl,
            self.task_id,
            self._task.name,
            token=self.note.token,
        )

    def _other_message(self, owner: Owner | None) -> Owner | None:
        """Return `owner` if it is another message of this task; else None."""
        if owner is None or owner.task_id in ("", short_id(self.task_id)):
            return None
        return None if reservation.belongs_to_other_task(owner, self._task) else owner

    def _take(self) -> Owner | None:
        """Take a reservation for a message without one; return the owner if another has it."""
        until = time.monotonic() + PREDECESSOR_PATIENCE_S
        freed = False
        while True:
            claim = self._claim = self._own_claim()
            self._register(claim)
            refusal = reservation.take(self._redlock, claim)
            if isinstance(refusal, QuorumUnavailable):
                raise refusal
            if refusal is None:
                break
            self._stop_extending(claim)
            self._claim = None
            seen = reservation.look(self._redlock, claim)
            owner = seen.owner
            if seen.token is None or owner is None or not owner.task_id:
                return None  # nobody has it, or another program does
            if owner.task_id == short_id(self.task_id):
                return self._own(seen.token)
            if self.note.unreserved or reservation.belongs_to_other_task(owner, self._task):
                return None  # both messages run, and the lock decides which is first
            step = decide_reserved(
                self._ended(owner),
                late=time.monotonic() > until,
                freed=freed,
                # For example, the owner is in the group whose chord has this task as its body.
                successor=owner.task_id == short_id(self._request.parent_id),
            )
            if step == "wait":
                reservation.pause(until)
            elif step == "free" and self._free_by_owner(owner):
                freed = True
            else:
                return owner
        self._set_header(claim.token)
        if self.note.scope in WHILE_RUNNING:
            self._watch(claim)
        return None

    def _ended(self, owner: Owner) -> str | None:
        """Return the final state of another task, if it should have released its reservation."""
        return end_of(self._task, owner.task_id, self.note.scope)

    def _free_by_owner(self, owner: Owner) -> bool:
        names, limit = self.note.resources, self._options.limit
        return reservation.free_by_id(self._redlock, names, owner.task_id, limit) is not False

    def _own(self, token: str) -> Owner | None:
        """Continue if the reservation belongs to our task id but is missing from the headers.

        If the broker reports an earlier delivery of the message, that delivery took it, and it is
        confirmed. Otherwise another task may have the same id: go on without a reservation, and
        leave that one alone.
        """
        if not is_redelivered(self._request.delivery_info):
            return None
        self._set_header(token)
        return self._confirm()

    def _set_header(self, token: str, begun: bool = False) -> None:
        """Put the reservation into the headers that a retry of this message will have."""
        self.note = replace(self.note, token=token, begun=begun)
        headers = self._request.headers
        own = headers if isinstance(headers, dict) else {}
        self._request.headers = {**own, RESERVATION: self.note.header()}

    def _begin(self, body: Callable[[], Any]) -> Any:
        """Release the reservation, right before the body, and run the body if it was ours."""
        claim, self._claim = self._claim, None
        if claim is not None and not reservation.start(self._redlock, claim):
            try:
                other = self._successor(claim)
            except _Replaced:
                return self._duplicate(None)
            # A message with late acknowledgement may come back after its body has begun.
            again = is_redelivered(self._request.delivery_info) and survives(self._task)
            if other is not None and not again and not self._ended(other):
                return self._duplicate(other)
        self._set_header("", begun=True)
        return body()

    def _duplicate(self, owner: Owner | None) -> Any:
        """End a duplicate according to `on_duplicate`.

        `owner` has reserved its key; None if a later call has taken its place.
        """
        message, note = self._message, self.note
        who = owner or "a later call, which has taken its place"
        what = f"{note.resource} is reserved by {owner}" if owner else f"it is replaced by {who}"
        skipped = message.skip(owner, note.on_duplicate, who)
        if note.on_duplicate == "raise":
            what = f"{message.called}: {what}"
            task_id = owner.task_id if owner is not None else ""
            raise DuplicateTask(what, task_id, resource=note.resource)
        logger.info(
            "%s is skipped: %s",
            message.called,
            printable(what),
            extra=event("task_skipped", message.resource),
        )
        return skipped

    # -- While the body runs ---------------------------------------------------------------------

    @property
    def _dies_with_us(self) -> bool:
        """True if it must end with this process, because its message does not come back then."""
        return self.note.scope in WHILE_RUNNING and not survives(self._task)

    def _register(self, claim: Claim) -> None:
        if self._dies_with_us:
            self._redlock.client.registry.register(claim)

    def _watch(self, claim: Claim) -> None:
        longest = self._options.max_lifetime
        self._redlock.client.watchdog.watch(claim, self._lost, longest)
        if self._dies_with_us:
            self._redlock.client.registry.granted(claim, longest)

    def _lost(self, claim: Claim) -> None:
        """Log that the reservation is lost.

        The lock still keeps others from running, but nothing keeps copies out of the queue.
        """
        self._redlock.client.registry.unregister(claim)
        logger.warning(
            "%s: its reservation is lost (%s)",
            self._message.called,
            claim.lost,
            extra=event("reservation_lost", self._message.resource),
        )

    def _stop_extending(self, claim: Claim) -> None:
        """Stop extending a claim; its keys stay on the nodes."""
        self._redlock.client.watchdog.drop(claim)
        self._redlock.client.registry.unregister(claim)

    # -- After it --------------------------------------------------------------------------------

    def pass_on(self) -> None:
        """Leave the reservation to the message that is sent again, or to another with its id.

        Nothing more is written for this delivery, because it might arrive after the end of the
        other message.
        """
        self.passed_on = True
        if self._claim is not None and self.note.token:
            self._stop_extending(self._claim)
            self._claim.ended = True

    def unlock(self, held: HeldLease, again: bool) -> None:
        """Release the lock, or leave it locked for the rest of `hold_for`.

        If the message will be delivered `again`, it must find its lock free.
        """
        claim = None if isinstance(held, Unlocked) else held.claim
        if self._options.hold_for and not again and claim is not None:
            now = monotonic()
            left = (claim.granted_at or now) + self._options.hold_for - now
            if left > 0 and claim.held(now):
                held.keep(left)
                return
        # As soon as this body has ended, the worker gives the next delivery to another pool child.
        # That child must not reach the nodes, over another connection, before our release.
        held.release(wait=self._contended)

    def end(self, state: str | None, retval: Any) -> None:
        """Release or keep the reservation, because this delivery is over."""
        if not self.note.token and self._claim is None:
            return
        claim = self._claim or self._own_claim()
        self._redlock.client.watchdog.drop(claim)
        stays = self.passed_on or self.note.scope == "until_expired"
        if not stays and self.note.scope == "until_succeeded" and _succeeded(state, retval):
            claim.ended = True  # its ttl may be longer than the reservation must be kept now
            kept = claim_for(self._redlock, self.note.resources, self.note.ttl, token=claim.token)
            if not reservation.adopt(self._redlock, kept):
                line = "%s has succeeded, and its key is not kept: another may be published"
                extra = event("reservation_not_kept", self._message.resource)
                logger.warning(line, self._message.called, extra=extra)
        elif not stays and not comes_back(self._task, state, retval):
            self._redlock.client.registry.releasing(claim)
            reservation.free(self._redlock, claim)
        self._redlock.client.registry.unregister(claim)


def _succeeded(state: str | None, retval: Any) -> bool:
    """Return True if the body of a message has succeeded, in this delivery or another."""
    return isinstance(retval, DoneBefore) or (
        state == states.SUCCESS and Skipped.of(retval) is None
    )


def reserved_delivery_of(request: Any) -> ReservedDelivery | None:
    """Return the `ReservedDelivery` of a request, or None outside of the body's process."""
    delivery = getattr(request, RESERVED_DELIVERY, None)
    return delivery if isinstance(delivery, ReservedDelivery) else None


def note_of(request: Any) -> Reservation | None:
    """Return the reservation in the message of a request, in order to release it; else None."""
    return (
        Reservation.of(header_of(request, RESERVATION), request.id) if request is not None else None
    )
