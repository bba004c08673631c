"""The questions to a member of an etcd cluster, right after a connection to it was made."""

from __future__ import annotations

import re
from dataclasses import replace

from ...protocol.errors import NodeError
from ...protocol.node_info import NodeInfo
from .address import Connection, EtcdAddress
from .wire import Keys, above, text

__all__ = ["FOREVER_S", "cluster_of", "introduce"]

FOREVER_S = 10 * 365 * 86_400.0
"""Stands for a server's uptime: a cluster forgets nothing when its members are restarted."""
OLDEST = (3, 4)
LOOK_TIMEOUT_S = 0.3
"""Seconds for all answers of a member that is only compared with the connected one."""


def cluster_of(address: EtcdAddress, at: int) -> str:
    """Return the cluster id of a member; empty if it does not report it at once.

    It connects without credentials: a login costs the server 0.1 s.
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
    """Query a member about itself and its cluster.

    Raises:
        NodeError: It has no leader, or does not reach a majority.
    """
    if tuple(map(int, re.findall(r"\d+", connection.version)[:2])) < OLDEST:
        return NodeInfo(unfit=f"it is etcd {connection.version}, and 3.4 or newer is needed")
    if not connection.leads:
        raise NodeError("it has no leader")
    try:
        # This needs a majority, so a member that was cut off does not answer.
        every = {"key": text(keys.locks), "range_end": above(keys.locks)}
        connection.ask("kv/range", {**every, "count_only": True, "limit": "1"})
    except NodeError as error:
        if "permission denied" in str(error) or "user name is empty" in str(error):
            return NodeInfo(unfit=f"it refuses us ({error}); docs/etcd.md has the role")
        raise
    return NodeInfo(run_id=connection.cluster, uptime=FOREVER_S, role="master")
