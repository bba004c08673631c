"""Start a worker: check its settings and nodes, watch its pool children, and connect them.

In a worker's main process, a supervisor reads the records of the pool children, extends their
leases while they are stopped or busy, and releases them when they die: see `supervisor.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from billiard import current_process
from celery import _state, signals

from ..config.checks import long_ttl_warning
from ..config.declared import given_to_all, refuse_unread
from ..config.default_node import leftover_warning
from ..config.options import Settings
from ..config.settings import enabled, given_names, read_settings
from ..config.settings import unread as unread_settings
from ..config.task_lock import lock_of
from ..locking.redlock import Redlock
from ..messages.delivery import first_call
from ..messages.endings import end, over, received, refused, release
from ..messages.policy import check_rejecting
from ..messages.publication import publish
from ..messages.run import run
from ..protocol.claim import Claim
from ..protocol.errors import ConfigurationError
from ..protocol.texts import event
from ..protocol.values import quorum_of
from . import remote_control

# Names for `install.py` and `task.py`, so that pool children find them loaded.
__all__ = [
    "announce",
    "begin_beat",
    "check",
    "connect",
    "disconnect",
    "end",
    "first_call",
    "over",
    "publish",
    "received",
    "refused",
    "release",
    "run",
    "supervise",
    "watch_pauses",
]

logger = logging.getLogger("celery_redlock.worker")

_warnings: list[str] = []
"""Warnings of the check of tasks, settings and nodes, until the log is set up."""


def check(sender: Any = None, **_signal: Any) -> None:
    """Refuse to start with an invalid configuration: in the main process, before any task arrives.

    Nodes that are away are not an error. Celery logs the exceptions of a signal handler and goes
    on, unless it is a SystemExit.
    """
    app = sender.app
    remote_control.register()
    try:
        for_all = given_to_all(app)
        unread = [said for task in app.tasks.values() for said in refuse_unread(task, for_all)]
        tasks = _locked_tasks(app)
        settings = read_settings(app) if tasks or given_names(app.conf) else None
        _warnings[:] = [*unread, *unread_settings(app.conf)]
        ttls = [_checked_ttl(task, settings) for task in tasks]
        if not _takes_locks(app):
            return
        redlock = Redlock.from_app(app)
        # Before the pool is forked, so that the children inherit the facts about the nodes.
        _warnings.extend([*redlock.check(ttl=max(ttls)), *_likely_milliseconds(tasks)])
        _warnings.extend(filter(None, [leftover_warning(app)]))
        redlock.client.registry.begin()
        redlock.client.registry.offer()
        if redlock.client.registry.table is not None:
            redlock.client.registry.table.paused = True  # until `PauseWatch` has looked
        from . import refresh, task_events
        from .parking import consumer  # imported late: producers do not need it

        consumer.begin(app)
        refresh.begin(app)
        if read_settings(app).events:
            task_events.begin(app, sender.hostname)
    except ConfigurationError as error:
        logger.critical("celery_redlock: %s", error, extra=event("configuration_error"))
        raise SystemExit(1) from None


def _checked_ttl(task: Any, settings: Settings | None) -> float:
    """Check a task's options; return its ttl, in seconds."""
    try:
        options = lock_of(task).options(task.app, settings)  # type: ignore[union-attr]
    except ConfigurationError as error:
        raise ConfigurationError(f"{task.name}: {error}") from None
    check_rejecting(task, options)
    return options.ttl


def _likely_milliseconds(tasks: Iterable[Any]) -> Iterator[str]:
    """Warn of ttls of more than an hour, once each: a dead worker's lock would stay that long."""
    locks = ((task, lock_of(task)) for task in tasks)
    ttls = {lock.options(task.app).ttl: task.name for task, lock in locks if lock is not None}
    for ttl, name in sorted(ttls.items()):
        if said := long_ttl_warning(ttl):
            yield f"{name}: {said}"


def watch_pauses(sender: Any = None, **_signal: Any) -> None:
    """Watch for pauses, in the main process, so that no task has to."""
    if not _takes_locks(sender.app):
        return
    from .parking.consumer import Parking
    from .pauses import PauseWatch

    parking = sender.on_task_request
    tell = parking.pauses_are if isinstance(parking, Parking) else lambda _pauses: None
    watch = PauseWatch(Redlock.from_app(sender.app), tell)
    signals.worker_shutdown.connect(watch.stop)  # its thread keeps `watch` alive
    watch.start()


def supervise(sender: Any = None, **_signal: Any) -> None:
    """Extend and release, in the main process of a prefork worker, the leases of its children."""
    from celery.concurrency.prefork import TaskPool

    from ..keepalive.supervisor import LeaseSupervisor

    if not isinstance(sender.pool, TaskPool) or not _takes_locks(sender.app):
        return
    redlock = Redlock.from_app(sender.app)
    table = redlock.client.registry.table
    if table is None or redlock.client.registry.own_process:
        return
    from billiard import get_start_method

    if get_start_method() != "fork" and table.address is None:
        logger.warning(
            "this worker spawns its pool children, and cannot see their leases: if a child dies,"
            " its lock stays held for the ttl. Set redlock_keeper = 'process', or"
            " worker_pool_start_method = 'fork'",
            extra=event("children_unsupervised"),
        )
        return
    supervisor = LeaseSupervisor(table, redlock.client.driver, redlock.node_timeout)
    threading.Thread(target=supervisor.run, name="celery_redlock keeper", daemon=True).start()


def announce(sender: Any = None, **_signal: Any) -> None:
    """Log, in the main process, how tasks are locked, and what that does not protect against."""
    app = sender.app
    if _takes_locks(app):
        _announce_locks(app)
    elif _locked_tasks(app):
        logger.warning(
            "redlock_enabled is False: no task takes a lock", extra=event("locks_disabled")
        )
    while _warnings:
        logger.warning("%s", _warnings.pop(0), extra=event("configuration_warning"))


def _announce_locks(app: Any) -> None:
    redlock = Redlock.from_app(app)
    nodes = redlock.nodes
    several, quorum = "" if len(nodes) == 1 else "s", quorum_of(len(nodes))
    answer = redlock.client.answering
    if answer is not None and answer < quorum:
        logger.warning(
            "%d node%s, %d answer%s: nothing can be locked until %d %s (%s)",
            len(nodes),
            several,
            answer,
            "s" if answer == 1 else "",
            quorum,
            "does" if quorum == 1 else "do",
            ", ".join(nodes),
            extra=event("worker_no_quorum"),
        )
    else:
        logger.info(
            "tasks are locked on %d node%s (%s), quorum %d, ttl %g s, keeper %s, restart guard %s",
            len(nodes),
            several,
            ", ".join(nodes),
            quorum,
            redlock.ttl,
            app.conf.get("redlock_keeper", "thread"),
            "on" if redlock.client.guard.on else "off",
            extra=event("worker_started"),
        )
    if app.conf.get("redlock_nodes") is None:
        logger.info(
            "redlock_nodes is not set: tasks are locked on one Redis alone, %s. That keeps copies"
            " of a task apart while this server lives; not when it restarts without its data, fails"
            " over to a replica, or is away. To survive that, name 3 or 5 independent masters.",
            nodes[0],
            extra=event("worker_single_node"),
        )


def connect(**_signal: Any) -> None:
    """Connect a pool child in the background, before its first task."""
    app = _state.get_current_app()
    if _takes_locks(app):
        redlock = Redlock.from_app(app)
        redlock.client.registry.accept()
        # False in a solo worker, whose main process calls this as well.
        redlock.client.registry.in_pool_child = current_process().daemon
        redlock.connect(timeout=0)


def disconnect(**_signal: Any) -> None:
    """In a pool child that ends, prolong its last reservations and read the answer to its release.

    Otherwise the supervisor would take it for dead with a lock, release that again, and log it.
    """
    app = _state.get_current_app()
    if _takes_locks(app):
        redlock = Redlock.from_app(app)
        for claim in _unconfirmed(redlock):
            # Its nodes are away. When they are back this process has ended, but not its parent.
            redlock.client.registry.register(claim)


def leave(sender: Any = None, **_signal: Any) -> None:
    """Warn, in the main process of a worker that ends, of releases that too few nodes confirmed."""
    if not _takes_locks(sender.app):
        return
    for claim in _unconfirmed(Redlock.from_app(sender.app)):
        logger.warning(
            "this worker ends before enough nodes have released %s: it stays taken for up to %.0f"
            " s, or until `celery -A APP redlock release KEY` when they are back",
            claim.resource,
            claim.ttl,
            extra=event("release_unconfirmed", claim.resource),
        )


def _unconfirmed(redlock: Redlock) -> list[Claim]:
    redlock.client.prolonging.now(redlock.node_timeout)
    redlock.client.driver.read(redlock.node_timeout)
    return redlock.client.driver.unconfirmed()


def begin_beat(sender: Any = None, **_signal: Any) -> None:
    """Guard a beat, alone or in a worker (`-B`), by `scheduler.py`, which only beats need."""
    from ..beat import scheduler

    scheduler.guard(sender)


def _takes_locks(app: Any) -> bool:
    return bool(_locked_tasks(app)) and enabled(app.conf)


def _locked_tasks(app: Any) -> list[Any]:
    return [task for task in app.tasks.values() if lock_of(task) is not None]
