"""Hooks that are called with what happens to locks.

Subclass `Listener`, override what interests you, `subscribe()` an instance. Hooks are called in
the thread where the thing happened, often the one that extends leases: be quick. A hook that
raises is logged and never stops a release.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .protocol.errors import LeaseLost, NotAcquired
from .protocol.lease import Lease
from .protocol.values import Owner

__all__ = [
    *("Ask", "Listener", "emit", "emit_node", "heard", "heard_nodes", "heard_releases"),
    *("subscribe", "unsubscribe"),
]

logger = logging.getLogger("celery_redlock.events")


@dataclass(frozen=True)
class Ask:
    """One call for a lock that has ended: granted or refused, perhaps after a wait.

    Attributes:
        resource: What was asked for, as one text.
        owner: Who asked, by its own account.
        lease: What was granted; None if it was refused.
        refusal: Why it was refused: `ResourceHeld` or `QuorumUnavailable`; None if it was granted.
        waited: Seconds from the call to its end.
        attempts: How often the nodes were asked for it.
        nodes: How many nodes there are.
        quorum: How many of them must say yes.
    """

    resource: str
    owner: Owner
    lease: Lease | None
    refusal: NotAcquired | None
    waited: float
    attempts: int
    nodes: int
    quorum: int


class Listener:
    """Hooks that do nothing; override the ones you need."""

    def acquired(self, lease: Lease) -> None:
        """A lock was granted."""

    def held(self, resource: str, holder: object) -> None:
        """An attempt failed because another holds the resource (`holder`: a `Holder` or None)."""

    def unavailable(self, resource: str, votes: tuple[object, ...]) -> None:
        """An attempt failed because too few nodes answered; `votes` has one `NodeVote` each."""

    def acquire_finished(self, ask: Ask) -> None:
        """A call for a lock has ended, after one attempt or many."""

    def extended(self, lease: Lease) -> None:
        """A quorum renewed a lease."""

    def not_extended(self, lease: Lease) -> None:
        """A round failed to renew a lease: it is tried again, until the lease's deadline."""

    def lost(self, loss: LeaseLost) -> None:
        """A lease ended before its holder released it: the work may overlap with another's.

        `loss` says which `lease`, why (`reason`), who held it (`owner`, `task`), for how long
        (`held_for`), and what each node answered last (`votes`). With the reason "stalled" it has
        not ended: its work reports no progress, and keeps it until it ends.
        """

    def released(self, lease: Lease, held: bool) -> None:
        """A lock was given back; `held` tells whether it was ours to the end."""

    def node_answered(self, node: str, seconds: float) -> None:
        """A node answered a request while it was waited for, this long after it was sent.

        Called, like `node_failed`, when the call for a lock that it belongs to is over.
        """

    def node_failed(self, node: str, kind: str) -> None:
        """A node failed us; `kind` is one of `NODE_FAILURES`."""


NODE_FAILURES = ("timeout", "unreachable", "disconnected", "refused", "unsuitable", "data_loss")
"""No answer in time; no connection; a connection that broke; an error in place of an answer or a
welcome; no node at all (a replica, a member of a cluster, one that is listed twice); a node that
has forgotten locks."""

_listeners: tuple[Listener, ...] = ()
_of_nodes: tuple[Listener, ...] = ()
_of_releases: tuple[Listener, ...] = ()


def subscribe(listener: Listener) -> None:
    """Call `listener`'s hooks from now on, in this process and those forked from it."""
    _set((*_listeners, listener))


def unsubscribe(listener: Listener) -> None:
    """Stop calling `listener`."""
    _set(tuple(known for known in _listeners if known is not listener))


def _set(listeners: tuple[Listener, ...]) -> None:
    global _listeners, _of_nodes, _of_releases
    _listeners = listeners
    # Nodes answer ten times where a lock is taken once: only listeners that override these hooks
    # are called.
    _of_nodes = _overriding(Listener.node_answered, Listener.node_failed)
    _of_releases = _overriding(Listener.released)


def _overriding(*hooks: Callable[..., None]) -> tuple[Listener, ...]:
    return tuple(
        listener
        for listener in _listeners
        if any(getattr(type(listener), hook.__name__, hook) is not hook for hook in hooks)
    )


def heard() -> bool:
    """Whether there is a listener; else what a hook would be given need not be made."""
    return bool(_listeners)


def heard_nodes() -> bool:
    """Whether there is a listener to what nodes do."""
    return bool(_of_nodes)


def heard_releases() -> bool:
    """Whether there is a listener to releases, which wants to know what the nodes say."""
    return bool(_of_releases)


def emit(hook: str, *args: Any) -> None:
    """Call one hook of every listener."""
    _call(_listeners, hook, args)


def emit_node(hook: str, *args: Any) -> None:
    """Call one hook of the listeners to what nodes do."""
    _call(_of_nodes, hook, args)


def _call(listeners: tuple[Listener, ...], hook: str, args: tuple[Any, ...]) -> None:
    for listener in listeners:
        try:
            getattr(listener, hook)(*args)
        except Exception:
            # Whatever a listener raises must not change what happens to locks.
            logger.exception("%s.%s failed", type(listener).__name__, hook)
