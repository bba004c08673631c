"""What a worker does at its start: the handlers are connected, and settings and nodes are checked.

In a worker's main process, a supervisor reads what the pool children hold, extends it where they
are stopped or busy, and frees it when they die: see `supervisor.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

from celery import _state, signals

from ..config.declared import given_to_all, refuse_unread
from ..config.declared import wrap as watch_declarations
from ..config.settings import enabled, given_names, read_settings
from ..config.task_lock import TaskLock, lock_of
from ..locking.redlock import Redlock
from ..messages.endings import end, over, received, refused, release, succeeded
from ..messages.policy import check_rejecting
from ..messages.publish import wrap
from ..protocol.errors import ConfigurationError
from ..protocol.values import quorum_of
from . import remote_control

__all__ = ["install"]

logger = logging.getLogger("celery_redlock.worker")

_warnings: list[str] = []
"""What the check of the nodes brought to light, until there is a log to say it in."""


def check(sender: Any = None, **_signal: Any) -> None:
    """The main process, before any task is received: refuse to start with what cannot be.

    Settings that contradict themselves, nodes that are none. (Nodes that are away are no error.)

    Celery logs what a signal handler raises and goes on; it does not so with SystemExit.
    """
    app = sender.app
    remote_control.register()
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
            redlock.client.registry.begin()
            redlock.client.registry.offer()
            from . import refresh, task_events
            from .parking import consumer  # of no use to producers

            consumer.begin(app)
            refresh.begin(app)
            if read_settings(app).events:
                task_events.begin(app, sender.hostname)
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

    from ..keepalive.supervisor import LeaseSupervisor

    if not isinstance(sender.pool, TaskPool) or not _locking(sender.app):
        return
    redlock = Redlock.from_app(sender.app)
    table = redlock.client.registry.table
    if table is not None and not redlock.client.registry.own_process:
        from billiard import get_start_method

        if get_start_method() != "fork" and table.address is None:
            logger.warning(
                "pool children are spawned here, and cannot be kept by this process: what one holds"
                " when it dies stays locked for its ttl. Set redlock_keeper = 'process', or"
                " worker_pool_start_method = 'fork'"
            )
            return
        keeper = LeaseSupervisor(table, redlock.client.driver, redlock.node_timeout)
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
        redlock.client.registry.accept()
        redlock.connect(timeout=0)


def begin_beat(sender: Any = None, **_signal: Any) -> None:
    """A beat, alone or in a worker (`-B`): see `scheduler.py`, which no other process needs."""
    from ..beat import scheduler

    scheduler.guard(sender)


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
    remote_control.register()
    signals.task_received.connect(received, weak=False, dispatch_uid="celery_redlock.received")
    signals.worker_init.connect(check, weak=False, dispatch_uid="celery_redlock.check")
    signals.worker_ready.connect(announce, weak=False, dispatch_uid="celery_redlock.announce")
    signals.worker_ready.connect(keep, weak=False, dispatch_uid="celery_redlock.keep")
    signals.beat_init.connect(begin_beat, weak=False, dispatch_uid="celery_redlock.beat")
    signals.worker_process_init.connect(connect, weak=False, dispatch_uid="celery_redlock.connect")
