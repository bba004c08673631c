"""When a node, or a quorum of nodes, has a vote: for commands that only look at them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from ..config.checks import DAY, guarded
from ..config.options import GLOBAL
from ..locking.redlock import Redlock
from ..protocol.node_info import NodeInfo
from ..protocol.restart_guard import RestartGuard
from ..protocol.values import quorum_of
from ..survey.reader import read_nodes
from .probe import introduce
from .tasks import ttls_of

__all__ = ["ask", "guard_of", "quorum_in", "voteless", "votes_in", "votes_left"]


def ask(redlock: Redlock, timeout: float) -> list[NodeInfo | None]:
    """Return what each node says of itself; None for one that does not. It only reads."""
    _looks, told = read_nodes(redlock.client.addresses, redlock.prefix, introduce, timeout)
    return told


def guard_of(app: Any, addresses: Sequence[Any]) -> str | None:
    """Return what `redlock_restart_guard` means for these nodes; None: it protects nothing."""
    default = GLOBAL["restart_guard"].default
    guard: str = default if app is None else app.conf.get("redlock_restart_guard", default)
    if guarded(guard, len(addresses), any(address.moves for address in addresses)):
        return "uptime"
    if guard == "auto" and (app is None or len(addresses) == 2):
        return None  # not known; or of two that forget one at a time, the other still says no
    return "off"


def voteless(facts: NodeInfo, address: Any, ttls: Sequence[float], guard: str | None) -> float:
    """Return for how many seconds a worker that meets the node now gives it no vote.

    Where no ttl is known, because there is no app, it is the default.
    """
    longest = max(ttls, default=GLOBAL["ttl"].default)
    rules = RestartGuard(guard == "uptime", longest, lambda _warning: None)
    doubt = rules.doubt(rules.meet(0, facts, 0.0, 0.0, address.moves), 0.0)
    return doubt.left if doubt is not None else 0.0


def votes_left(
    told: Iterable[NodeInfo | None],
    addresses: Iterable[Any],
    ttls: Sequence[float],
    guard: str | None,
) -> list[float | None]:
    """Return the seconds until each node has a vote, 0.0 if it has; None if it will have none.

    That is one that does not answer, is no master, or is the same server as one before it.
    """
    met: set[str] = set()
    found: list[float | None] = []
    for facts, address in zip(told, addresses, strict=True):
        if facts is None or facts.misfit or facts.run_id in met:
            found.append(None)
        else:
            found.append(voteless(facts, address, ttls, guard))
            met |= {facts.run_id} - {""}
    return found


def quorum_in(left: Sequence[float | None]) -> float | None:
    """Return the seconds until a quorum has a vote, by those of each node; None if none will."""
    seconds, needed = sorted(one for one in left if one is not None), quorum_of(len(left))
    return seconds[needed - 1] if len(seconds) >= needed else None


def votes_in(told: Sequence[NodeInfo | None], addresses: Sequence[Any], app: Any) -> float | None:
    """Return the seconds until a quorum has a vote; None if it has, or if time is not the matter.

    Args:
        told: What each node says of itself.
        addresses: The nodes' addresses, in the same order.
        app: The app whose ttls are in use; None for the default.
    """
    guard = guard_of(app, addresses)

    def left(ttls: Sequence[float]) -> float | None:
        return quorum_in(votes_left(told, addresses, ttls, guard)) or None

    if app is None:
        return left(())
    if left([DAY]) is not None:  # else its tasks need not be loaded
        with contextlib.suppress(Exception):  # the doctor says what is broken there
            app.loader.import_default_modules()
            return left(ttls_of(app))
    return None
