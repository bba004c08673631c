"""What a node is asked about itself, right after a connection to it was made.

It blocks, in the thread that connects, and nobody else waits. A user that may not ask (see the ACL
rule in the docs) has no INFO. Then one thing can still be found out, that two addresses lead to one
server: each of them gets a nonce, a key with a random name, and looks for the others' nonces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from ...protocol.commands import TRUSTED_KEY, request
from ...protocol.errors import NodeError
from ...protocol.node_info import NodeInfo, fsync_of
from .resp import reason

__all__ = ["INFO", "ask", "introduce", "read_info"]

INFO = tuple(
    request(b"INFO", section)
    for section in (b"server", b"replication", b"memory", b"persistence", b"cluster")
)
SCRIPTS = (request(b"EVAL", b"return 1", b"0"), request(b"EVALSHA", b"0" * 40, b"0"))
"""Without them a lock could be taken and not be given back."""
MARK = re.compile(r"\d{1,12}\.\d{3}( \w{0,40}){3}")
"""What `TRUSTED_KEY` says; anything else there is not ours."""
NONCE_LIFE_MS = b"60000"
"""Nodes that are reached within this time are told apart."""


def introduce(
    connection: Any, *, index: int, nonces: Sequence[str], prefix: str, guarded: bool
) -> NodeInfo:
    """Ask a node about itself, over a connection of redis-py.

    Args:
        connection: The connection.
        index: Which of the nodes it is.
        nonces: A key per node, known to us alone.
        prefix: What our keys begin with.
        guarded: Whether it matters if the node keeps what it has acknowledged.

    Raises:
        NodeError, redis.RedisError, OSError: It does not answer so, or refuses but for rights.
    """
    *sections, evaluated, by_digest = ask(connection, [*INFO, *SCRIPTS])
    for reply in (evaluated, by_digest):
        if isinstance(reply, ResponseError) and _forbidden(reply):
            return NodeInfo(scripts=reason(reply))
    asking = partial(ask, connection) if guarded else None
    _info, facts, error = read_info(sections, asking, prefix)
    if error is None:
        if guarded and facts.forgets:
            # Before any grant: it would outlive this time, and vouch for what is lost in it.
            ask(connection, [request(b"DEL", (prefix + TRUSTED_KEY).encode())])
        return facts
    if not _forbidden(error):
        raise error
    # In this order: of two that do it at the same time, one at least finds the other's.
    keys = [nonce.encode() for nonce in nonces]
    set_ours = request(b"SET", keys[index], b"%d" % index, b"PX", NONCE_LIFE_MS)
    _set, *replies = ask(connection, [set_ours, *(request(b"GET", key) for key in keys)])
    found = [
        other
        for other, reply in enumerate(replies)
        if other != index and reply is not None and not isinstance(reply, ResponseError)
    ]
    return NodeInfo(denied=" ".join(str(error).split())[:100], twin=found[0] if found else None)


def read_info(
    sections: Sequence[Any], ask: Callable[[Sequence[bytes]], list[Any]] | None, prefix: str
) -> tuple[str, NodeInfo, ResponseError | None]:
    """Read the replies to `INFO`: their text, what the guard makes of it, or why they are refused.

    Args:
        sections: The replies.
        ask: Asks, too, when an append-only file is written through, and if there is a mark; None
            if that does not matter.
        prefix: What our keys begin with.
    """
    for reply in sections:
        if isinstance(reply, ResponseError):
            return "", NodeInfo(), reply
    text = "\n".join(map(_text, sections))
    facts = NodeInfo.of(text)
    if ask is not None and (facts.appends or facts.history):
        config, mark = ask(
            [
                request(b"CONFIG", b"GET", b"*appendfsync*"),
                request(b"GET", (prefix + TRUSTED_KEY).encode()),
            ]
        )
        words = [] if isinstance(config, ResponseError) else [_text(word) for word in config]
        fsync = fsync_of(dict(zip(words[::2], words[1::2], strict=True)))
        mark = _text(mark) if isinstance(mark, bytes) else ""
        facts = NodeInfo.of(text, fsync, mark if MARK.fullmatch(mark) else "")
    return text, facts, None


def ask(connection: Any, requests: Sequence[bytes]) -> list[Any]:
    """Return the replies to requests, written at once; error replies are among them."""
    connection.send_packed_command([b"".join(requests)], check_health=False)
    replies: list[Any] = []
    for _ in requests:
        try:
            replies.append(connection.read_response())
        except ResponseError as error:
            replies.append(error)
    return replies


def _forbidden(error: ResponseError) -> bool:
    """Not permitted (ACL), or renamed away."""
    return isinstance(error, NoPermissionError) or "unknown command" in str(error).lower()


def _text(reply: Any) -> str:
    if not isinstance(reply, bytes):
        raise NodeError(f"answered INFO with a {type(reply).__name__} that is no answer to it")
    return reply.decode("utf-8", "replace")
