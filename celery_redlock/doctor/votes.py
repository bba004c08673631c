"""When a node, or a quorum of nodes, has a vote: for commands that only look at them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from ..config.checks import DAY
from ..config.options import GLOBAL, guarded
from ..locking.redlock import Redlock
from ..protocol.node_info import NodeInfo
from ..protocol.restart_guard import RestartGuard
from ..protocol.values import quorum_of
from ..survey.reader import read_nodes
from .probe import introduce
from .tasks import ttls_of

__all__ = ["ask", "guard_of", "voteless", "votes_in"]


def ask(redlock: Redlock, timeout: float) -> list[NodeInfo]:
    """Return what the nodes say of themselves, those that do. It only reads."""
    _looks, told = read_nodes(redlock.client.addresses, redlock.prefix, introduce, timeout)
    return [one[1] for one in told if one is not None]


def guard_of(app: Any, nodes: int) -> str | None:
    """Return what `redlock_restart_guard` means for so many nodes; None: it protects nothing."""
    default = GLOBAL["restart_guard"].default
    guard: str = default if app is None else app.conf.get("redlock_restart_guard", default)
    if guarded(guard, nodes):
        return "uptime"
    if guard == "auto" and (app is None or nodes == 2):
        return None  # not known; or of two that forget one at a time, the other still says no
    return "off"


def voteless(facts: NodeInfo, ttls: Sequence[float], guard: str | None) -> float:
    """Return for how many seconds a worker that meets the node now gives it no vote.

    Where no ttl is known, as there is no app, it is the default.
    """
    longest = max(ttls, default=GLOBAL["ttl"].default)
    rules = RestartGuard(guard == "uptime", longest, lambda _warning: None)
    doubt = rules.doubt(rules.meet(0, facts, 0.0, 0.0), 0.0)
    return doubt.left if doubt is not None else 0.0


def votes_in(told: Sequence[NodeInfo], nodes: int, app: Any) -> float | None:
    """Return the seconds until a quorum has a vote; None if it has, or if time is not the matter.

    Args:
        told: What the nodes say of themselves, as far as they do.
        nodes: How many there are.
        app: Whose ttls are in use; None for the default.
    """
    fit = [facts for facts in told if not facts.misfit]
    guard, needed = guard_of(app, nodes), quorum_of(nodes)

    def left(ttls: Sequence[float]) -> float | None:
        all_left = sorted(voteless(facts, ttls, guard) for facts in fit)
        return (all_left[needed - 1] or None) if len(all_left) >= needed else None

    if app is None:
        return left(())
    if left([DAY]) is not None:  # else its tasks need not be loaded
        with contextlib.suppress(Exception):  # the doctor says what is broken there
            app.loader.import_default_modules()
            return left(ttls_of(app))
    return None
