"""Votes of nodes and of the quorum, for commands that only read from the nodes."""

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
    """Return each node's facts; None for a node that does not answer. It only reads."""
    _looks, all_facts = read_nodes(redlock.client.addresses, redlock.prefix, introduce, timeout)
    return all_facts


def guard_of(app: Any, addresses: Sequence[Any]) -> str | None:
    """Return what `redlock_restart_guard` means for these nodes; None: it cannot protect them."""
    default = GLOBAL["restart_guard"].default
    guard: str = default if app is None else app.conf.get("redlock_restart_guard", default)
    if guarded(guard, len(addresses), any(address.moves for address in addresses)):
        return "uptime"
    if guard == "auto" and (app is None or len(addresses) == 2):
        # Without an app it is not known. If one of two nodes forgets, the other still votes NO.
        return None
    return "off"


def voteless(facts: NodeInfo, address: Any, ttls: Sequence[float], guard: str | None) -> float:
    """Return the seconds for which a worker that meets the node now would give it no vote.

    Without known ttls, because there is no app, the default ttl counts.
    """
    longest = max(ttls, default=GLOBAL["ttl"].default)
    rules = RestartGuard(guard == "uptime", longest, lambda _warning: None)
    doubt = rules.doubt(rules.meet(0, facts, 0.0, 0.0, address.moves), 0.0)
    return doubt.left if doubt is not None else 0.0


def votes_left(
    all_facts: Iterable[NodeInfo | None],
    addresses: Iterable[Any],
    ttls: Sequence[float],
    guard: str | None,
) -> list[float | None]:
    """Return the seconds until each node has a vote, 0.0 if it has one; None if it will get none.

    A node gets none if it does not answer, is no master, or is the same server as an earlier one.
    """
    met: set[str] = set()
    found: list[float | None] = []
    for facts, address in zip(all_facts, addresses, strict=True):
        if facts is None or facts.misfit or facts.run_id in met:
            found.append(None)
        else:
            found.append(voteless(facts, address, ttls, guard))
            met |= {facts.run_id} - {""}
    return found


def quorum_in(left: Sequence[float | None]) -> float | None:
    """Return the seconds until a quorum has a vote, from those of each node; None if never."""
    seconds, needed = sorted(one for one in left if one is not None), quorum_of(len(left))
    return seconds[needed - 1] if len(seconds) >= needed else None


def votes_in(
    all_facts: Sequence[NodeInfo | None], addresses: Sequence[Any], app: Any
) -> float | None:
    """Return the seconds until a quorum has a vote; None if it has one, or if time does not help.

    Args:
        all_facts: The facts of each node.
        addresses: The nodes' addresses, in the same order.
        app: The app whose ttls are in use; None for the default.
    """
    guard = guard_of(app, addresses)

    def left(ttls: Sequence[float]) -> float | None:
        return quorum_in(votes_left(all_facts, addresses, ttls, guard)) or None

    if app is None:
        return left(())
    if left([DAY]) is not None:  # if not even a ttl of a day leaves a doubt, load no tasks
        with contextlib.suppress(Exception):  # the doctor reports broken task modules
            app.loader.import_default_modules()
            return left(ttls_of(app))
    return None
