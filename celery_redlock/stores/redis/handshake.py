"""What a node is asked about itself, right behind the handshake of a new connection.

One write and one read, in the thread that connects: blocking, and nobody's turn. A user that may
not ask (see the ACL rule in the docs) has no INFO. Then one thing can still be found out, that two
addresses lead to one server: each of them gets a nonce, a key with a random name, and looks for the
others' nonces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from ...protocol.errors import NodeError
from ...protocol.restart_guard import NodeInfo, fsync_of
from .resp import reason

__all__ = ["introduce"]

SECTIONS = ("server", "replication", "memory", "persistence", "cluster")
SCRIPTS = (("EVAL", "return 1", "0"), ("EVALSHA", "0" * 40, "0"))
"""Without them a lock could be taken and not be given back."""
NONCE_TTL = 60.0
"""Seconds a nonce lives: nodes that are reached within this time are told apart."""


def introduce(connection: Any, *, guarded: bool, index: int, nonces: Sequence[str]) -> NodeInfo:
    """Ask a node about itself. Blocks, for the connection's timeout at most.

    Args:
        connection: A connection of redis-py's, connected.
        guarded: Whether it matters if the node keeps what it has acknowledged.
        index: Which of the nodes it is.
        nonces: A key per node, known to us alone.

    Raises:
        NodeError: What it answered is no answer.
        redis.RedisError, OSError: It does not answer, or refuses for another reason than rights.
    """
    info: list[str] = []
    *sections, script, digest = _ask(
        connection, [*(("INFO", section) for section in SECTIONS), *SCRIPTS]
    )
    mute = next((why for why in map(_why_forbidden, (script, digest)) if why), "")
    if mute:
        return NodeInfo(scripts=mute)
    for reply in sections:
        if isinstance(reply, ResponseError):
            if not _forbidden(reply):
                raise reply
            return _by_nonce(connection, str(reply), index, nonces)
        info.append(_text(reply))
    facts = NodeInfo.of("\n".join(info))
    if not (guarded and facts.appends):
        return facts
    (config,) = _ask(connection, [("CONFIG", "GET", "*appendfsync*")])
    if isinstance(config, ResponseError):
        return facts
    words = [_text(word) for word in config]
    return NodeInfo.of("\n".join(info), fsync_of(dict(zip(words[::2], words[1::2], strict=True))))


def _by_nonce(connection: Any, denied: str, index: int, nonces: Sequence[str]) -> NodeInfo:
    set_ours = ("SET", nonces[index], str(index), "PX", str(int(NONCE_TTL * 1000)))
    others = [other for other in range(len(nonces)) if other != index]
    # In this order: of two that do it at the same time, one at least finds the other's.
    replies = _ask(connection, [set_ours, *(("GET", nonces[other]) for other in others)])
    found = [
        other
        for other, reply in zip(others, replies[1:], strict=True)
        if reply is not None and not isinstance(reply, ResponseError)
    ]
    return NodeInfo(denied=" ".join(denied.split())[:100], twin=found[0] if found else None)


def _ask(connection: Any, commands: Sequence[tuple[str, ...]]) -> list[Any]:
    """The replies to some commands, written at once; error replies are among them."""
    connection.send_packed_command(connection.pack_commands(commands), check_health=False)
    replies: list[Any] = []
    for _ in commands:
        try:
            replies.append(connection.read_response())
        except ResponseError as error:
            replies.append(error)
    return replies


def _why_forbidden(reply: Any) -> str:
    """Why a node does not do what it was asked for, if it never will; without our words."""
    return reason(reply) if isinstance(reply, ResponseError) and _forbidden(reply) else ""


def _forbidden(error: ResponseError) -> bool:
    """Not permitted (ACL), or renamed away."""
    return isinstance(error, NoPermissionError) or "unknown command" in str(error).lower()


def _text(reply: Any) -> str:
    if not isinstance(reply, bytes):
        raise NodeError(f"answered INFO with a {type(reply).__name__} that is no answer to it")
    return reply.decode("utf-8", "replace")
