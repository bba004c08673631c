"""Remember the tasks that this process has revoked, because workers may not have noticed yet."""

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
"""Maximum number of revoked tasks that are remembered: about two megabytes."""

_base: Any = base  # its stubs would make the assignments below an error

_revoked: OrderedDict[str, bool] = OrderedDict()
"""The tasks that this process has revoked, by id; True if it also asked to terminate the body. The
workers may not have received the revoke yet, or there may be no worker."""


def was_revoked(task_id: str) -> bool:
    """Return True if this process has revoked a task."""
    return task_id in _revoked


def was_terminated(task_id: str) -> bool:
    """Return True if this process has asked to terminate a task's body."""
    return _revoked.get(task_id, False)


def end(app: Any, task_id: str, digest: str, terminate: bool = False) -> None:
    """Ask all workers to discard a message, or to `terminate` a body.

    Anybody who may publish can give a task the id of another. So the message is identified by the
    digest of a token that the nodes have: that of its reservation, or of its lock.
    """
    arguments = {"task_id": task_id, "digest": digest, "terminate": terminate}
    app.control.broadcast(END, arguments=arguments)


@functools.cache
def note_revokes(before_purge: Callable[[Any], tuple[int, bool]]) -> None:
    """Wrap `app.control.revoke` of this process to remember its tasks. Idempotent.

    `before_purge` is called with the app before `app.control.purge` deletes all messages. It
    returns the number of messages that it has deleted itself, and True if any may be left.

    Celery loads its remote control when `app.control` is first used. That takes half as long as
    everything that a producer loads of this library, so we do not load it: if it is not loaded yet,
    it is wrapped then.
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

    # Like Celery's own property, it can be set on an app, and deleted.
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
