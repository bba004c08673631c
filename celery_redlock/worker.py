"""The signal handlers: a lock is given back at every ending, and a worker is checked at its start.

In the process that runs the body: `task_postrun` comes after every ending that Python survives, in
every pool, after the result is stored and the user's hooks have run. `task_success`,
`task_failure` and `task_retry` release too, where they come first; releasing again is nothing.

In a worker's main process: a keeper reads what the pool children hold, extends it where they are
stopped or busy, and frees it when they die. See `supervisor.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from celery import _state, signals, states
from celery.exceptions import Retry

from . import inspection
from .config.declared import given_to_all, refuse_unread
from .config.declared import wrap as watch_declarations
from .config.settings import enabled, given_names, read_settings
from .config.task_lock import TaskLock, lock_of
from .locking.held import mark_done
from .locking.redlock import Redlock
from .messages.conflict import check_rejecting
from .messages.consume import arrival_of, comes_back, note_of
from .messages.delivery import lease_of
from .messages.headers import is_redelivered, mark_copy, receive, said
from .messages.publish import wrap
from .messages.received import hold
from .messages.reservation import HEADER, Reservation, free_soon
from .protocol.errors import ConfigurationError, NotAcquired
from .protocol.values import quorum_of

__all__ = ["install"]

logger = logging.getLogger("celery_redlock.worker")

_warnings: list[str] = []
"""What the check of the nodes brought to light, until there is a log to say it in."""


def succeeded(sender: Any = None, **_signal: Any) -> None:
    """The body's process: this delivery has come to its end, and not only to an end."""
    request = _request_of(sender)
    held = lease_of(request)
    if held is not None:
        mark_done(held)


def _request_of(task: Any) -> Any:
    """What a task is at work on in this thread; None for nothing."""
    stack = getattr(task, "request_stack", None)
    return stack.top if stack else None


def release(
    sender: Any = None,
    signal: Any = None,
    state: str | None = None,
    retval: Any = None,
    **_signal: Any,
) -> None:
    """The body's process: this delivery is over."""
    request = _request_of(sender)
    held = lease_of(request)
    arrival = arrival_of(request)
    if held is None or arrival is None:
        return
    again = signal is signals.task_retry
    if signal is signals.task_postrun:
        again = state == states.RETRY or comes_back(sender, state, retval)
    arrival.unlock(held, again)


def end(sender: Any = None, state: str | None = None, retval: Any = None, **_signal: Any) -> None:
    """The body's process: this delivery is over, and what it was reserved for."""
    request = _request_of(sender)
    arrival = arrival_of(request)
    if arrival is not None:
        arrival.end(state, retval)
    else:  # it did not come to a body
        note = note_of(request)
        if note is not None and not comes_back(sender, state, retval):
            _free(sender.app, note)
    if isinstance(retval, Retry) and isinstance(retval.exc, NotAcquired):
        # Each holds frames that hold it, and Celery's copy of them all: half a megabyte, which
        # would wait for a full collection.
        retval.__traceback__ = retval.exc.__traceback__ = None


def over(sender: Any = None, request: Any = None, **_signal: Any) -> None:
    """The main process: a message was revoked or has expired; or, unseen, its body has died."""
    if request is None:
        request = _request_of(sender)
    note = note_of(request)
    if note is not None and arrival_of(request) is None:
        _free(sender.app, note)


def refused(sender: Any = None, message: Any = None, **_signal: Any) -> None:
    """The main process: a message cannot be read, or its task is not known here."""
    headers = getattr(message, "headers", None)
    if isinstance(headers, Mapping):
        note = Reservation.of(said(headers, HEADER), headers.get("id"))
        if note is not None:
            _free(sender.app, note)


def _free(app: Any, note: Reservation) -> None:
    """Free what a message had that is over."""
    if note.token and note.scope != "until_expired" and enabled(app.conf):
        free_soon(Redlock.from_app(app), note)


def received(request: Any = None, **_signal: Any) -> None:
    """The main process: note when a message came, and how; is it at work here already?

    While it is held here, its reservation is.

    After a lost connection a worker may be given its own message again, and begin with it only when
    the first has ended: too late to meet its lock.
    """
    lock = lock_of(request.task)
    if lock is None:
        return
    receive(request.request_dict, request.content_type)
    header, options = said(request.request_dict, HEADER), lock.options(request.task.app)
    note = Reservation.of(header, request.id, options, confirmed=True)
    if note is not None and note.token and note.scope != "until_expired":
        hold(request, note)
        if request.task.acks_late:
            _free_if_untold(request, note)
    if not is_redelivered(request.delivery_info):
        return
    _free_at_success(request)
    from celery.worker import state  # of no use to producers

    at_work = (other for other in tuple(state.active_requests) if other is not request)
    if any(_same_message(other, request) for other in at_work):
        mark_copy(request.request_dict)


def _same_message(one: Any, other: Any) -> bool:
    """Whether two requests are deliveries of one message: an id can be given to several."""
    return bool(one.id == other.id and one.name == other.name and one.body == other.body)


def _free_if_untold(request: Any, note: Reservation) -> None:
    """Free it also where Celery acknowledges a message and then fails to say that its body failed.

    Before 5.7 it does so when a body has raised SystemExit, which it cannot store as a result.
    """
    on_failure, app = request.on_failure, request.app

    def failed(*outcome: Any, **more: Any) -> Any:
        try:
            return on_failure(*outcome, **more)
        except BaseException:
            if request.acknowledged:
                _free(app, note)
            raise

    request.on_failure = failed


def _free_at_success(request: Any) -> None:
    """A message that comes again may be known to be done (`worker_deduplicate_successful_tasks`).

    Then nothing else tells of its end; and if its first body's process died just before it was to
    free the reservation, nobody has.
    """
    note = Reservation.of(said(request.request_dict, HEADER), request.id)
    if note is None or not note.token:
        return
    on_success, app = request.on_success, request.app

    def succeeded(outcome: Any, **more: Any) -> Any:
        result = on_success(outcome, **more)
        if not outcome[0]:
            _free(app, note)
        return result

    request.on_success = succeeded


def check(sender: Any = None, **_signal: Any) -> None:
    """The main process, before any task is received: refuse to start with what cannot be.

    Settings that contradict themselves, nodes that are none. (Nodes that are away are no error.)

    Celery logs what a signal handler raises and goes on; it does not so with SystemExit.
    """
    app = sender.app
    inspection.register()
    locks = list(_locks(app))
    try:
        for task in app.tasks.values():
            refuse_unread(task, given_to_all(app))
        if locks or given_names(app.conf):
            read_settings(app)
        for task in app.tasks.values():
            if (lock := lock_of(task)) is not None:
                check_rejecting(task, _options(task, lock))
        # A lock that is kept for longer than its ttl can be forgotten for longer, too.
        ttls = [max(lock.options(app).ttl, lock.options(app).hold_for) for lock in locks]
        if _locking(app):
            redlock = Redlock.from_app(app)
            # Before the pool is forked: the children know what we know of the nodes.
            _warnings[:] = redlock.check(ttl=max(ttls))
            redlock.client.custody.begin()
            redlock.client.custody.offer()
            from . import monitor, parking, refresh  # of no use to producers

            parking.begin(app)
            refresh.begin(app)
            if read_settings(app).events:
                monitor.begin(app, sender.hostname)
    except ConfigurationError as error:
        logger.critical("celery_redlock: %s", error)
        raise SystemExit(1) from None


def _options(task: Any, lock: TaskLock) -> Any:
    try:
        return lock.options(task.app)
    except ConfigurationError as error:
        raise ConfigurationError(f"{task.name}: {error}") from None


def keep(sender: Any = None, **_signal: Any) -> None:
    """The main process of a prefork worker: keep what its children hold."""
    from celery.concurrency.prefork import TaskPool

    from .keepalive.supervisor import Keeper

    if not isinstance(sender.pool, TaskPool) or not _locking(sender.app):
        return
    redlock = Redlock.from_app(sender.app)
    board = redlock.client.custody.board
    if board is not None and not redlock.client.custody.own_process:
        from billiard import get_start_method

        if get_start_method() != "fork" and board.address is None:
            logger.warning(
                "pool children are spawned here, and cannot be kept by this process: what one holds"
                " when it dies stays locked for its ttl. Set redlock_keeper = 'process', or"
                " worker_pool_start_method = 'fork'"
            )
            return
        keeper = Keeper(board, redlock.client.driver, redlock.node_timeout)
        threading.Thread(target=keeper.run, name="celery_redlock keeper", daemon=True).start()


def announce(sender: Any = None, **_signal: Any) -> None:
    """The main process, once its log is set up: say what the locks do not protect against."""
    app = sender.app
    if not any(_locks(app)):
        return
    if not enabled(app.conf):
        logger.warning("redlock_enabled is False: no task takes a lock")
        return
    redlock = Redlock.from_app(app)
    nodes = redlock.nodes
    logger.info(
        "tasks are locked on %d node%s (%s), quorum %d, ttl %g s, keeper %s, restart guard %s",
        len(nodes),
        "" if len(nodes) == 1 else "s",
        ", ".join(nodes),
        quorum_of(len(nodes)),
        redlock.ttl,
        app.conf.get("redlock_keeper", "thread"),
        "on" if redlock.client.guard.on else "off",
    )
    if len(nodes) % 2 == 0:
        logger.warning(
            "an even number of nodes (%d) survives no more failures than %d do: add or remove one",
            len(nodes),
            len(nodes) - 1,
        )
    while _warnings:
        logger.warning("%s", _warnings.pop(0))
    if app.conf.get("redlock_nodes") is None:
        logger.info(
            "redlock_nodes is not set: tasks are locked on one Redis alone, %s. That keeps copies"
            " of a task apart while this server lives; not when it restarts without its data, fails"
            " over to a replica, or is away. For that name 3 or 5 independent masters.",
            nodes[0],
        )


def connect(**_signal: Any) -> None:
    """A pool child: connect before its first task, in the background."""
    app = _state.get_current_app()
    if _locking(app):
        redlock = Redlock.from_app(app)
        redlock.client.custody.accept()
        redlock.connect(timeout=0)


def begin_beat(sender: Any = None, **_signal: Any) -> None:
    """A beat, alone or in a worker (`-B`): see `beat.py`, which no other process needs."""
    from . import beat

    beat.guard(sender)


def _locking(app: Any) -> bool:
    return any(_locks(app)) and enabled(app.conf)


def _locks(app: Any) -> Iterator[TaskLock]:
    return (lock for task in app.tasks.values() if (lock := lock_of(task)) is not None)


def install() -> None:
    """Connect the handlers of Celery's signals. Whoever imports `locked` or `SingletonTask` has."""
    signals.task_success.connect(
        succeeded, weak=False, dispatch_uid="celery_redlock.succeeded"
    )  # before it is released
    for ending in ("task_postrun", "task_success", "task_failure", "task_retry"):
        signal = getattr(signals, ending)
        signal.connect(release, weak=False, dispatch_uid=f"celery_redlock.{ending}")
    signals.task_postrun.connect(end, weak=False, dispatch_uid="celery_redlock.end")
    for ending in ("task_revoked", "task_failure"):
        signal = getattr(signals, ending)
        signal.connect(over, weak=False, dispatch_uid=f"celery_redlock.over.{ending}")
    for ending in ("task_rejected", "task_unknown"):
        signal = getattr(signals, ending)
        signal.connect(refused, weak=False, dispatch_uid=f"celery_redlock.refused.{ending}")
    wrap()
    watch_declarations()
    inspection.register()
    signals.task_received.connect(received, weak=False, dispatch_uid="celery_redlock.received")
    signals.worker_init.connect(check, weak=False, dispatch_uid="celery_redlock.check")
    signals.worker_ready.connect(announce, weak=False, dispatch_uid="celery_redlock.announce")
    signals.worker_ready.connect(keep, weak=False, dispatch_uid="celery_redlock.keep")
    signals.beat_init.connect(begin_beat, weak=False, dispatch_uid="celery_redlock.beat")
    signals.worker_process_init.connect(connect, weak=False, dispatch_uid="celery_redlock.connect")
