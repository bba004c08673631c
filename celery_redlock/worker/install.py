"""Connect the handlers of Celery's signals wherever a task with a lock is declared.

A program that only declares and publishes such tasks needs little of this package. The other
modules are loaded when the first handler or body is called: in a worker at `worker_init`, before
its pool is forked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from celery import signals

from ..config.declared import wrap as watch_declarations
from ..messages.errbacks import wrap as note_error_callbacks
from ..messages.publish import wrap
from . import remote_control

__all__ = ["install", "load"]

HANDLERS: dict[str, tuple[str, ...]] = {
    "release": ("task_postrun", "task_success", "task_failure", "task_retry"),
    "end": ("task_postrun",),
    "over": ("task_revoked", "task_failure"),
    "refused": ("task_rejected", "task_unknown"),
    "received": ("task_received",),
    "check": ("worker_init",),
    "announce": ("worker_ready",),
    "supervise": ("worker_ready",),
    "watch_pauses": ("worker_ready",),
    "begin_beat": ("beat_init",),
    "connect": ("worker_process_init",),
    "disconnect": ("worker_process_shutdown",),
    "leave": ("worker_shutdown",),
}
"""Each handler in `startup.py`, with the signals that call it; one signal calls them in order."""


@functools.cache
def load() -> Any:
    """Return `startup.py`, with all that acquires and releases locks.

    The first call imports it, and with it everything else, so that no import is left to do while a
    lock is held, when a time limit could strike.
    """
    from . import startup

    return startup


def _late(name: str) -> Callable[..., None]:
    """Return a function that calls a handler, and loads it at its first call."""

    def handler(**signal: Any) -> None:
        getattr(load(), name)(**signal)

    return handler


def install() -> None:
    """Connect the handlers, once; importing `locked` or `SingletonTask` does so."""
    wrap()
    watch_declarations()
    note_error_callbacks()
    remote_control.register()
    for handler, names in HANDLERS.items():
        for name in names:
            uid = f"celery_redlock.{handler}.{name}"
            getattr(signals, name).connect(_late(handler), weak=False, dispatch_uid=uid)
