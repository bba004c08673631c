"""Hooks for the events of locks.

Subclass `Listener`, override the hooks that you need, and `subscribe()` an instance. Hooks are
called in the thread where the event happened, often the thread that extends leases: be quick. An
exception from a hook is logged, and never stops a release.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .protocol.errors import LeaseLost, NotAcquired
from .protocol.lease import Lease
from .protocol.texts import event
from .protocol.values import Owner

__all__ = ["Ask", "Listener", "subscribe", "unsubscribe"]

logger = logging.getLogger("celery_redlock.events")


@dataclass(frozen=True)
class Ask:
    """One finished call for a lock: granted or refused, perhaps after a wait.

    Attributes:
        resource: The requested resource, as one text.
        owner: The caller, as described in its token.
        lease: The granted lease; None if the call was refused.
        refusal: Why it was refused: `ResourceHeld` or `QuorumUnavailable`; None if it was granted.
        waited: Seconds from the call to its end.
        attempts: How often the nodes were asked for it.
        nodes: The number of nodes.
        quorum: The number of nodes that must say yes.
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
        """Handle the grant of a lock."""

    def held(self, resource: str, holder: object) -> None:
        """Handle an attempt that failed because of another holder (a `Holder`, or None)."""

    def unavailable(self, resource: str, votes: tuple[object, ...]) -> None:
        """Handle an attempt that failed because too few nodes answered.

        `votes` has one `NodeVote` per node.
        """

    def acquire_finished(self, ask: Ask) -> None:
        """Handle the end of a call for a lock, after one attempt or many."""

    def extended(self, lease: Lease) -> None:
        """Handle the renewal of a lease by a quorum."""

    def not_extended(self, lease: Lease) -> None:
        """Handle a round that failed to renew a lease; it is tried again until the deadline."""

    def lost(self, loss: LeaseLost) -> None:
        """Handle a lease that ended before its holder released it.

        The work may overlap with another's. `loss` has the `lease`, the `reason`, the holder
        (`owner`, `task`), the seconds for which it was held (`held_for`), and the last answer of
        each node (`votes`). With the reason "stalled" the lease has not ended: its work reports no
        progress, and keeps the lease until it ends.
        """

    def released(self, lease: Lease, held: bool) -> None:
        """Handle the release of a lock; `held` is True if it was ours to the end."""

    def node_answered(self, node: str, seconds: float) -> None:
        """Handle a node's answer that was waited for; `seconds` is the time since the request.

        This is called, like `node_failed`, when the call for a lock is over that the request
        belongs to.
        """

    def node_failed(self, node: str, kind: str) -> None:
        """Handle a failure of a node; `kind` is one of `NODE_FAILURES`."""


NODE_FAILURES = ("timeout", "unreachable", "disconnected", "refused", "unsuitable", "data_loss")
"""The kinds of failures of a node. In this order: no answer in time; no connection; a broken
connection; an error in place of an answer or of a handshake; a server that cannot be a node (a
replica, a member of a cluster, a server that is listed twice); forgotten locks."""

_listeners: tuple[Listener, ...] = ()
_of_nodes: tuple[Listener, ...] = ()
_of_releases: tuple[Listener, ...] = ()


def subscribe(listener: Listener) -> None:
    """Call `listener`'s hooks from now on, in this process and in processes forked from it."""
    _set((*_listeners, listener))


def unsubscribe(listener: Listener) -> None:
    """Stop calling `listener`."""
    _set(tuple(known for known in _listeners if known is not listener))


def _set(listeners: tuple[Listener, ...]) -> None:
    global _listeners, _of_nodes, _of_releases
    _listeners = listeners
    # Keep the listeners that override these hooks, and call no others: for each lock that is taken,
    # nodes answer ten times.
    _of_nodes = _overriding(Listener.node_answered, Listener.node_failed)
    _of_releases = _overriding(Listener.released)


def _overriding(*hooks: Callable[..., None]) -> tuple[Listener, ...]:
    return tuple(
        listener
        for listener in _listeners
        if any(getattr(type(listener), hook.__name__, hook) is not hook for hook in hooks)
    )


def has_listeners() -> bool:
    """Return True if there is a listener; if not, the arguments of hooks need not be made."""
    return bool(_listeners)


def has_node_listeners() -> bool:
    """Return True if there is a listener to the events of nodes."""
    return bool(_of_nodes)


def has_release_listeners() -> bool:
    """Return True if there is a listener to releases, which needs the answers of the nodes."""
    return bool(_of_releases)


def emit(hook: str, *args: Any) -> None:
    """Call one hook of every listener."""
    _call_hooks(_listeners, hook, args)


def emit_node(hook: str, *args: Any) -> None:
    """Call one hook of the listeners to the events of nodes."""
    _call_hooks(_of_nodes, hook, args)


def _call_hooks(listeners: tuple[Listener, ...], hook: str, args: tuple[Any, ...]) -> None:
    for listener in listeners:
        try:
            getattr(listener, hook)(*args)
        except Exception:
            # An exception of a listener must not change the course of a lock.
            logger.exception(
                "%s.%s failed", type(listener).__name__, hook, extra=event("listener_failed")
            )
