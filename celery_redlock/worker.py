"""The signal handlers: a lock is given back at every ending, and a worker is checked at its start.

In the process that runs the body: `task_postrun` comes after every ending that Python survives, in
every pool, after the result is stored and the user's hooks have run. `task_success`,
`task_failure` and `task_retry` release too, where they come first; releasing again is nothing.

In a worker's main process: `task_received` gives every *delivery* a stamp of its own (one task id
can be delivered twice at once), which the pool child puts into its token. When the child dies, the
main process frees by that stamp. See `reaper.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

from celery import _state, signals

from .delivery import LEASE, STAMP, new_stamp
from .errors import ConfigurationError
from .lease import quorum_of
from .lock import Redlock
from .reaper import Reaper
from .settings import given_names, read_settings
from .task import TaskLock, lock_of, resource_of

__all__ = ["install"]

logger = logging.getLogger("celery_redlock.worker")

_reaper: Reaper | None = None


def release(sender: Any = None, **_signal: Any) -> None:
    """The body's process: this delivery is over."""
    request = getattr(sender, "request_stack", None) and sender.request_stack.top
    held = getattr(request, LEASE, None)
    if held is not None:
        held.release()


def received(request: Any = None, **_signal: Any) -> None:
    """The main process: a message was received; nothing of it has run."""
    task = request.task
    if lock_of(task) is None:
        return
    stamp = request.request_dict[STAMP] = new_stamp()
    accepted = request.on_accepted

    def on_accepted(pid: int, time_accepted: float) -> Any:
        # An attribute of this one request: its class may be anybody's.
        if pid != os.getpid():
            _watch(task, request.args, request.kwargs, stamp, pid)
        return accepted(pid, time_accepted)

    succeeded = request.on_success

    def on_success(*args: Any, **kwargs: Any) -> Any:
        # The child has sent a result, of whatever kind: it has ended the body, and freed its lock.
        if _reaper is not None:
            _reaper.forget(stamp)
        return succeeded(*args, **kwargs)

    request.on_accepted = on_accepted
    request.on_success = on_success


def _watch(task: Any, args: Any, kwargs: Any, stamp: str, pid: int) -> None:
    global _reaper
    if _reaper is None or _reaper._pid != os.getpid():
        _reaper = Reaper()

    def free() -> None:
        if not task.app.conf.get("redlock_enabled", True):
            return
        resource = resource_of(task, args, kwargs)
        if resource is not None and Redlock.from_app(task.app).free(resource, stamp):
            logger.warning("freed %s, which pool child %d held when it died", resource, pid)

    _reaper.watch(pid, stamp, free)


def check(sender: Any = None, **_signal: Any) -> None:
    """The main process, before any task is received: refuse to start with settings that cannot be.

    Celery logs what a signal handler raises and goes on; it does not so with SystemExit.
    """
    app = sender.app
    locks = list(_locks(app))
    try:
        if locks or given_names(app.conf):
            read_settings(app)
        for lock in locks:
            lock.options(app)
    except ConfigurationError as error:
        logger.critical("celery_redlock: %s", error)
        raise SystemExit(1) from None


def announce(sender: Any = None, **_signal: Any) -> None:
    """The main process, once its log is set up: say what the locks do not protect against."""
    app = sender.app
    if not any(_locks(app)):
        return
    if not app.conf.get("redlock_enabled", True):
        logger.warning("redlock_enabled is False: no task takes a lock")
        return
    redlock = Redlock.from_app(app)
    nodes = redlock.nodes
    logger.info(
        "tasks are locked on %d node%s (%s), quorum %d, ttl %g s",
        len(nodes),
        "" if len(nodes) == 1 else "s",
        ", ".join(nodes),
        quorum_of(len(nodes)),
        redlock.ttl,
    )
    if len(nodes) % 2 == 0:
        logger.warning(
            "an even number of nodes (%d) survives no more failures than %d do: add or remove one",
            len(nodes),
            len(nodes) - 1,
        )
    if app.conf.get("redlock_nodes") is None:
        logger.info(
            "redlock_nodes is not set: tasks are locked on the broker's Redis alone. That keeps"
            " copies of a task apart while this server lives; not when it restarts without its"
            " data, fails over to a replica, or is away. For that name 3 or 5 independent masters."
        )


def connect(**_signal: Any) -> None:
    """A pool child: connect before its first task, in the background."""
    app = _state.get_current_app()
    if any(_locks(app)) and app.conf.get("redlock_enabled", True):
        Redlock.from_app(app).connect(timeout=0)


def begin_beat(sender: Any = None, **_signal: Any) -> None:
    """A beat, alone or in a worker (`-B`): see `beat.py`, which no other process needs."""
    from . import beat

    beat.guard(sender)


def _locks(app: Any) -> Iterator[TaskLock]:
    return (lock for task in app.tasks.values() if (lock := lock_of(task)) is not None)


def install() -> None:
    """Connect the handlers of Celery's signals. Whoever imports `locked` or `SingletonTask` has."""
    for ending in ("task_postrun", "task_success", "task_failure", "task_retry"):
        signal = getattr(signals, ending)
        signal.connect(release, weak=False, dispatch_uid=f"celery_redlock.{ending}")
    signals.task_received.connect(received, weak=False, dispatch_uid="celery_redlock.received")
    signals.worker_init.connect(check, weak=False, dispatch_uid="celery_redlock.check")
    signals.worker_ready.connect(announce, weak=False, dispatch_uid="celery_redlock.announce")
    signals.beat_init.connect(begin_beat, weak=False, dispatch_uid="celery_redlock.beat")
    signals.worker_process_init.connect(connect, weak=False, dispatch_uid="celery_redlock.connect")
