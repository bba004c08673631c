"""Publishing under a reservation, and what a duplicate gets.

`Task.apply_async` is wrapped, once, for all tasks; of one whose scope reserves nothing it remains
what it was. A reservation is taken before the message is sent, for seconds, and travels in a header
of it. When the message is out it is made to last; if that cannot be sent, it is freed.

What Celery itself sends has an id already, that others wait for (members of groups, chords and
chains, callbacks, what replaces a task): that is sent in any case, and `consume.py` decides.
"""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from celery import _state, states
from celery.app.task import Task
from celery.result import EagerResult
from kombu.utils.uuid import uuid

from ..config.checks import MIN_TTL
from ..config.options import TaskOptions
from ..config.settings import enabled
from ..config.task_lock import TaskLock, lock_of
from ..locking.redlock import Redlock
from ..protocol.errors import ConfigurationError, DuplicateTask, QuorumUnavailable, ResourceHeld
from ..protocol.values import Holder, printable
from .broker import seconds_until
from .consume import ReservedDelivery, arrival_of
from .headers import LONG, short_id
from .reservation import (
    HEADER,
    HOUR,
    RESERVING,
    SHORT,
    Reservation,
    claim_for,
    free_of,
    give_up,
    longest_of,
    prolong,
    take,
)
from .results import end_of, note_revokes, was_terminated
from .signals import task_skipped
from .skipped import Skipped

__all__ = ["wrap"]

logger = logging.getLogger("celery_redlock.task")

_celery_state: Any = _state  # its stubs lack most of it

TRYING = 0.5
"""Seconds to try on, where several publish at once and none gets a quorum; or where the one that
has it has ended, and is about to free it."""
PAUSE = 0.02
"""Seconds between two tries then, at most."""
REPLACING = 3
"""How often to take the place of others, where others do so as well."""
_BY_PLACE = ("producer", "link", "link_error", "shadow")
"""What `apply_async` may also be given by position, after the task's id."""
FROZEN = (
    *("root_id", "parent_id", "group_id", "chord", "chain", "reply_to"),
    "replaced_task_nesting",
)
"""Options of what is part of something larger."""


def wrap(task_class: Any = Task) -> None:
    """Wrap `apply_async` of all tasks, and note what is revoked here. Again is nothing."""
    note_revokes()
    original = task_class.apply_async
    if getattr(original, "__redlock__", False):
        return

    @functools.wraps(original)
    def apply_async(
        self: Any,
        args: Any = None,
        kwargs: Any = None,
        task_id: Any = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        lock = lock_of(self)
        if lock is None:
            if "lock" in options and not _is_stamp("lock", options):
                raise ConfigurationError(
                    f"{self.name} takes no lock, so there is nothing that lock= could change for"
                    " one call of it: give it SingletonTask as its base, or @locked"
                )
            return original(self, args, kwargs, task_id, *rest, **options)
        given = None if _is_stamp("lock", options) else options.pop("lock", None)
        headers = options.get("headers")
        again = isinstance(headers, Mapping) and HEADER in headers
        if given is None and not again and lock.scope not in RESERVING:
            return original(self, args, kwargs, task_id, *rest, **options)
        app = self.app
        conf = app.conf
        wish = lock.options_of_call(app, given) if given is not None else lock.options(app)
        if given is None and again:
            given = _given_before(options["headers"][HEADER], task_id, wish)
            wish = replace(wish, **given) if given else wish
        if wish.scope not in RESERVING and not given:
            return original(self, args, kwargs, task_id, *rest, **options)
        options.update(zip(_BY_PLACE, rest, strict=False))
        if conf.task_always_eager or not enabled(conf):
            return original(self, args, kwargs, task_id, **options)

        def send(task_id: Any, note: Reservation | None) -> Any:
            if note is not None:
                headers = options.get("headers")
                options["headers"] = {**(headers or {}), HEADER: note.header()}
            return original(self, args, kwargs, task_id, **options)

        return _Publication(self, app, lock, wish, args, kwargs, task_id, options, send).publish()

    apply_async.__redlock__ = True  # type: ignore[attr-defined]
    task_class.apply_async = apply_async


class _Publication:
    """One call of `apply_async`."""

    def __init__(
        self,
        task: Any,
        app: Any,
        lock: TaskLock,
        wish: TaskOptions,
        args: Any,
        kwargs: Any,
        task_id: Any,
        options: Mapping[str, Any],
        send: Callable[[Any, Reservation | None], Any],
    ) -> None:
        self._task = task
        self._app = app
        self._lock = lock
        self._wish = wish
        self._args = args
        self._kwargs = kwargs
        self._task_id = task_id
        self._options = options
        self._send = send

    def publish(self) -> Any:
        task = self._task
        try:
            names = self._lock.resources(task, task.run, self._args or (), self._kwargs or {})
        except TypeError:
            # Arguments that do not fit. Celery says so, or, where it checks none, its worker.
            return self._send(self._task_id, None)
        wish = self._wish
        kept = self._kept(names) if self._task_id is not None else None
        if kept is not None:
            return kept()
        ttl, lasts = self._times()
        note = Reservation(names, wish.scope, wish.on_duplicate, ttl)
        if wish.scope not in RESERVING:  # for this call
            return self._send(self._task_id, note)
        redlock = Redlock.from_app(self._app)
        frozen = self._frozen
        task_id = self._task_id or uuid()
        replaced = 0
        until = 0.0
        while True:
            # Shorter than what a body has, so that one is told from the other.
            short = max(MIN_TTL, min(SHORT, wish.ttl / 2))
            claim = claim_for(redlock, names, min(lasts, short), task_id, task.name)
            try:
                try:
                    take(redlock, claim)
                except ResourceHeld as refusal:
                    holder = refusal.holder
                except QuorumUnavailable as error:
                    if wish.on_unavailable == "raise":
                        raise
                    logger.warning("%s is published without a reservation: %s", self._called, error)
                    return self._send(task_id, note)
                else:
                    sent = self._send(task_id, replace(note, token=claim.token))
                    if lasts > short:
                        # Unless its body has begun already, which has a ttl of its own.
                        longer = claim_for(redlock, names, lasts, token=claim.token)
                        longer.below = short
                        prolong(redlock, [longer])
                    return sent
            except BaseException:  # also one that strikes in between
                give_up(redlock, claim)
                raise
            if frozen:
                return self._send(task_id, note)
            if not _names_a_task(holder):
                # Several have asked at once; or another program has our key.
                until = until or time.monotonic() + TRYING
                if (holder is None or holder.owner is not None) and _pause(until):
                    continue
                why = "no quorum of nodes agrees on one" if holder is None else f"{holder} has it"
                logger.warning("%s is published without a reservation: %s", self._called, why)
                return self._send(task_id, note)
            assert holder is not None and holder.owner is not None
            other = holder.owner.task_id
            # An id that is used again may have ended before, and be queued now.
            ended = wish.scope != "until_expired" and other != short_id(self._task_id)
            end = end_of(self._task, other) if ended else None
            if end is not None and end != states.REVOKED:
                # Its result is stored before its key is freed. Whoever has just read it is no
                # duplicate, and would be given a result again that he has seen.
                until = until or time.monotonic() + TRYING
                if _pause(until):
                    continue
            if replaced < REPLACING and (end is not None or wish.on_duplicate == "replace"):
                replaced += 1
                if self._takes_place_of(redlock, names, other, revoke=end is None):
                    continue
            return self._duplicate(task_id, note.resource, holder)

    # -- A message that has a reservation ---------------------------------------------------------

    def _kept(self, names: tuple[str, ...]) -> Callable[[], Any] | None:
        """How to send what has a reservation already: a retry, or what takes a task's place."""
        headers = self._options.get("headers")
        given = headers.get(HEADER) if isinstance(headers, Mapping) else None
        declared = self._lock.options(self._app)
        # Prolonged where the nodes hold its token, and nowhere else.
        note = Reservation.of(given, self._task_id, declared, confirmed=True)
        arrival = self._arrival
        if arrival is not None and (note is None or not note.token):
            note = arrival.note
        if note is None or note.resources != names or not (note.token or note.begun):
            return None

        def send() -> Any:
            if note.begun:
                return self._send(self._task_id, note)
            if arrival is not None:
                arrival.pass_on()
            try:
                sent = self._send(self._task_id, note)
            except BaseException:
                if arrival is not None:
                    arrival.passed_on = False
                raise
            if note.scope != "until_expired":
                redlock = Redlock.from_app(self._app)
                ttl = min(note.ttl + self._delay(), longest_of(declared))
                prolong(redlock, [claim_for(redlock, names, ttl, token=note.token)])
            return sent

        return send

    # -- A duplicate -----------------------------------------------------------------------------

    def _duplicate(self, task_id: str, resource: str, holder: Holder) -> Any:
        assert holder.owner is not None
        other = holder.owner.task_id
        policy = self._wish.on_duplicate
        logger.debug("%s is a duplicate: %s", self._called, holder)
        task_skipped.send(
            sender=self._task,
            resource=resource,
            task_id=task_id,
            holder=holder.owner,
            where="publish",
            policy=policy,
        )
        if policy == "raise":
            raise DuplicateTask(
                f"{self._called} is not published: {resource} is reserved by {holder.owner}",
                other,
                resource=resource,
            )
        if policy == "skip" or len(other) > LONG:  # shortened: there is no result of that name
            marker = Skipped(resource, str(holder.owner))
            return EagerResult(task_id, marker, states.SUCCESS, name=self._task.name)
        return self._task.AsyncResult(other)

    def _takes_place_of(
        self, redlock: Redlock, names: tuple[str, ...], other: str, *, revoke: bool
    ) -> bool:
        """Free the place of one that is queued, if it is not running already; whether it may be."""
        if len(other) > LONG:
            return False
        freed = free_of(redlock, names, other, self._wish.limit, was_terminated(other))
        if freed and revoke:
            self._app.control.revoke(other)
            logger.info("%s replaces task %s", self._called, printable(other))
        return freed is not False

    # -- Times -----------------------------------------------------------------------------------

    def _times(self) -> tuple[float, float]:
        """How long it is reserved from when it may start, and from now; seconds.

        Raises:
            ConfigurationError: The call asks for too long.
        """
        reserve_ttl, longest = self._wish.reserve_ttl, longest_of(self._lock.options(self._app))
        if reserve_ttl is not None and reserve_ttl > longest:
            error = (
                f"{self._called}: one call can reserve its key for {longest:g} s at most, and not"
                f" for {reserve_ttl:g}: declare such a lock_reserve_ttl with the task"
            )
            if not self._frozen:
                raise ConfigurationError(error)
            logger.warning("%s; it is reserved for %g s", error, longest)  # others wait for it
        # What comes again brings its `expires` along, which anybody may have written.
        said = reserve_ttl is None and self._arrival is None
        expires = self._expires() if said else None
        ttl = expires if expires is not None else reserve_ttl or HOUR
        lasts = ttl if expires is not None else ttl + self._delay()
        return min(max(ttl, MIN_TTL), longest), min(max(lasts, MIN_TTL), longest)

    def _delay(self) -> float:
        """Seconds until it may start."""
        later = self._options.get("countdown") or self._options.get("eta")
        return max(0.0, seconds_until(self._app, later) or 0.0)

    def _expires(self) -> float | None:
        """Seconds until it expires; None if it does not."""
        return seconds_until(self._app, self._options.get("expires", self._task.expires))

    # --------------------------------------------------------------------------------------------

    @property
    def _frozen(self) -> bool:
        """Whether others wait for this very message, or it has been sent before."""
        options = self._options
        if self._arrival is not None:
            return True
        if options.get("link") or options.get("link_error"):
            return True  # callbacks of its own
        if options.get("root_id") or options.get("parent_id"):
            return True
        return self._task_id is not None and any(options.get(name) for name in FROZEN)

    @property
    def _arrival(self) -> ReservedDelivery | None:
        """The delivery of this very message that is at work here."""
        return _arrival_of(self._task_id)

    @property
    def _called(self) -> str:
        return printable(self._task.name)


def _given_before(header: Any, task_id: Any, declared: TaskOptions) -> dict[str, Any]:
    """What was chosen for a message that is sent again; nothing if it is another's header."""
    arrival = _arrival_of(task_id)
    if arrival is not None:
        note: Reservation | None = arrival.note
    else:
        note = Reservation.of(header, task_id, declared)
    if note is None or not (note.token or arrival):
        return {}
    return {"scope": note.scope, "on_duplicate": note.on_duplicate}


def _is_stamp(name: str, options: Mapping[str, Any]) -> bool:
    """Whether an option is a stamp: Celery hands on those of a message, whatever they are called"""
    stamped = options.get("stamped_headers")
    return isinstance(stamped, (list, tuple, set, frozenset, str, dict)) and name in stamped


def _arrival_of(task_id: Any) -> ReservedDelivery | None:
    """The delivery that is at work here, if it is of the message with this id."""
    task = _celery_state._task_stack.top
    arrival = arrival_of(task.request_stack.top) if task is not None else None
    return arrival if arrival is not None and arrival.task_id == task_id else None


def _pause(until: float) -> bool:
    """Wait a moment, if there is one left; whether there was."""
    if time.monotonic() >= until:
        return False
    time.sleep(random.uniform(0.001, PAUSE))
    return True


def _names_a_task(holder: Holder | None) -> bool:
    """Whether a task certainly has it: enough nodes say so, or the rest could not make a quorum."""
    owner = holder.owner if holder is not None else None
    return (
        holder is not None
        and owner is not None
        and bool(owner.task_id)
        and holder.nodes >= holder.quorum
    )
