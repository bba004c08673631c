"""Run a task's body under its lock: for a delivery by a worker, a plain call or an eager one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from celery.exceptions import Retry

from ..config.declared import app_of
from ..config.failure import unpack
from ..config.settings import enabled
from ..config.task_lock import TaskLock
from ..locking.held import HeldLease
from ..locking.pauses import believed, limited, paused
from ..locking.redlock import Redlock
from ..locking.request import LockRequest
from ..locking.unlocked import Unlocked
from ..protocol.errors import (
    ConfigurationError,
    NotAcquired,
    QuorumUnavailable,
    RedlockError,
    ResourceHeld,
)
from ..protocol.names import checked_names
from ..protocol.rate import Rate
from ..protocol.texts import shown
from ..protocol.values import Owner, Vote
from ..runtime.interrupt import Interruptible
from .autoretry import run_around
from .conflict import Message
from .consume import ReservedDelivery
from .delivery import first_call
from .errbacks import taken
from .headers import MAX_RETRIES, count, header_of, short_id
from .policy import parks

__all__ = ["run"]


def _traced(task: Any, request: Any) -> Any:
    """Return the request that Celery's tracer works with, and gives to the signal handlers.

    A worker without Celery's optimizations, as in tests, may run the body on a copy of it.
    """
    if request is None or request.id is None:
        return request
    return next((one for one in task.request_stack.stack if one.id == request.id), request)


def run(
    lock: TaskLock,
    task: Any,
    request: Any,
    function: Callable[..., Any],
    body: functools.partial[Any],
) -> Any:
    """Run a body, which calls a task's function, under the lock of that call; return its result.

    `task` and `request` are None if a plain function was called. A delivery that must not run
    returns a `Skipped`, or raises one of Celery's exceptions.

    Raises:
        NotAcquired: The call is not a worker's delivery, and its lock is held or no quorum answers.
    """
    callback = taken(lock)
    if callback is not None:
        task, request = callback.task, None
    request = _traced(task, request)
    app = app_of(lock, task)
    delivered = first_call(request)
    eager = request is not None and request.is_eager and not request.called_directly
    headers = functools.partial(header_of, request) if delivered or eager else None
    resources = lock.resources(task, function, body.args, body.keywords, headers)
    if not enabled(app.conf):
        with Unlocked(resources):
            return body()
    options = lock.options(app)
    # If this worker parks deliveries, none waits in its pool slot, unless its task declares a wait.
    parked = delivered and parks(options) and not lock.has_wait
    if delivered:
        body = functools.partial(body.func, *unpack(task, body.args), **body.keywords)
    redlock = Redlock.from_app(app)
    if len(resources) > 1:  # a single one was checked with its key and its task's declaration
        checked_names(resources, fencing=options.fencing)
        if options.shared:
            raise ConfigurationError(
                f"{shown(resources)}: a shared lock is of one key; return one from the function"
                " that makes it"
            )
    limit = declared = lock.limit(options, task, function, body.args, body.keywords, headers)
    if limit != 1:
        limit = limited(believed(redlock), resources, limit)
    asked = LockRequest(
        names=resources,
        ttl=options.ttl,
        # An error callback does not wait either, in the process of the failed task: it is sent as a
        # task instead.
        wait=0.0 if parked or callback else options.wait,
        owner=_owner(redlock.client.owner, task, request if delivered else None),
        fencing=options.fencing,
        limit=limit,
        declared=declared,
        shared=options.shared,
        recall=options.hold_for,
    )
    if (pace := options.pace) is not None:
        held = _rate_holder(redlock, asked, pace)
    else:
        held = HeldLease(redlock, asked, max_lifetime=options.max_lifetime)
    held.task = task.name if task is not None else ""
    guards: list[Callable[[Callable[[], Any]], Any]] = []
    if options.on_lost == "raise":
        block = Interruptible(held.loss, held.lost_unnoticed)
        held.on_lost = lambda _held: block.interrupt()
        guards.append(block.run)
    elif callable(options.on_lost):
        held.on_lost = options.on_lost
    if delivered and options.progress_timeout is not None:
        from ..locking.progress import Progress  # imported here: most programs do not need it

        guards.append(Progress(held, options.progress_timeout, options.on_lost).run)
    body = functools.partial(run_around, task, lock, guards, body)
    if delivered:
        message = Message(task, request, redlock, resources, options)
        try:
            return ReservedDelivery(message).run(held, body)
        except Retry as again:
            if isinstance(again.exc, NotAcquired):
                # Drop the frames, because Celery copies them, which takes half a millisecond.
                raise again.with_traceback(None) from again.exc
            raise
    if callback is not None and (pause := paused(redlock, resources)) is not None:
        callback.send(ResourceHeld(str(pause), resource=held.resource))
        return None
    if options.scope == "until_executing":  # under this scope a body has no lock
        with Unlocked(resources, redlock):
            return body()
    entered = False
    try:
        with held:
            entered = True
            return body()
    except RedlockError as refusal:
        # Any RedlockError: it may also share the lock of the failed task, and that lock may be
        # lost, or may not do what its own options require.
        if entered:
            raise
        if callback is None:
            if eager and isinstance(refusal, QuorumUnavailable) and refusal.retry_after is None:
                raise _no_server(redlock, refusal) from refusal
            raise
        callback.send(refusal)
        return None


def _rate_holder(redlock: Redlock, request: LockRequest, pace: Rate) -> HeldLease:
    """Return the rate-limit holder that is used instead of a lock.

    Raises:
        ConfigurationError: A function has made several keys.
    """
    from ..locking.start import Start  # imported here: most programs do not need it

    if len(request.names) > 1:
        raise ConfigurationError(
            f"{request.resource}: a rate is of one key; return one from the function that makes it"
        )
    return Start(redlock, request.names[0], pace, wait=request.wait, owner=request.owner)


def _no_server(redlock: Redlock, refusal: QuorumUnavailable) -> QuorumUnavailable:
    """Return the error of an eager call, most often that of a test whose servers do not run."""
    silent = [vote for vote in refusal.votes if vote.vote is Vote.SILENT]
    store = redlock.client.addresses[0].store
    who = (
        "servers that hold the locks do"
        if len(silent) > 1
        else f"{store} that holds the locks does"
    )
    why = ", ".join(f"{vote.node}: {vote.detail}" for vote in silent)
    return QuorumUnavailable(
        f"the {who} not answer ({why}); in a test, the fixture fake_redlock takes locks in memory",
        resource=refusal.resource,
        votes=refusal.votes,
    )


def _owner(here: Owner, task: Any, delivered: Any) -> Owner | None:
    """Return the owner of the lock: a task that is called here, or a delivery (its request).

    For a plain function there is none.
    """
    if task is None:
        return None
    if delivered is None:
        return Owner(here.host, here.pid, task=short_id(task.name))
    retries, stamp = count(delivered.retries, MAX_RETRIES), os.urandom(8).hex()
    return Owner(here.host, here.pid, short_id(delivered.id), retries, stamp, short_id(task.name))
