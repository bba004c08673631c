"""The kinds of store that a lock can be kept in: told apart by what a user calls their nodes.

A kind's client library is imported once a node of that kind is named, and not before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ..protocol.errors import ConfigurationError
from .redis import address as redis_address
from .redis.address import Address as RedisAddress
from .redis.address import NodeSpec
from .redis.node import RedisNode
from .redis.reader import RedisReader
from .redis.subscription import RedisSubscription

if TYPE_CHECKING:
    from .node import Node
    from .postgresql.address import PostgresAddress
    from .postgresql.reader import PostgresReader
    from .postgresql.subscription import PostgresSubscription

__all__ = ["Address", "NodeSpec", "Reader", "Subscription"]
__all__ += ["make_node", "open_reader", "parse_nodes", "subscribe", "whole_name"]

POSTGRESQL = ("postgresql://", "postgres://")

Address: TypeAlias = "RedisAddress | PostgresAddress"
Reader: TypeAlias = "RedisReader | PostgresReader"
Subscription: TypeAlias = "RedisSubscription | PostgresSubscription"


def parse_nodes(specs: Sequence[NodeSpec], setting: str = "nodes") -> tuple[Address, ...]:
    """Return the addresses of the nodes of one lock.

    Args:
        specs: URLs, clients or mappings of connection arguments; one or more.
        setting: What to call `specs` in an error.

    Raises:
        ConfigurationError: None is given, some cannot be understood (the text names each of them),
            two are the same server, or they are of different kinds.
    """
    listed = not isinstance(specs, (str, bytes, Mapping)) and isinstance(specs, Sequence)
    ours = [_is_postgresql(spec) for spec in specs] if listed else []
    if not any(ours):
        return redis_address.parse_nodes(specs, setting)
    if not all(ours):
        raise ConfigurationError(
            f"{setting} mixes PostgreSQL with Redis: one lock is kept in one kind of store"
        )
    if len(specs) > 1:
        raise ConfigurationError(
            f"{setting} names {len(specs)} PostgreSQL databases: one is the authority for its"
            " locks, and needs no quorum; give one URL. The hosts of one cluster stand in it"
            " together: postgresql://one,two/db"
        )
    try:
        from .postgresql.address import parse
    except ImportError as error:
        raise ConfigurationError(
            f"{setting}[0] names PostgreSQL, and its client is missing ({error}):"
            " pip install 'celery-redlock[postgresql]'"
        ) from None
    return (parse(str(specs[0]), f"{setting}[0]"),)


def whole_name(address: Address) -> str:
    """Return an address with its database, without credentials: no two databases have the same."""
    if isinstance(address, RedisAddress):
        return f"{address.name}/{address.arguments.get('db') or 0}"
    return address.name


def make_node(index: int, address: Address, *rest: Any, **more: Any) -> Node:
    """Return the node at an address; for the arguments see `RedisNode`."""
    if isinstance(address, RedisAddress):
        return RedisNode(index, address, *rest, **more)
    from .postgresql.node import PostgresNode

    return PostgresNode(index, address, *rest, **more)


def subscribe(address: Address, channel: bytes) -> Subscription:
    """Return what hears the calls of a node on a channel; not connected yet."""
    if isinstance(address, RedisAddress):
        return RedisSubscription(address, channel)
    from .postgresql.subscription import PostgresSubscription

    return PostgresSubscription(address, channel)


def open_reader(address: Address, prefix: str, timeout: float) -> Reader:
    """Return what reads a node's keys; not connected yet. `timeout`: seconds for each answer."""
    if isinstance(address, RedisAddress):
        return RedisReader(address, prefix, timeout)
    from .postgresql.reader import PostgresReader

    return PostgresReader(address, prefix, timeout)


def _is_postgresql(spec: object) -> bool:
    return isinstance(spec, str) and spec.lower().startswith(POSTGRESQL)
