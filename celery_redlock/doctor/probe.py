"""What one node says of itself, and what it lets us do: one visit, everything asked at once.

It writes: a few keys with random names, gone in seconds; there is no better way to find out what a
user may do than to try, and `ACL DRYRUN` is a right that no user of locks has.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from redis.exceptions import NoPermissionError, ReadOnlyError, ResponseError

from ..protocol.commands import request
from ..protocol.restart_guard import NodeInfo
from ..stores.redis.address import Address
from ..stores.redis.handshake import INFO, read_info
from ..stores.redis.resp import reason
from ..survey.reader import NodeLook, Reader, visit

__all__ = ["Probe", "introduce", "probe", "refused_by"]

LIFE = b"10000"
"""Milliseconds for which what is tried stays on a node."""
NEEDED = ("set", "get", "del", "pexpire", "pttl", "eval", "evalsha")
"""Commands without which there is no lock; without the others waiting is slower."""
NOTHING = NodeInfo()


@dataclass(frozen=True)
class Told:
    """What a visit brought.

    Attributes:
        peer: The IP address that answered; empty for a socket of this machine.
        info: What INFO says, by name; empty if it is refused.
        facts: What the guard makes of it.
        denied: Why INFO is refused; empty if it is not.
        ahead: Seconds that its clock is ahead of ours; None if it does not say.
        refused: What its user may not do: the word of an ACL rule, and whether locks need it.
        renamed: Commands that it does not know.
        writes: Why it takes no writes; empty if it does.
        mark: A key that was written there, and nowhere else.
    """

    peer: str = ""
    info: Mapping[str, str] = field(default_factory=dict)
    facts: NodeInfo = NOTHING
    denied: str = ""
    ahead: float | None = None
    refused: Mapping[str, bool] = field(default_factory=dict)
    renamed: Sequence[str] = ()
    writes: str = ""
    mark: bytes = b""


@dataclass(frozen=True)
class Probe:
    """One node.

    Attributes:
        index: Which of the nodes.
        address: Where it is.
        look: How it answered.
        told: What it said; None if it did not.
        twins: Indexes of others at which our mark for this one was found.
    """

    index: int
    address: Address
    look: NodeLook
    told: Told | None
    twins: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Its address, without credentials."""
        return self.look.name

    @property
    def user(self) -> str:
        """The ACL user that we are there."""
        return str(self.address.arguments.get("username") or "default")


def probe(addresses: Sequence[Address], prefix: str, timeout: float) -> list[Probe]:
    """Visit all nodes, at once.

    Args:
        addresses: The nodes.
        prefix: What our keys begin with.
        timeout: Seconds after which a node is left alone.
    """
    looks, told = visit(addresses, prefix, lambda reader: _ask(reader, prefix), timeout)
    twins: list[tuple[int, ...]] = [()] * len(addresses)
    marks = [one.mark if one is not None else b"" for one in told]
    if any(one is not None and one.denied for one in told):
        # INFO tells no run_id: but what was written to one address is found at the other.
        _looks, found = visit(addresses, prefix, lambda reader: _marks(reader, marks), timeout)
        for here, seen in enumerate(found):
            others = [n for n, mark in enumerate(marks) if n != here and mark in (seen or ())]
            twins[here] = tuple(others)
    whole = zip(addresses, looks, told, twins, strict=True)
    return [Probe(index, *one) for index, one in enumerate(whole)]


def _ask(reader: Reader, prefix: str) -> Told:
    mark, line = (f"{prefix}nonce:{secrets.token_hex(16)}".encode() for _ in range(2))
    text, facts, denied = introduce(reader)
    ahead = _ahead(reader)
    refused, renamed, writes = _try(reader, mark, line)
    return Told(
        reader.peer,
        dict(row.split(":", 1) for row in text.splitlines() if ":" in row),
        facts,
        denied,
        ahead,
        refused,
        renamed,
        writes,
        mark,
    )


def introduce(reader: Reader) -> tuple[str, NodeInfo, str]:
    """What INFO says, what the guard makes of it, and why INFO is refused; empty if it is not."""
    text, facts, error = read_info(reader.ask(INFO), reader.ask)
    return text, facts, "" if error is None else reason(error)


def _ahead(reader: Reader) -> float | None:
    """Seconds that the node's clock is ahead of ours; between the two readings lies half a trip."""
    before = time.time()
    (told,) = reader.ask([request(b"TIME")])
    after = time.time()
    if not isinstance(told, list) or len(told) != 2:
        return None
    return int(told[0]) + int(told[1]) / 1e6 - (before + after) / 2


def _try(reader: Reader, mark: bytes, line: bytes) -> tuple[dict[str, bool], list[str], str]:
    """What is refused of all that locks do; what is unknown; why nothing can be written."""
    tries = {
        "set": (b"SET", mark, b"1", b"PX", LIFE),
        "get": (b"GET", mark),
        "pexpire": (b"PEXPIRE", mark, LIFE),
        "pttl": (b"PTTL", mark),
        "eval": (b"EVAL", b"return 1", b"0"),
        "evalsha": (b"EVALSHA", b"0" * 40, b"0"),
        "zadd": (b"ZADD", line, b"1", b"1"),
        "zrem": (b"ZREM", line, b"0"),
        "zpopmin": (b"ZPOPMIN", line),
        "del": (b"DEL", line),
        "publish": (b"PUBLISH", mark, b""),
        # Last: a connection that has subscribed does nothing else.
        "subscribe": (b"SUBSCRIBE", mark),
    }
    replies = reader.ask([request(*words) for words in tries.values()])
    refused: dict[str, bool] = {}
    renamed: list[str] = []
    writes = ""
    for name, reply in zip(tries, replies, strict=True):
        if not isinstance(reply, ResponseError):
            continue
        said = str(reply)
        if isinstance(reply, NoPermissionError):
            word = _word(said, name)
            refused[word] = refused.get(word, False) or name in NEEDED or word[0] == "~"
        elif "unknown command" in said:
            renamed.append(name)
        elif name == "set" and not isinstance(reply, ReadOnlyError):
            writes = reason(reply)
    return refused, renamed, writes


def _word(said: str, name: str) -> str:
    """The kind of word that an ACL rule lacks, from the refusal: a command, keys or channels."""
    if "channel" in said:
        return "&"
    return "~" if "access" in said and "key" in said else f"+{name}"


def refused_by(why: str) -> str:
    """The command of the handshake that a node has refused, from why it cannot be reached."""
    found = re.search(r"run the '([\w|]+)'", why)
    return found[1] if why.startswith("NOPERM") and found else ""


def _marks(reader: Reader, marks: Sequence[bytes]) -> set[bytes]:
    """Which of some keys are there."""
    there = [mark for mark in marks if mark]
    replies = reader.ask([request(b"GET", mark) for mark in there])
    pairs = zip(there, replies, strict=True)
    return {mark for mark, reply in pairs if isinstance(reply, bytes)}
