"""Keep the reservations of received messages whose bodies have not begun, in the main process.

A worker's main process holds such messages because they have an ETA, are parked, or find no free
pool slot. Meanwhile it prolongs their reservations. It releases those of revoked messages, which
Celery itself discards only when they are due. A thread looks at all of them twice a second, because
no signal is sent for a revoke before the message is due: a revoke can come by a command, from
another worker, from the state file or by stamps, and all of these end in the same two sets.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from celery.utils.collections import LimitedSet
from celery.utils.functional import maybe_list

from ..config.options import TaskOptions
from ..locking.redlock import Redlock
from ..protocol.texts import event, printable
from ..protocol.values import token_digest
from ..runtime.clock import monotonic
from .headers import RESERVATION, header_of
from .reservation import UNSENT_TTL_S, Reservation, claim_of, free, prolong

__all__ = ["discard", "hold", "is_discarded", "is_revoked", "may_be_a_duplicate"]

logger = logging.getLogger("celery_redlock.worker")

POLL_INTERVAL_S = 0.5
"""Seconds between two looks, so that a revoked message's key is free within a second."""

MIN_PAUSE_S = 1.0
"""Minimum seconds between two extensions of one reservation, because anybody may have written its
ttl."""


class _HeldMessage:
    """The reservation of a message that is held here, and the time of its next extension."""

    __slots__ = ("due", "note", "soon")

    def __init__(self, note: Reservation) -> None:
        self.note = note
        # Its producer may have died before it prolonged the reservation.
        self.soon = min(note.ttl, UNSENT_TTL_S) / 3
        self.due = monotonic() + self.soon


_lock = threading.Lock()
_held: weakref.WeakKeyDictionary[Any, _HeldMessage] = weakref.WeakKeyDictionary()
"""The held messages, by request. Celery's own list lacks those with an ETA before 5.7."""
_thread: threading.Thread | None = None
_discarded: Any = LimitedSet(maxlen=10_000, expires=10_800)  # as Celery's own set of revoked ids


def discard(digest: str) -> None:
    """Make Celery discard the message whose reservation token has this digest.

    If the message is not here yet, it is discarded when it comes.
    """
    _discarded.add(digest)
    with _lock:
        held = list(_held.items())
    for request, one in held:
        if token_digest(one.note.token) == digest:
            _discard(request)


def _discard(request: Any) -> None:
    """Discard a message, unless the pool has it; Celery removes it when it is due."""
    if request._apply_result is not None or request.acknowledged:
        return
    name = printable(f"{request.name}[{request.id}]")
    logger.info(
        "%s is discarded: a later call has taken its place", name, extra=event("task_discarded")
    )
    request.revoked = partial(_is_over, request)
    request._announce_revoked("revoked", False, None, False)
    _remove(request)


def _is_over(request: Any) -> bool:
    from celery.worker.state import task_ready  # imported here: producers do not need it

    task_ready(request)  # Celery does the same when it finds a message revoked
    return True


def is_discarded(request: Any) -> bool:
    """Return True if a message is over because a later call has taken its place."""
    return "revoked" in vars(request)


def hold(request: Any, note: Reservation) -> None:
    """Look after the reservation of a message that has just been received. Never waits."""
    global _thread
    if _discarded and token_digest(note.token) in _discarded:
        _discard(request)
        return
    with _lock:
        _held[request] = _HeldMessage(note)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="celery_redlock reservations", daemon=True)
            _thread.start()


def _run() -> None:
    global _thread
    while True:
        time.sleep(POLL_INTERVAL_S)
        with _lock:
            held = list(_held.items())
            if not held:
                _thread = None
                return
        try:
            _look(held)
        except Exception:
            logger.exception(
                "reservations could not be prolonged or freed; trying again in %g s",
                POLL_INTERVAL_S,
                extra=event("reservations_unattended"),
            )


def _look(held: Sequence[tuple[Any, _HeldMessage]]) -> None:
    now = monotonic()
    due: dict[Any, list[tuple[Any, _HeldMessage]]] = {}
    for request, one in held:
        if request.acknowledged or request.time_start is not None:
            _remove(request)  # its body has begun, or it is over
        elif is_revoked(request):
            what = printable(f"{request.name}[{request.id}]"), printable(one.note.resource)
            redlock = Redlock.from_app(request.app)
            ballot = free(redlock, claim_of(redlock, one.note), redlock.node_timeout)
            if ballot.quorum_answered:
                logger.info(
                    "%s is revoked: its reservation of %s is freed",
                    *what,
                    extra=event("task_revoked"),
                )
            else:
                why = "its reservation of %s is freed when enough nodes answer"
                logger.warning(f"%s is revoked: {why}", *what, extra=event("task_revoked"))
            _remove(request)
        elif now >= one.due:
            due.setdefault(request.app, []).append((request, one))
    for app, several in due.items():
        redlock = Redlock.from_app(app)
        claims = [claim_of(redlock, one.note) for _request, one in several]
        ballots = prolong(redlock, claims, redlock.node_timeout)
        gone = {claim for ballot in ballots for claim in ballot.refused()}
        sure = {claim for ballot in ballots for claim in ballot.confirmed()}
        for (request, one), claim in zip(several, claims, strict=True):
            pause = one.note.ttl / 3 if claim in sure else one.soon
            one.due = monotonic() + max(pause, MIN_PAUSE_S)
            if claim in gone:  # another has it, or nobody; then the body takes it as it begins
                _remove(request)


def _remove(request: Any) -> None:
    with _lock:
        _held.pop(request, None)


def is_revoked(request: Any) -> bool:
    """Return True if a message is revoked, by its id or by one of its stamps."""
    from celery.worker.state import revoked, revoked_stamps  # imported here: not for producers

    try:
        return request.id in revoked or any(
            stamp in maybe_list(revoked_stamps.get(name) or [])
            for name, its_own in (request.stamps.items() if revoked_stamps else ())
            for stamp in maybe_list(its_own) or []
        )
    except (AttributeError, TypeError):  # forged stamps: Celery refuses the message when it is due
        return False


def may_be_a_duplicate(request: Any, options: TaskOptions) -> bool:
    """Return True if its key may be reserved for another message; the body's process will check."""
    note = Reservation.of(header_of(request.request_dict, RESERVATION), request.id, options)
    if note is not None:
        return note.scope != "while_executing" and not (note.token or note.begun)
    return options.scope != "while_executing"
