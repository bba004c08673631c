"""Fit a task's options to the store of its app: refuse those that it cannot keep."""

from __future__ import annotations

import re
from typing import Any

from .options import TASK, TaskOptions

_REDIS = re.compile(r"\s*(rediss?|redis\+socket|unix|sentinel)://", re.I)
"""The beginning of the URL of a Redis node, without an import of any store."""


def node_elsewhere(app: Any) -> str:
    """Return the URL of an app's first node if that is not a Redis, which keeps all options."""
    nodes = app.conf.get("redlock_nodes")
    first = nodes[0] if nodes and isinstance(nodes, (list, tuple)) else nodes
    elsewhere = isinstance(first, str) and "://" in first and not _REDIS.match(first)
    return str(first) if elsewhere else ""


def fit(
    options: TaskOptions, node: Any, prefix: str, *, several: bool, own_ttl: bool
) -> TaskOptions:
    """Return options as the kind of store of a node keeps them: a ttl by default may be shorter.

    Args:
        options: The options of a task.
        node: A node of its app.
        prefix: The prefix that the user wrote before the names of the options, for errors.
        several: True if the task locks several keys.
        own_ttl: True if the ttl was declared with the task.

    Raises:
        ConfigurationError: It lacks a capability that one of them needs.
    """
    # Imported here, because a program that only declares tasks need not know any store.
    from ..stores.kinds import kind_of, refuse, refuse_ttl

    kind, p = kind_of(node), prefix
    for feature, needs, used in (
        ("shared=True", "shared", options.shared),
        (f"{p}fencing", "fencing", options.fencing),
        (f"{p}limit", "limits", options.limit != 1),
        ("a lock of several keys", "several", several),
        (f"{p}hold_for", "ttl_per_key", options.hold_for),
        (f"{p}rate", "ttl_per_key", options.rate),
        (f"{p}scope={options.scope!r}", "ttl_per_key", options.scope != "while_executing"),
    ):
        if used:
            refuse(kind, feature, needs)
    if kind.can.ttl_per_key:
        return options
    # Not by `parse_nodes`, because a program that only publishes may lack the client.
    address = kind.part("parse")(node, "redlock_nodes[0]")
    if own_ttl or options.ttl != TASK["ttl"].default:
        refuse_ttl(address, f"{p}ttl", options.ttl)
    return options.replace(ttl=min(options.ttl, getattr(address, "longest_ttl", options.ttl)))
