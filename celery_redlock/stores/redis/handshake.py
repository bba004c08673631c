"""What a node is asked about itself, right after a connection to it was made.

It blocks, in the thread that connects, and nobody else waits. A user that may not ask (see the ACL
rule in the docs) has no INFO. Then one thing can still be found out, that two addresses lead to one
server: each of them gets a nonce, a key with a random name, and looks for the others' nonces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from ...protocol.errors import NodeError
from ...protocol.names import TRUSTED_KEY
from ...protocol.node_info import NodeInfo
from .requests import request
from .resp import reason

__all__ = ["INFO", "ask", "introduce", "marked", "read_info"]

INFO = tuple(
    request(b"INFO", section)
    for section in (b"server", b"replication", b"memory", b"persistence", b"cluster")
)
SCRIPTS = (request(b"EVAL", b"return 1", b"0"), request(b"EVALSHA", b"0" * 40, b"0"))
"""Without them a lock could be taken and not be given back."""
MARK = re.compile(r"\d{1,12}\.\d{3}( \w{0,40}){3}")
"""What `TRUSTED_KEY` says; anything else there is not ours."""
READ_MARK = b"return string.sub(redis.call('GET', KEYS[1]) or '', 1, 200)"
"""Not the whole: what is not ours may be megabytes, and a reply that long is an error."""
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
    _info, facts, error = read_info(sections)
    if error is None:
        return marked(facts, partial(ask, connection), prefix) if guarded else facts
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


def read_info(sections: Sequence[Any]) -> tuple[str, NodeInfo, ResponseError | None]:
    """Read the replies to `INFO`: their text, what the guard makes of it, or why it is refused."""
    for reply in sections:
        if isinstance(reply, ResponseError):
            return "", NodeInfo(), reply
    text = "\n".join(map(_text, sections))
    return text, NodeInfo.of(text), None


def marked(facts: NodeInfo, ask: Callable[[Sequence[bytes]], list[Any]], prefix: str) -> NodeInfo:
    """Return what a node has said of itself, with its mark if it was promoted and has one."""
    if not facts.history:
        return facts
    (reply,) = ask([request(b"EVAL", READ_MARK, b"1", (prefix + TRUSTED_KEY).encode())])
    mark = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else ""
    return replace(facts, mark=mark) if MARK.fullmatch(mark) else facts


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
