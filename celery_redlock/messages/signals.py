"""Send Celery signals for the events of the core; `celery_redlock.signals` documents them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Any

from celery import _state
from celery.utils import dispatch

from ..events import Ask, Listener, subscribe, unsubscribe
from ..protocol.errors import LeaseLost, ResourceHeld
from ..protocol.lease import Lease
from ..protocol.names import RESERVED_SUFFIX
from ..protocol.values import Owner
from .headers import attempts_of, short_id

__all__ = [
    "beat_deduplicated",
    "lock_acquired",
    "lock_contended",
    "lock_extended",
    "lock_lost",
    "lock_released",
    "lock_unavailable",
    "task_skipped",
]

_celery_state: Any = _state  # its stubs lack most of it
_dispatch: Any = dispatch  # it has no stubs

MAX_LEASES = 10_000
"""Maximum number of leases whose task is remembered. A lease that is left to expire causes no
event, so the oldest entries are removed."""


class _LockSignal(_dispatch.Signal):  # type: ignore[misc]
    """A signal for an event of the core, which is listened to from the first receiver on."""

    def connect(self, *args: Any, **kwargs: Any) -> Any:
        """Connect a receiver, as in Celery, and start to listen."""
        _bridge.listen(True)
        return super().connect(*args, **kwargs)

    def disconnect(self, *args: Any, **kwargs: Any) -> Any:
        """Disconnect a receiver, as in Celery, and stop listening if it was the last one."""
        gone = super().disconnect(*args, **kwargs)
        if not any(signal.receivers for signal in _OF_LOCKS):
            _bridge.listen(False)
        return gone


lock_acquired = _LockSignal(
    name="lock_acquired", providing_args={"resource", "lease", "owner", "waited", "attempts"}
)
lock_contended = _LockSignal(name="lock_contended", providing_args={"resource", "holder", "waited"})
lock_unavailable = _LockSignal(
    name="lock_unavailable", providing_args={"resource", "votes", "waited"}
)
lock_extended = _LockSignal(name="lock_extended", providing_args={"resource", "lease"})
lock_lost = _LockSignal(name="lock_lost", providing_args={"resource", "loss"})
lock_released = _LockSignal(
    name="lock_released", providing_args={"resource", "lease", "held", "held_for"}
)
task_skipped = _dispatch.Signal(
    name="task_skipped", providing_args={"resource", "task_id", "holder", "where", "policy"}
)
beat_deduplicated = _dispatch.Signal(
    name="beat_deduplicated", providing_args={"resource", "entry", "tick", "where"}
)

_OF_LOCKS = (
    *(lock_acquired, lock_contended, lock_unavailable),
    *(lock_extended, lock_lost, lock_released),
)


class _Bridge(Listener):
    """The listener that sends a Celery signal for each event of the core."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listens = False
        self._tasks: OrderedDict[str, Any] = OrderedDict()

    def listen(self, wanted: bool) -> None:
        """Subscribe to the events, or unsubscribe."""
        with self._lock:
            if wanted is not self._listens:
                (subscribe if wanted else unsubscribe)(self)
                self._listens = wanted

    def acquire_finished(self, ask: Ask) -> None:
        if is_tick(ask.resource, ask.owner):
            return
        task = task_of(ask.owner)
        if ask.lease is not None:
            self._remember(ask.lease.token, task)
            if not lock_acquired.receivers:
                return
        waited, attempts = total_wait(task, ask)
        if ask.lease is not None:
            lock_acquired.send(
                sender=task,
                resource=ask.resource,
                lease=ask.lease,
                owner=Owner.of(ask.lease.token),
                waited=waited,
                attempts=attempts,
            )
        elif isinstance(ask.refusal, ResourceHeld):
            lock_contended.send(
                sender=task, resource=ask.resource, holder=ask.refusal.holder, waited=waited
            )
        elif ask.refusal is not None:
            lock_unavailable.send(
                sender=task, resource=ask.resource, votes=ask.refusal.votes, waited=waited
            )

    def extended(self, lease: Lease) -> None:
        if lock_extended.receivers and not lease.resource.endswith(RESERVED_SUFFIX):
            owner = Owner.of(lease.token)
            if not is_tick(lease.resource, owner):
                task = self._task_of_token(lease.token, owner)
                lock_extended.send(sender=task, resource=lease.resource, lease=lease)

    def lost(self, loss: LeaseLost) -> None:
        if not is_tick(str(loss.resource), loss.owner):
            task = self._task_of_token(loss.lease.token if loss.lease else "", loss.owner)
            lock_lost.send(sender=task, resource=loss.resource, loss=loss)

    def released(self, lease: Lease, held: bool) -> None:
        owner = Owner.of(lease.token)
        task = self._task_of_token(lease.token, owner)
        self._tasks.pop(lease.token, None)
        if is_tick(lease.resource, owner) or not lock_released.receivers:
            return
        lock_released.send(
            sender=task,
            resource=lease.resource,
            lease=lease,
            held=held,
            held_for=max(0.0, lease.clock() - lease.granted_at),
        )

    def _remember(self, token: str, task: Any) -> None:
        """Remember the task of a lease, because the threads that extend it run for no task."""
        if task is not None:
            self._tasks[token] = task
        if len(self._tasks) > MAX_LEASES:
            self._tasks.popitem(last=False)

    def _task_of_token(self, token: str, owner: Owner | None) -> Any:
        task = self._tasks.get(token)
        return task if task is not None else task_of(owner)


_bridge = _Bridge()


def task_of(owner: Owner | None) -> Any:
    """Return the task of a lock: the one that runs here, or the one named by its owner."""
    here = _celery_state._task_stack.top
    name = owner.task if owner is not None else ""
    if here is not None and name in ("", short_id(here.name)):
        return here
    return named(name)


def named(name: str, *apps: Any) -> Any:
    """Return the task of that name in `apps`, the current app or any other; None if unknown."""
    if not name:
        return None
    # Do not call get_current_app(): if there is no app, it would make one.
    current = getattr(_celery_state._tls, "current_app", None) or _celery_state.default_app
    for app in (*apps, current, *_celery_state._get_active_apps()):
        if app is not None and app.finalized and name in app._tasks:
            return app._tasks[name]
    return None


def total_wait(task: Any, ask: Ask) -> tuple[float, int]:
    """Return for how many seconds, and in how many attempts, a task has waited in all.

    The time while it was parked, and the attempts before it was sent again, are included.
    """
    request = task.request_stack.top if task is not None else None
    if request is None or not ask.owner.task_id or short_id(request.id) != ask.owner.task_id:
        return ask.waited, ask.attempts
    before = attempts_of(request)
    waited = max(ask.waited, time.time() - before["since"])
    return waited, ask.attempts + before["held"] + before["unavailable"]


def is_tick(resource: str, owner: Owner | None) -> bool:
    """Return True if it is a beat's claim on a tick: its stamp is its first ttl in seconds."""
    return resource.startswith("beat:") and owner is not None and "." in owner.stamp
