"""What a delivery does about its message's reservation, in the process that runs the body.

Before the body: a reservation is confirmed, or freed, as its scope says; a message without one
(`send_task`, beats, other languages, a duplicate inside a canvas) tries to take it. Who finds it to
be another's is a duplicate, and does not run. After the body it is freed, unless the message comes
back, or has been sent again.

While the body runs, a reservation is extended like a lock, and registered like one; but with late
acknowledgement it must outlive its worker, for the message does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from celery import states
from celery.exceptions import Reject

from ..config.options import TaskOptions
from ..locking.held import HeldLease, Unlocked
from ..locking.redlock import Redlock
from ..protocol.claim import Claim
from ..protocol.errors import DuplicateTask, QuorumUnavailable, ResourceHeld
from ..protocol.names import Resources
from ..protocol.values import Owner, names_of, printable
from ..runtime.clock import monotonic
from .delivery import LEASE, PREDECESSOR, Delivery
from .headers import is_redelivered, said, short_id
from .reservation import (
    HEADER,
    HOUR,
    Reservation,
    adopt,
    claim_for,
    free,
    free_of,
    holding,
    start,
    take,
)
from .results import end_of
from .signals import task_skipped
from .skipped import Skipped

__all__ = ["ReservedDelivery", "arrival_of", "comes_back", "note_of"]

logger = logging.getLogger("celery_redlock.task")

ARRIVAL = "redlock_arrival"
"""Attribute of a request: what is done about its reservation."""
PAUSE = 0.02
"""Seconds between two looks at a reservation that is about to be freed."""


class ReservedDelivery:
    """A delivery, as far as its reservation is concerned.

    Args:
        task: The task.
        request: Its request.
        redlock: Where it is reserved and locked.
        resource: What it locks.
        options: How.
    """

    def __init__(
        self, task: Any, request: Any, redlock: Redlock, resource: Resources, options: TaskOptions
    ) -> None:
        self._task = task
        self._request = request
        self._redlock = redlock
        self._options = options
        names = names_of(resource)
        ttl = options.reserve_ttl or HOUR
        declared = Reservation(names, options.scope, options.on_duplicate, ttl)
        self._note = self._said(names) or declared
        self._claim: Claim | None = None
        self._watched = self._noted = self.passed_on = False
        setattr(request, ARRIVAL, self)

    @property
    def note(self) -> Reservation:
        """What is known of its reservation."""
        return self._note

    @property
    def task_id(self) -> Any:
        """Of the message."""
        return self._request.id

    def _said(self, names: tuple[str, ...], confirmed: bool = False) -> Reservation | None:
        """What counts of its header, if that is of this very call's resources."""
        header, task_id = said(self._request, HEADER), self._request.id
        note = Reservation.of(header, task_id, self._options, confirmed=confirmed)
        return note if note is not None and note.resources == names else None

    @property
    def _called(self) -> str:
        return printable(f"{self._task.name}[{self._request.id}]")

    @property
    def scope(self) -> str:
        """From when to when its key is taken."""
        return self._note.scope

    def run(self, held: HeldLease, body: Callable[[], Any]) -> Any:
        """Run the body, as its reservation and then its lock allow."""
        self._ask_of_its_call()
        if self.scope == "while_executing" or self._note.begun:
            if self.scope == "until_executing":
                return self._unlocked(body)
            return self._deliver(held, body)
        holder: Owner | None = None
        try:
            holder = self._confirm()
        except QuorumUnavailable as refusal:
            # Its lock decides, and says what is to be done if there is no quorum for that either.
            logger.debug("%s: %s", self._called, refusal)
        if holder is not None:
            return self._duplicate(holder)
        if self.scope == "until_executing":
            return self._unlocked(lambda: self._begin(body))
        if self.scope == "until_and_while_executing":
            return self._deliver(held, lambda: self._begin(body))
        return self._deliver(held, body)

    def _ask_of_its_call(self) -> None:
        """Where its call reserved more than its task does, ask the nodes whether it is so."""
        asked = self._said(self._note.resources, confirmed=True)
        if asked is not None and asked.token and asked.scope != self._note.scope:
            claim = claim_for(self._redlock, asked.resources, asked.ttl, token=asked.token)
            if holding(self._redlock, claim) == asked.token:
                self._note = asked

    def _deliver(self, held: HeldLease, body: Callable[[], Any]) -> Any:
        return Delivery(self._task, self._request, held, self._options).run(body)

    def _unlocked(self, body: Callable[[], Any]) -> Any:
        lease = Unlocked(self._note.resources, self._redlock)
        setattr(self._request, LEASE, lease)  # so that the body's own calls are seen to be such
        with lease:
            return body()

    def _confirm(self) -> Owner | None:
        """Make sure of the reservation; who has it, if that is another."""
        if not self._note.token:
            return self._take()
        self._claim = claim = self._named()
        if self.scope in ("until_executing", "until_and_while_executing"):
            return None  # by freeing it
        if self.scope == "until_expired":
            return self._other(holding(self._redlock, claim))
        other = self._adopt(claim)
        # The place of one that has ended is free, or will be.
        return self._take() if other is not None and self._ended(other) else other

    def _named(self) -> Claim:
        """A claim with the message's token; with a new one if it has none."""
        return claim_for(
            *(self._redlock, self._note.resources, self._ttl, self._request.id, self._task.name),
            token=self._note.token,
        )

    @property
    def _ttl(self) -> float:
        """For how long it is asked for while the body runs; seconds."""
        if self.scope == "until_executed" and not self._survives:
            return self._options.ttl
        return max(self._note.ttl, self._options.ttl)

    @property
    def _survives(self) -> bool:
        """Whether the message comes back if its worker or its process dies."""
        return bool(self._task.acks_late or getattr(self._task, "retry_on_worker_lost", False))

    def _adopt(self, claim: Claim) -> Owner | None:
        self._post(claim)
        ours = adopt(self._redlock, claim)
        if ours:
            self._watch(claim)
            return None
        self._drop(claim)
        if ours is None:
            return None
        return self._other(holding(self._redlock, claim))

    def _other(self, token: str | None) -> Owner | None:
        """The task that has it, if that is not this one."""
        owner = Owner.of(token) if token else None
        if owner is None or owner.task_id in ("", short_id(self._request.id)):
            return None
        return owner

    def _take(self) -> Owner | None:
        """Take a reservation for a message that has none; who has it, if that is another."""
        until = time.monotonic() + PREDECESSOR
        freed = False
        while True:
            self._claim = claim = self._named()
            self._post(claim)
            try:
                take(self._redlock, claim)
            except ResourceHeld:
                self._drop(claim)
                self._claim = None
                token = holding(self._redlock, claim)
                owner = Owner.of(token) if token else None
                if owner is None or not owner.task_id:
                    return None  # nobody has it, or another program
                if owner.task_id == short_id(self._request.id):
                    return self._own(token or "")
                end = self._ended(owner)
                if time.monotonic() > until or end == states.REVOKED:
                    if not end or freed or not self._free_of(owner):
                        return owner
                    freed = True  # and nobody else was about to
                    continue
                # Such as another member of the group whose chord's body this is.
                if not end and owner.task_id != short_id(self._request.parent_id):
                    return owner
                time.sleep(PAUSE)
                continue
            self._tell(claim.token)
            if self.scope == "until_executed":
                self._watch(claim)
            else:
                self._strike_off(claim)
            return None

    def _ended(self, owner: Owner) -> str | None:
        """The state in which another has ended, if it is to have freed its reservation by now."""
        return None if self.scope == "until_expired" else end_of(self._task, owner.task_id)

    def _free_of(self, owner: Owner) -> bool:
        names, limit = self._note.resources, self._options.limit
        return free_of(self._redlock, names, owner.task_id, limit) is not False

    def _own(self, token: str) -> Owner | None:
        """A task with our id has it, though the message does not say so.

        An earlier delivery of the message took it, if the broker says that there was one. Else
        anybody may have used that id: its reservation is left alone, and this one has none.
        """
        if not is_redelivered(self._request.delivery_info):
            return None
        self._tell(token)
        return self._confirm()

    def _tell(self, token: str) -> None:
        """A retry of this message is to have the reservation as well."""
        self._note = replace(self._note, token=token)
        self._head()

    def _head(self) -> None:
        """Put it into the headers that a retry will have."""
        headers = self._request.headers
        self._request.headers = {
            **(headers if isinstance(headers, dict) else {}),
            HEADER: self._note.header(),
        }

    def _begin(self, body: Callable[[], Any]) -> Any:
        """The body's turn has come: free the reservation, and run it if it was ours."""
        claim = self._claim
        if claim is not None:
            ours, token = start(self._redlock, claim)
            self._claim = None
            # One that comes back had begun before, and freed it then.
            if not ours and not is_redelivered(self._request.delivery_info):
                other = self._other(token)
                if other is not None and not self._ended(other):
                    return self._duplicate(other)
        self._note = replace(self._note, token="", begun=True)
        self._head()
        return body()

    def _duplicate(self, owner: Owner) -> Any:
        what = f"{self._note.resource} is reserved by {owner}"
        task_skipped.send(
            sender=self._task,
            resource=self._note.resource,
            task_id=self._request.id,
            holder=owner,
            where="run",
            policy=self._note.on_duplicate,
        )
        if self._note.on_duplicate == "raise":
            raise DuplicateTask(
                f"{self._called}: {what}", owner.task_id, resource=self._note.resource
            )
        logger.info("%s is skipped: %s", self._called, printable(what))
        return Skipped(self._note.resource, str(owner))

    # -- While the body runs ---------------------------------------------------------------------

    def _post(self, claim: Claim) -> None:
        if not self._survives and self.scope == "until_executed":
            self._noted = True
            self._redlock.client.registry.register(claim)

    def _watch(self, claim: Claim) -> None:
        self._watched = True
        self._redlock.client.watchdog.watch(claim, self._lost, self._options.max_lifetime)
        if self._noted:
            self._redlock.client.registry.granted(claim, self._options.max_lifetime)

    def _lost(self, claim: Claim) -> None:
        """Its lock still excludes others; only the queue may fill again."""
        self._strike_off(claim)
        logger.warning("%s: its reservation is lost (%s)", self._called, claim.lost)

    def _strike_off(self, claim: Claim) -> None:
        if self._noted:
            self._redlock.client.registry.unregister(claim)

    def _drop(self, claim: Claim) -> None:
        """No longer keep it alive; what is on the nodes stays there."""
        if self._watched:
            self._redlock.client.watchdog.drop(claim)
        self._watched = False
        self._strike_off(claim)

    # -- After it --------------------------------------------------------------------------------

    def pass_on(self) -> None:
        """The message is sent again (or another with its id): its reservation goes with that one.

        Nothing more is written for this one: it might come behind the other's end.
        """
        self.passed_on = True
        if self._claim is not None and self._note.token:
            self._drop(self._claim)
            self._claim.ended = True

    def unlock(self, held: HeldLease, again: bool) -> None:
        """Give the lock back; or leave it locked for what is left of `hold_for`.

        Args:
            held: The lock.
            again: Whether the message will be delivered again: it must find its lock free.
        """
        claim = None if isinstance(held, Unlocked) else held.claim
        now = monotonic()
        if self._options.hold_for and not again and claim is not None and claim.held(now):
            left = (claim.granted_at or now) + self._options.hold_for - now
            if left > 0:
                held.keep(left)
                return
        held.release()

    def end(self, state: str | None, retval: Any) -> None:
        """This delivery is over."""
        note = self._note
        if not note.token and self._claim is None:
            return
        claim = self._claim or self._named()
        stays = self.passed_on or note.scope == "until_expired"
        if stays or comes_back(self._task, state, retval):
            self._drop(claim)
            return
        if self._watched:
            self._redlock.client.watchdog.drop(claim)
        if self._noted:
            self._redlock.client.registry.releasing(claim)
        free(self._redlock, claim)
        self._strike_off(claim)


def comes_back(task: Any, state: str | None, retval: Any) -> bool:
    """Whether a message whose delivery ended so will be delivered again."""
    if state == states.REJECTED:
        requeue = isinstance(retval, Reject) and getattr(retval, "requeue", False)
        return bool(task.acks_late and requeue)
    # An exception that ends processes: the main process knows, and frees if it is over.
    lost = task.acks_late or getattr(task, "retry_on_worker_lost", False)
    return state is None and bool(lost)


def arrival_of(request: Any) -> ReservedDelivery | None:
    """What a delivery does about its reservation, if it has come to that."""
    arrival = getattr(request, ARRIVAL, None)
    return arrival if isinstance(arrival, ReservedDelivery) else None


def note_of(request: Any) -> Reservation | None:
    """What the message of a request has reserved: to free it."""
    return Reservation.of(said(request, HEADER), request.id) if request is not None else None
