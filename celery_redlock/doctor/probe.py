"""What one node says of itself, and what it lets us do: one visit, everything asked at once.

`probe` writes: a few keys with random names, gone in seconds. The only way to find out what a user
may do is to try, because `ACL DRYRUN` is a right that no user of locks has. `observe` only reads.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeGuard

from redis.exceptions import NoPermissionError, ReadOnlyError, ResponseError

from ..protocol.node_info import NodeInfo
from ..stores.kinds import Address as AnyAddress
from ..stores.kinds import Reader
from ..stores.redis.address import Address
from ..stores.redis.handshake import INFO, marked, read_info
from ..stores.redis.reader import RedisReader
from ..stores.redis.resp import reason
from ..survey.models import NodeLook
from ..survey.reader import read_nodes
from . import etcd, postgresql
from .tls import other_protocol

__all__ = ["Probe", "Told", "introduce", "observe", "probe", "refused_by"]

KEY_TTL_MS = 10_000
"""For which what is tried stays on a node."""
NEEDED = ("set", "get", "del", "pexpire", "pttl", "eval", "evalsha")
"""Commands without which there is no lock; without the others waiting is slower."""
NAMING = "client|setname"
"""The command by which a connection gives itself a name."""
OF_KEYS = ("set", "get", "pexpire", "pttl", "zadd", "zrem", "zpopmin", "del")
"""Commands that are tried on a key."""
NOTHING = NodeInfo()
VISITS: Mapping[str, Callable[..., Any]] = {"PostgreSQL": postgresql.visit, "etcd": etcd.visit}


@dataclass(frozen=True)
class Told:
    """What a node told.

    `refused` is what its user may not do: the word of an ACL rule, and whether locks need it. There
    `~` and `&` stand for our keys and channels; `reset~` and `reset&` for these where it is not
    known whether they are refused.
    """

    peer: str = ""  # the IP address that answered; empty for a socket of this machine
    info: Mapping[str, str] = field(default_factory=dict)  # what INFO says; empty if refused
    facts: NodeInfo = NOTHING  # what the restart guard makes of it
    denied: str = ""  # why INFO is refused
    ahead: float | None = None  # seconds that its clock is ahead of ours, if it says
    refused: Mapping[str, bool] = field(default_factory=dict)
    renamed: Sequence[str] = ()  # commands that it does not know
    writes: str = ""  # why it takes no writes
    mark: bytes = b""  # a key that was written there, and nowhere else


@dataclass(frozen=True)
class Probe:
    """One node: how it answered, and what it told; nothing if it did not answer."""

    index: int
    address: Any  # of its kind of store
    look: NodeLook
    told: Told
    twins: tuple[int, ...] = ()  # others at which our mark for this one was found
    speaks: str = ""  # what it speaks that it was not asked in (`tls.py`), if it did not answer
    said: Any = None  # of another kind of store, besides `told`

    @property
    def name(self) -> str:
        """Its address, without credentials."""
        return self.look.name

    @property
    def is_redis(self) -> bool:
        """Whether it is asked as a Redis node is; else it is the one authority of its kind."""
        return isinstance(self.address, Address)

    @property
    def user(self) -> str:
        """The ACL user that we are there."""
        return str(self.address.arguments.get("username") or "default")


def probe(addresses: Sequence[AnyAddress], prefix: str, timeout: float) -> list[Probe]:
    """Ask all nodes at once; one that is silent for `timeout` seconds is left alone."""
    if not _are_redis(addresses):
        return _of_other(addresses, prefix, timeout, tries=True)
    return _of_redis(addresses, prefix, timeout)


def _are_redis(addresses: Sequence[AnyAddress]) -> TypeGuard[Sequence[Address]]:
    return isinstance(addresses[0], Address)  # all are of one kind


def _of_other(addresses: Sequence[Any], prefix: str, timeout: float, *, tries: bool) -> list[Probe]:
    looks, found = read_nodes(addresses, prefix, partial(_visit, tries=tries), timeout)
    probes = []
    for n, said in enumerate(found):
        ahead = getattr(said, "ahead", None)
        told = Told() if said is None else Told(said.peer, facts=said.facts, ahead=ahead)
        probes.append(Probe(n, addresses[n], looks[n], told, said=said))
    return probes


def _of_redis(addresses: Sequence[Address], prefix: str, timeout: float) -> list[Probe]:
    looks, found = read_nodes(addresses, prefix, _ask, timeout)
    unnamed = [n for n, look in enumerate(looks) if refused_by(look.error) == NAMING]
    if unnamed:  # what else the user may not do is to be known at once
        there = [
            replace(addresses[n], arguments={**addresses[n].arguments, "client_name": None})
            for n in unnamed
        ]
        _looks, rest = read_nodes(there, prefix, _ask, timeout)
        for n, one in zip(unnamed, rest, strict=True):
            found[n] = one
    told = [one or Told() for one in found]
    seen_at: list[Sequence[bytes] | None] = [None] * len(addresses)
    if any(one.denied for one in told):
        # INFO tells no run_id, but what was written to one address is found at the other.
        marks = [one.mark for one in told if one.mark]
        _looks, seen_at = read_nodes(addresses, prefix, partial(_kept, marks=marks), timeout)
    twins = [
        tuple(n for n, one in enumerate(told) if n != here and one.mark in (seen or ()))
        for here, seen in enumerate(seen_at)
    ]

    def speaks(address: Address, look: NodeLook) -> str:
        silent = not look.reachable and not refused_by(look.error)
        return other_protocol(address, timeout) if silent else ""

    with ThreadPoolExecutor() as pool:
        whole = zip(addresses, looks, told, twins, pool.map(speaks, addresses, looks), strict=True)
    return [Probe(index, *one) for index, one in enumerate(whole)]


def introduce(reader: Reader) -> NodeInfo:
    """Return what the guard makes of what a node says of itself. It only reads."""
    if isinstance(reader, RedisReader):
        return _introduce(reader)[1]
    facts: NodeInfo = _visit(reader, tries=False).facts
    return facts


def _visit(reader: Any, *, tries: bool) -> Any:
    return VISITS[reader.store](reader, tries=tries)


def _introduce(reader: RedisReader) -> tuple[str, NodeInfo, str]:
    """Return what INFO says, what the guard makes of it, and why it is refused; empty if not."""
    text, facts, error = read_info(reader.ask_packed(INFO))
    facts = marked(facts, reader.ask_packed, reader.prefix)
    return text, facts, "" if error is None else reason(error)


def observe(addresses: Sequence[AnyAddress], prefix: str, timeout: float) -> list[Probe]:
    """Ask all nodes what INFO says, and nothing else: what a user may do there is not tried."""
    if not _are_redis(addresses):
        return _of_other(addresses, prefix, timeout, tries=False)
    looks, found = read_nodes(addresses, prefix, _read, timeout)
    whole = zip(addresses, looks, [one or Told() for one in found], strict=True)
    return [Probe(index, *one) for index, one in enumerate(whole)]


def _read(reader: RedisReader) -> Told:
    text, facts, denied = _introduce(reader)
    info = dict(row.split(":", 1) for row in text.splitlines() if ":" in row)
    return Told(reader.peer, info, facts, denied)


def _ahead(reader: RedisReader) -> float | None:
    """Return by how many seconds the node's clock is ahead of ours, give or take half a trip."""
    before = time.time()
    (told,) = reader.ask([("TIME",)])
    after = time.time()
    if not isinstance(told, list) or len(told) != 2:
        return None
    return int(told[0]) + int(told[1]) / 1e6 - (before + after) / 2


def _ask(reader: RedisReader) -> Told:
    """Return what it says of itself, and what it refuses of all that locks do."""
    mark, line = (f"{reader.prefix}nonce:{secrets.token_hex(16)}".encode() for _ in range(2))
    told, ahead = _read(reader), _ahead(reader)
    tries: tuple[tuple[Any, ...], ...] = (
        ("SET", mark, 1, "PX", KEY_TTL_MS),
        ("GET", mark),
        ("PEXPIRE", mark, KEY_TTL_MS),
        ("PTTL", mark),
        ("EVAL", "return 1", 0),
        ("EVALSHA", "0" * 40, 0),
        ("ZADD", line, 1, 1),
        ("ZREM", line, 0),
        ("ZPOPMIN", line),
        ("DEL", line),
        ("PUBLISH", mark, ""),
        # Last: a connection that has subscribed does nothing else.
        ("SUBSCRIBE", mark),
    )
    refused: dict[str, bool] = {}
    renamed: list[str] = []
    writes = ""
    for (command, *_), reply in zip(tries, reader.ask(tries), strict=True):
        name, said = command.lower(), str(reply)
        if isinstance(reply, NoPermissionError):
            word = _acl_word(said, name)
            refused[word] = refused.get(word, False) or name in NEEDED or word == "~"
        elif isinstance(reply, ResponseError):
            if "unknown command" in said:
                renamed.append(name)
            elif name == "set" and not isinstance(reply, ReadOnlyError):
                writes = reason(reply)
    # Whoever may use no command of a kind is not told whether keys or channels are refused as well.
    if {"+publish", "+subscribe"} <= refused.keys():
        refused["reset&"] = False
    if {f"+{name}" for name in OF_KEYS} <= refused.keys():
        refused["reset~"] = True
    return replace(told, ahead=ahead, refused=refused, renamed=renamed, writes=writes, mark=mark)


def _acl_word(said: str, name: str) -> str:
    """Return what an ACL rule lacks, by the refusal: keys (~), channels (&) or the command."""
    if "channel" in said:
        return "&"
    return "~" if "access" in said and "key" in said else f"+{name}"


def refused_by(why: str) -> str:
    """Return the command of the handshake that a node refused, from why it is not reachable."""
    found = re.search(r"run the '([\w|]+)'", why)
    return found[1] if why.startswith("NOPERM") and found else ""


def _kept(reader: RedisReader, marks: Sequence[bytes]) -> list[bytes]:
    """Return which of some keys are there."""
    replies = reader.ask([("GET", mark) for mark in marks])
    return [mark for mark, r in zip(marks, replies, strict=True) if isinstance(r, bytes)]
