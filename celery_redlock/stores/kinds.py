"""The kinds of store that a lock can be kept in: found by the scheme of a node's URL.

Other packages add kinds by entry points of the group `celery_redlock.stores`: the name is a scheme,
the value a `Kind` (`contract.py`). A kind is imported when a node of it is named, and not before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ..protocol.errors import ConfigurationError
from ..protocol.texts import printable
from .contract import Address, Kind, Reader, refuse, refuse_ttl

if TYPE_CHECKING:
    import redis

    from .node import Node
    from .subscription import Subscription

__all__ = ["Address", "Kind", "NodeSpec", "Reader"]
__all__ += [
    "kind_of",
    "listed",
    "lock_key",
    "make_node",
    "named",
    "open_reader",
    "parse_nodes",
    "schemes",
]
__all__ += ["identity", "refuse", "refuse_ttl", "schemes", "subscribe"]

GROUP = "celery_redlock.stores"
"""The group of the entry points."""
OWN = {
    "redis": "redis",
    "rediss": "redis",
    "redis+socket": "redis",
    "unix": "redis",
    "sentinel": "redis",
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "etcd": "etcd",
    "etcds": "etcd",
    "zookeeper": "zookeeper",
    "zookeepers": "zookeeper",
}
"""The package in here of each scheme. Their entry points are the same; without a look at the
metadata of all installed packages this is faster, and works where there is none."""
OTHERS = r"https?|amqps?"
"""More schemes that begin a URL in a list of several; not any word, which may be of a password."""

_kinds: dict[str, Kind] = {}
_published: dict[str, Kind | None] = {}

NodeSpec: TypeAlias = "str | redis.Redis | Mapping[str, Any]"


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
    if all(kind.can.quorum for kind in kinds):
        found: tuple[Address, ...] = _kinds_own("redis").part("parse")(specs, setting)
        return found
    if len(names := sorted({kind.name for kind in kinds})) > 1:
        raise ConfigurationError(
            f"{setting} mixes {names[0]} with {names[1]}: one lock is kept in one kind of store"
        )
    kind, where = kinds[0], f"{setting}[0]"
    if len(specs) > 1:
        raise ConfigurationError(
            f"{setting} names {len(specs)} {kind.name} {kind.many}: one is the authority for its"
            f" locks, and needs no quorum; give one URL. {kind.together}".rstrip()
        )
    try:
        if kind.client:
            import_module(kind.client)
        address = kind.part("parse")(str(specs[0]), where)
    except ImportError as error:
        extra = f": pip install 'celery-redlock[{kind.extra}]'" if kind.extra else ""
        raise ConfigurationError(
            f"{where} names {kind.name}, and its client is missing ({error}){extra}"
        ) from None
    if address.store != kind.name:
        raise ConfigurationError(
            f"{where}: {kind.parse} returned an address whose store is {address.store!r}, and its"
            f" kind is {kind.name!r}"
        )
    return (address,)


def listed(specs: Any) -> Any:
    """Return nodes as a list, without blanks around their URLs; return other types unchanged.

    One string, as from an environment variable, can name several nodes with commas between them.
    Only a comma before a scheme begins a new node, because a list of hosts in one URL, or a
    password, may contain commas, too.
    """
    if isinstance(specs, str):
        # Without any scheme every part is wrong, and the error names each; not if there may be a
        # password in them.
        comma = rf",(?=\s*(?:{_schemes(specs)}|$))" if "://" in specs or "@" in specs else ","
        return [url.strip() for url in re.split(comma, specs) if url.strip()]
    if isinstance(specs, (bytes, Mapping)) or not isinstance(specs, Sequence):
        return specs
    return [spec.strip() if isinstance(spec, str) else spec for spec in specs]


def _schemes(text: str) -> str:
    """Return a pattern of the beginnings of URLs; also of another package's, if the text is one."""
    known = "|".join(map(re.escape, OWN))
    first = _scheme(text)
    if first not in OWN and _kind(first) is not None:
        known += f"|{re.escape(first)}"
    return f"(?i:{known}|{OTHERS})://"


def schemes() -> str:
    """Return the schemes of all installed kinds, with the extra that a kind needs, for an error."""
    from importlib.metadata import entry_points

    others = {found.name for found in entry_points(group=GROUP)} - OWN.keys()
    extras = {scheme: _kinds_own(package).extra for scheme, package in OWN.items()}
    texts = [
        f"{scheme}://" + (f" (needs the extra celery-redlock[{extra}])" if extra else "")
        for scheme, extra in (extras | dict.fromkeys(sorted(others), "")).items()
    ]
    return ", ".join(texts)


def kind_of(spec: object) -> Kind:
    """Return the kind of store of a node: Redis if nothing else is known."""
    return (_kind(_scheme(spec)) if isinstance(spec, str) else None) or _kinds_own("redis")


def named(store: str) -> Kind:
    """Return the kind of an address, by its `store`."""
    return _kinds.get(store) or _kinds_own(store.lower())


def _scheme(url: str) -> str:
    return url.strip().partition("://")[0].lower() if "://" in url else ""


def _kind(scheme: str) -> Kind | None:
    """Return the kind of a scheme, if there is one."""
    if scheme in OWN:
        return _kinds_own(OWN[scheme])
    if scheme not in _published:
        _published[scheme] = _published_kind(scheme)
    return _published[scheme]


def _published_kind(scheme: str) -> Kind | None:
    """Return the kind that an installed package publishes for a scheme, if there is one.

    Raises:
        ConfigurationError: Its entry point is broken, or there are two.
    """
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        return None
    from importlib.metadata import entry_points  # imported here: it is seldom needed

    found = sorted({one.value: one for one in entry_points(group=GROUP, name=scheme)}.items())
    if not found:
        return None
    if len(found) > 1:
        raise ConfigurationError(
            f"several packages publish a store for {scheme}://: {', '.join(dict(found))}; uninstall"
            " all but one"
        )
    ((value, entry),) = found
    try:
        kind = entry.load()
    except Exception as error:
        raise ConfigurationError(
            f"the entry point {value} for {scheme}:// cannot be loaded"
            f" ({type(error).__name__}: {printable(str(error))})"
        ) from error
    if not isinstance(kind, Kind):
        raise ConfigurationError(
            f"the entry point {value} for {scheme}:// is no celery_redlock Kind"
        )
    if kind.name.lower() in OWN.values():
        raise ConfigurationError(f"the entry point {value} names its kind {kind.name}, as ours is")
    _kinds[kind.name] = kind
    return kind


def _kinds_own(package: str) -> Kind:
    kind = cast(Kind, import_module(f".{package}.kind", __package__).KIND)
    return _kinds.setdefault(kind.name, kind)


def identity(address: Address) -> str:
    """Return an address with its database, without credentials: no two databases have the same."""
    return str(getattr(address, "identity", address.name))


def lock_key(address: Address, prefix: str, name: str) -> str:
    """Return the whole key of a lock, as the store's own tools name it."""
    return f"{prefix}{named(address.store).directory}{name}"


def make_node(index: int, address: Address, *args: Any, **options: Any) -> Node:
    """Return the node at an address; for the arguments see `Node`."""
    kind = named(address.store)
    # Nothing may be left to import while a lock is held, when a time limit could strike.
    if kind.subscription:
        kind.part("subscription")
    node: Node
    if kind.node:
        node = kind.part("node")(index, address, *args, **options)
    else:
        plain = import_module(".plain", __package__)
        node = plain.PlainNode(kind, index, address, *args, **options)
    return node


def subscribe(address: Address, channel: bytes) -> Subscription:
    """Return the subscription to a channel of a node that notifies waiters; not connected yet."""
    made: Subscription = named(address.store).part("subscription")(address, channel)
    return made


def open_reader(address: Address, prefix: str, timeout: float) -> Reader:
    """Return a reader of a node's keys; not connected yet. `timeout`: seconds for each answer."""
    kind = named(address.store)
    reader: Reader
    if kind.reader:
        reader = kind.part("reader")(address, prefix, timeout)
    else:
        reader = import_module(".plain", __package__).PlainReader(kind, address, prefix, timeout)
    return reader
