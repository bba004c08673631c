"""What happens to locks, for whoever wants to hear it.

Subclass `Listener`, override what interests you, `subscribe()` an instance. Hooks are called in
the thread where the thing happened, often the one that extends leases: be quick. A hook that
raises is logged and never stops a release.
"""

from __future__ import annotations

import logging
from typing import Any

from .errors import LeaseLost
from .lease import Lease

__all__ = ["Listener", "emit", "heard", "subscribe", "unsubscribe"]

logger = logging.getLogger("celery_redlock.events")


class Listener:
    """Hooks that do nothing; override the ones you need."""

    def acquired(self, lease: Lease) -> None:
        """A lock was granted."""

    def held(self, resource: str, holder: object) -> None:
        """An attempt failed since another holds the resource (`holder`: a `Holder` or None)."""

    def unavailable(self, resource: str, votes: tuple[object, ...]) -> None:
        """An attempt failed since too few nodes answered; `votes` has one `NodeVote` each."""

    def extended(self, lease: Lease) -> None:
        """A quorum renewed a lease."""

    def lost(self, loss: LeaseLost) -> None:
        """A lease ended before its holder released it: the work may overlap with another's.

        `loss` says which `lease`, why (`reason`), who held it (`owner`, `task`), for how long
        (`held_for`), and what each node answered last (`votes`).
        """

    def released(self, lease: Lease, held: bool) -> None:
        """A lock was given back; `held` tells whether it was ours to the end."""


_listeners: tuple[Listener, ...] = ()


def subscribe(listener: Listener) -> None:
    """Call `listener`'s hooks from now on, in this process and those forked from it."""
    global _listeners
    _listeners = (*_listeners, listener)


def unsubscribe(listener: Listener) -> None:
    """Stop calling `listener`."""
    global _listeners
    _listeners = tuple(known for known in _listeners if known is not listener)


def heard() -> bool:
    """Whether anybody listens; else what a hook would be given need not be made."""
    return bool(_listeners)


def emit(hook: str, *args: Any) -> None:
    """Call one hook of every listener."""
    for listener in _listeners:
        try:
            getattr(listener, hook)(*args)
        except Exception:
            # A listener is an onlooker: whatever it raises must not change what happens to locks.
            logger.exception("%s.%s failed", type(listener).__name__, hook)
