"""What a member of an etcd cluster is asked about itself, right after a connection was made."""

from __future__ import annotations

import re
from dataclasses import replace

from ...protocol.errors import NodeError
from ...protocol.node_info import NodeInfo
from .address import Connection, EtcdAddress
from .wire import Keys, above, text

__all__ = ["FOREVER_S", "cluster_of", "introduce"]

FOREVER_S = 10 * 365 * 86_400.0
"""In the place of a server's uptime: a cluster forgets nothing when its members are restarted."""
OLDEST = (3, 4)
LOOK_TIMEOUT_S = 0.3
"""For all that a member answers that is only compared with the one that is asked."""


def cluster_of(address: EtcdAddress, at: int) -> str:
    """Return which cluster a member is of; empty if it does not say so at once.

    Nobody is named to it: a password costs the server a tenth of a second.
    """
    try:
        connection = Connection(
            replace(address, user=None), at, LOOK_TIMEOUT_S, life=LOOK_TIMEOUT_S
        )
        connection.disconnect()
        return connection.cluster
    except (NodeError, OSError):
        return ""


def introduce(connection: Connection, keys: Keys) -> NodeInfo:
    """Ask a member about itself and its cluster.

    Raises:
        NodeError: It has no leader, or does not reach a majority.
    """
    if tuple(map(int, re.findall(r"\d+", connection.version)[:2])) < OLDEST:
        return NodeInfo(unfit=f"it is etcd {connection.version}, and 3.4 or newer is needed")
    if not connection.leads:
        raise NodeError("it has no leader")
    try:
        # By a majority: one that was cut off answers nothing.
        every = {"key": text(keys.locks), "range_end": above(keys.locks)}
        connection.ask("kv/range", {**every, "count_only": True, "limit": "1"})
    except NodeError as error:
        if "permission denied" in str(error) or "user name is empty" in str(error):
            return NodeInfo(unfit=f"it refuses us ({error}); docs/etcd.md has the role")
        raise
    return NodeInfo(run_id=connection.cluster, uptime=FOREVER_S, role="master")
