"""Query each node about itself and about the user's rights: one visit, everything at once.

`probe` writes: a few keys with random names, gone in seconds. Only a trial shows what a user may
do, because `ACL DRYRUN` is a right that no user of locks has. `observe` only reads.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any, cast

from redis.exceptions import NoPermissionError, ReadOnlyError, ResponseError

from ..protocol.node_info import NodeInfo
from ..stores.kinds import Address as AnyAddress
from ..stores.kinds import Kind, Reader, named
from ..stores.redis.address import Address
from ..stores.redis.handshake import INFO, marked, read_info
from ..stores.redis.reader import RedisReader
from ..stores.redis.resp import reason
from ..survey.models import NodeLook
from ..survey.reader import read_nodes
from .tls import other_protocol

__all__ = ["Answers", "Probe", "checks_of", "introduce", "observe", "probe", "refused_by"]

KEY_TTL_MS = 10_000
"""Ttl of the trial keys on a node, milliseconds."""
NEEDED = ("set", "get", "del", "pexpire", "pttl", "eval", "evalsha")
"""Commands without which there is no lock; without the others only waiting is slower."""
NAMING = "client|setname"
"""The command with which a connection sets its name."""
KEY_COMMANDS = ("set", "get", "pexpire", "pttl", "zadd", "zrem", "zpopmin", "del")
"""Commands that are tried on a key."""
PROTOCOL_TIMEOUT_S = 1.0
"""Seconds that `observe` waits for a silent node's answer in the other protocol."""
NOTHING = NodeInfo()


@dataclass(frozen=True)
class Answers:
    """The answers of a node.

    `refused` maps each word of an ACL rule that its user lacks to True if locks need it. In it `~`
    and `&` stand for our keys and channels; `reset~` and `reset&` for the same, if it is not known
    whether they are refused.
    """

    peer: str = ""  # the IP address that answered; empty for a socket of this machine
    info: Mapping[str, str] = field(default_factory=dict)  # the answer to INFO; empty if refused
    facts: NodeInfo = NOTHING  # the facts that count for the restart guard
    denied: str = ""  # why INFO is refused
    ahead: float | None = None  # seconds that its clock is ahead of ours, if it answers TIME
    refused: Mapping[str, bool] = field(default_factory=dict)
    renamed: Sequence[str] = ()  # commands that are unknown there
    writes: str = ""  # why it accepts no writes
    mark: bytes = b""  # a key that was written there, and nowhere else


@dataclass(frozen=True)
class Probe:
    """One node: its reachability and its answers; without any if it did not answer."""

    index: int
    address: Any  # its class depends on the kind of store
    look: NodeLook
    answers: Answers
    twins: tuple[int, ...] = ()  # nodes on which this node's mark was found as well
    speaks: str = ""  # the result of `other_protocol`, if it did not answer
    details: Any = None  # the answers of another kind of store, besides `answers`

    @property
    def name(self) -> str:
        """The node's address, without credentials."""
        return self.look.name

    @property
    def kind(self) -> Kind:
        """The kind of store."""
        return named(self.address.store)

    @property
    def user(self) -> str:
        """The ACL user of our connection there."""
        return str(self.address.arguments.get("username") or "default")


def probe(addresses: Sequence[AnyAddress], prefix: str, timeout: float) -> list[Probe]:
    """Query all nodes at once, and give up on a node that is silent for `timeout` seconds."""
    if not named(addresses[0].store).can.quorum:  # all are of one kind
        return _of_other(addresses, prefix, timeout, tries=True)
    return _of_redis(cast(Sequence[Address], addresses), prefix, timeout)


def checks_of(kind: Kind) -> Any:
    """Return the module with the checks of a kind of store that is the one authority of a lock."""
    return import_module(kind.doctor or f"{__package__}.plain")


def _of_other(addresses: Sequence[Any], prefix: str, timeout: float, *, tries: bool) -> list[Probe]:
    looks, found = read_nodes(addresses, prefix, partial(_visit, tries=tries), timeout)
    probes = []
    for n, said in enumerate(found):
        ahead = getattr(said, "ahead", None)
        answers = Answers() if said is None else Answers(said.peer, facts=said.facts, ahead=ahead)
        probes.append(Probe(n, addresses[n], looks[n], answers, details=said))
    return probes


def _of_redis(addresses: Sequence[Address], prefix: str, timeout: float) -> list[Probe]:
    looks, found = read_nodes(addresses, prefix, _ask, timeout)
    unnamed = [n for n, look in enumerate(looks) if refused_by(look.error) == NAMING]
    if unnamed:  # ask again without a name, to report all missing rights at once
        there = [
            replace(addresses[n], arguments={**addresses[n].arguments, "client_name": None})
            for n in unnamed
        ]
        _looks, rest = read_nodes(there, prefix, _ask, timeout)
        for n, one in zip(unnamed, rest, strict=True):
            found[n] = one
    answers = [one or Answers() for one in found]
    seen_at: list[Sequence[bytes] | None] = [None] * len(addresses)
    if any(one.denied for one in answers):
        # Without INFO there is no run_id. But a mark written at one address is found at its twin.
        marks = [one.mark for one in answers if one.mark]
        _looks, seen_at = read_nodes(addresses, prefix, partial(_existing, marks=marks), timeout)
    twins = [
        tuple(n for n, one in enumerate(answers) if n != here and one.mark in (seen or ()))
        for here, seen in enumerate(seen_at)
    ]
    whole = zip(addresses, looks, answers, twins, strict=True)
    return _with_protocols([Probe(index, *one) for index, one in enumerate(whole)], timeout)


def _with_protocols(probes: Sequence[Probe], timeout: float) -> list[Probe]:
    """Return probes of Redis nodes, with what those that are silent speak instead."""

    def asked(probe: Probe) -> Probe:
        if probe.look.reachable or refused_by(probe.look.error):
            return probe
        return replace(probe, speaks=other_protocol(probe.address, timeout))

    with ThreadPoolExecutor() as pool:
        return list(pool.map(asked, probes))


def introduce(reader: Reader) -> NodeInfo:
    """Return the facts of a node that count for the restart guard. It only reads."""
    if named(reader.store).can.quorum:
        return _introduce(cast(RedisReader, reader))[1]
    facts: NodeInfo = _visit(reader, tries=False).facts
    return facts


def _visit(reader: Any, *, tries: bool) -> Any:
    return checks_of(named(reader.store)).visit(reader, tries=tries)


def _introduce(reader: RedisReader) -> tuple[str, NodeInfo, str]:
    """Return the answer to INFO, the facts for the guard, and why INFO is refused, if it is."""
    text, facts, error = read_info(reader.ask_packed(INFO))
    facts = marked(facts, reader.ask_packed, reader.prefix)
    return text, facts, "" if error is None else reason(error)


def observe(addresses: Sequence[AnyAddress], prefix: str, timeout: float) -> list[Probe]:
    """Query all nodes with INFO alone; ask a silent one what else it speaks. No right is tried."""
    if not named(addresses[0].store).can.quorum:
        return _of_other(addresses, prefix, timeout, tries=False)
    looks, found = read_nodes(addresses, prefix, _read, timeout)
    whole = zip(addresses, looks, [one or Answers() for one in found], strict=True)
    return _with_protocols(
        [Probe(index, *one) for index, one in enumerate(whole)], PROTOCOL_TIMEOUT_S
    )


def _read(reader: RedisReader) -> Answers:
    text, facts, denied = _introduce(reader)
    info = dict(row.split(":", 1) for row in text.splitlines() if ":" in row)
    return Answers(reader.peer, info, facts, denied)


def _ahead(reader: RedisReader) -> float | None:
    """Return the seconds that the node's clock is ahead of ours, give or take half a round trip."""
    before = time.time()
    (answers,) = reader.ask([("TIME",)])
    after = time.time()
    if not isinstance(answers, list) or len(answers) != 2:
        return None
    return int(answers[0]) + int(answers[1]) / 1e6 - (before + after) / 2


def _ask(reader: RedisReader) -> Answers:
    """Return the server's INFO and the commands that its ACL denies, of all that locks use."""
    mark, line = (f"{reader.prefix}nonce:{secrets.token_hex(16)}".encode() for _ in range(2))
    answers, ahead = _read(reader), _ahead(reader)
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
        # Last, because a connection that has subscribed accepts nothing else.
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
    # Without a right to any such command, a refusal of keys or channels would not show.
    if {"+publish", "+subscribe"} <= refused.keys():
        refused["reset&"] = False
    if {f"+{name}" for name in KEY_COMMANDS} <= refused.keys():
        refused["reset~"] = True
    return replace(answers, ahead=ahead, refused=refused, renamed=renamed, writes=writes, mark=mark)


def _acl_word(said: str, name: str) -> str:
    """Return the word that an ACL rule lacks, by the error: keys (~), channels (&) or a command."""
    if "channel" in said:
        return "&"
    return "~" if "access" in said and "key" in said else f"+{name}"


def refused_by(why: str) -> str:
    """Return the command of the handshake that a node refused, from the error of its connection."""
    found = re.search(r"run the '([\w|]+)'", why)
    return found[1] if why.startswith("NOPERM") and found else ""


def _existing(reader: RedisReader, marks: Sequence[bytes]) -> list[bytes]:
    """Return those of some keys that exist."""
    replies = reader.ask([("GET", mark) for mark in marks])
    return [mark for mark, r in zip(marks, replies, strict=True) if isinstance(r, bytes)]
