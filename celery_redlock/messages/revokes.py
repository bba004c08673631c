"""Remembers which tasks this process has revoked: the workers may be yet to hear of it."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from celery.app import base

__all__ = ["END", "end", "note_revokes", "was_revoked", "was_terminated"]

END = "redlock_end"
"""Remote command of our workers; see `end`."""

MAX_REVOKED = 10_000
"""Tasks revoked by this process that it remembers: about two megabytes."""

_base: Any = base  # its stubs take what is set below for an error

_revoked: OrderedDict[str, bool] = OrderedDict()
"""By id, the tasks that this process has revoked, and whether it asked for their bodies' end. The
workers are yet to hear of it, and none may be there to."""


def was_revoked(task_id: str) -> bool:
    """Whether this process has revoked a task."""
    return task_id in _revoked


def was_terminated(task_id: str) -> bool:
    """Whether this process has asked for the end of a task's body."""
    return _revoked.get(task_id, False)


def end(app: Any, task_id: str, digest: str, terminate: bool = False) -> None:
    """Ask all workers to discard a message, or to `terminate` a body.

    Anybody who may publish can give a task the id of another. So it is told by the digest of a
    token that the nodes have: of its reservation, or of its lock.
    """
    arguments = {"task_id": task_id, "digest": digest, "terminate": terminate}
    app.control.broadcast(END, arguments=arguments)


@functools.cache
def note_revokes(before_purge: Callable[[Any], tuple[int, bool]]) -> None:
    """Remember what `app.control.revoke` of this process revokes. Idempotent.

    `before_purge` is called with the app before `app.control.purge` deletes all messages, and
    returns how many it has deleted itself, and whether any may be left.

    Celery loads its remote control when an app is first asked for it, which takes as long as half
    of what a producer loads of us. So what is not loaded yet is wrapped then.
    """
    if "celery.app.control" in sys.modules:
        _wrap_control(before_purge)
        return
    control = vars(_base.Celery)["control"]

    def first(app: Any) -> Any:
        found = control.__get__(app, type(app))
        _wrap_control(before_purge)
        _base.Celery.control = control
        return found

    # As Celery's own, it can be set on an app, and deleted.
    _base.Celery.control = property(first, control.__set__, control.__delete__)


def _wrap_control(before_purge: Callable[[Any], tuple[int, bool]]) -> None:
    from celery.app.control import Control

    original = Control.revoke
    if getattr(original, "__redlock__", False):
        return

    @functools.wraps(original)
    def revoke(
        self: Any,
        task_id: Any,
        destination: Any = None,
        terminate: bool = False,
        *rest: Any,
        **options: Any,
    ) -> Any:
        reply = original(self, task_id, destination, terminate, *rest, **options)
        if destination is None:
            several = isinstance(task_id, Iterable) and not isinstance(task_id, str)
            for one in task_id if several else (task_id,):
                _revoked[str(one)] = bool(terminate) or _revoked.get(str(one), False)
            while len(_revoked) > MAX_REVOKED:
                _revoked.popitem(last=False)
        return reply

    revoke.__redlock__ = True  # type: ignore[attr-defined]
    Control.revoke = revoke  # type: ignore[method-assign]
    delete_all = Control.purge

    @functools.wraps(delete_all)
    def purge(self: Any, *args: Any, **options: Any) -> Any:
        gone, more = before_purge(self.app)
        return gone + ((delete_all(self, *args, **options) or 0) if more else 0)

    Control.purge = Control.discard_all = purge  # type: ignore[method-assign]
