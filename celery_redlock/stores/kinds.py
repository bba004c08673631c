"""The kinds of store that a lock can be kept in, distinguished by the URLs of their nodes.

The client library of a kind is imported only when a node of that kind is named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from ..protocol.errors import ConfigurationError

if TYPE_CHECKING:
    import redis

    from .etcd.address import EtcdAddress
    from .etcd.reader import EtcdReader
    from .node import Node
    from .postgresql.address import PostgresAddress
    from .postgresql.reader import PostgresReader
    from .redis.address import Address as RedisAddress
    from .redis.reader import RedisReader
    from .subscription import Subscription

__all__ = ["Address", "NodeSpec", "Reader"]
__all__ += ["lock_key", "make_node", "open_reader", "parse_nodes", "subscribe", "whole_name"]
__all__ += ["kind_of", "listed", "refuse_readers"]

KINDS = {
    ("postgresql://", "postgres://"): "PostgreSQL",
    ("etcd://", "etcds://"): "etcd",
}
"""Kinds other than Redis, by the beginnings of their URLs."""
SCHEMES = r"(?i:rediss?|redis\+socket|unix|sentinel|postgres(?:ql)?|etcds?|https?|amqps?)://"
"""Pattern of the beginning of a URL in a list; not any word, because a password may contain it."""

MANY = {
    "PostgreSQL": (
        "PostgreSQL databases",
        "The hosts of one cluster stand in it together: postgresql://one,two/db",
    ),
    "etcd": (
        "etcd clusters",
        "The members of one cluster stand in it together: etcd://one:2379,two:2379",
    ),
}

NodeSpec: TypeAlias = "str | redis.Redis | Mapping[str, Any]"
Address: TypeAlias = "RedisAddress | PostgresAddress | EtcdAddress"
Reader: TypeAlias = "RedisReader | PostgresReader | EtcdReader"


def parse_nodes(specs: Sequence[NodeSpec], setting: str = "nodes") -> tuple[Address, ...]:
    """Return the addresses of the nodes of one lock.

    Args:
        specs: URLs, clients or mappings of connection arguments; one or more. URLs may also be
            given as one string, see `listed`.
        setting: The name of `specs` in an error.

    Raises:
        ConfigurationError: No node is given, some cannot be understood (the text names each of
            them), two are the same server, or they are of different kinds.
    """
    specs = listed(specs)
    kinds = [kind_of(spec) for spec in specs] if isinstance(specs, list) else []
    if set(kinds) <= {"Redis"}:
        from .redis.address import parse_nodes as parse_redis

        return parse_redis(specs, setting)
    if len(set(kinds)) > 1:
        one, other = sorted(set(kinds))[:2]
        raise ConfigurationError(
            f"{setting} mixes {one} with {other}: one lock is kept in one kind of store"
        )
    if len(specs) > 1:
        what, like = MANY[kinds[0]]
        raise ConfigurationError(
            f"{setting} names {len(specs)} {what}: one is the authority for its"
            f" locks, and needs no quorum; give one URL. {like}"
        )
    where = f"{setting}[0]"
    if kinds == ["etcd"]:
        from .etcd.address import parse as parse_etcd

        return (parse_etcd(str(specs[0]), where),)
    try:
        from .postgresql.address import parse
    except ImportError as error:
        raise ConfigurationError(
            f"{where} names PostgreSQL, and its client is missing ({error}):"
            " pip install 'celery-redlock[postgresql]'"
        ) from None
    return (parse(str(specs[0]), where),)


def listed(specs: Any) -> Any:
    """Return nodes as a list, without blanks around their URLs; return other types unchanged.

    One string, as from an environment variable, can name several nodes with commas between them.
    Only a comma before a scheme begins a new node, because a list of hosts in one URL, or a
    password, may contain commas, too.
    """
    if isinstance(specs, str):
        # Without any scheme every part is wrong, and the error names each; not if there may be a
        # password in them.
        comma = rf",(?=\s*(?:{SCHEMES}|$))" if "://" in specs or "@" in specs else ","
        return [url.strip() for url in re.split(comma, specs) if url.strip()]
    if isinstance(specs, (bytes, Mapping)) or not isinstance(specs, Sequence):
        return specs
    return [spec.strip() if isinstance(spec, str) else spec for spec in specs]


def refuse_readers(kind: str) -> None:
    """Refuse shared locks if a kind of store does not support them.

    Raises:
        ConfigurationError: The kind is not Redis.
    """
    if kind != "Redis":
        raise ConfigurationError(
            f"shared=True needs Redis nodes: a lock in {kind} has one holder here. Leave it out, or"
            f" use limit= where {kind} stays; or the locks of {kind} itself"
        )


def whole_name(address: Address) -> str:
    """Return an address with its database, without credentials: no two databases have the same."""
    if address.store == "Redis":
        return f"{address.name}/{address.arguments.get('db') or 0}"
    if address.store == "etcd":
        return ",".join(sorted(address.name.split(",")))  # in whichever order they are named
    return address.name


def lock_key(address: Address, prefix: str, name: str) -> str:
    """Return the whole key of a lock, as the store's own tools name it."""
    return f"{prefix}{'lock/' if address.store == 'etcd' else ''}{name}"


def make_node(index: int, address: Address, *rest: Any, **more: Any) -> Node:
    """Return the node at an address; for the arguments see `RedisNode`."""
    # Nothing may be left to import while a lock is held, when a time limit could strike.
    import_module(f".{address.store.lower()}.subscription", __package__)
    if address.store == "Redis":
        from .redis.node import RedisNode

        return RedisNode(index, address, *rest, **more)
    if address.store == "etcd":
        from .etcd.node import EtcdNode

        return EtcdNode(index, address, *rest, **more)
    from .postgresql.node import PostgresNode

    return PostgresNode(index, address, *rest, **more)


def subscribe(address: Address, channel: bytes) -> Subscription:
    """Return a subscription to a node's notifications on a channel; not connected yet."""
    if address.store == "Redis":
        from .redis.subscription import RedisSubscription

        return RedisSubscription(address, channel)
    if address.store == "etcd":
        from .etcd.subscription import EtcdSubscription

        return EtcdSubscription(address, channel)
    from .postgresql.subscription import PostgresSubscription

    return PostgresSubscription(address, channel)


def open_reader(address: Address, prefix: str, timeout: float) -> Reader:
    """Return a reader of a node's keys; not connected yet. `timeout`: seconds for each answer."""
    if address.store == "Redis":
        from .redis.reader import RedisReader

        return RedisReader(address, prefix, timeout)
    if address.store == "etcd":
        from .etcd.reader import EtcdReader

        return EtcdReader(address, prefix, timeout)
    from .postgresql.reader import PostgresReader

    return PostgresReader(address, prefix, timeout)


def kind_of(spec: object) -> str:
    """Return the kind of store of a node."""
    if isinstance(spec, str):
        for starts, kind in KINDS.items():
            if spec.lower().startswith(starts):
                return kind
    return "Redis"
