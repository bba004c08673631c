"""The questions to a node about itself, right after a connection to it was made.

They block only the thread that connects. A user without the right to INFO (see the ACL rule in the
docs) gets no answer to them. Then one thing can still be found out: that two addresses lead to one
server. Each address gets a nonce, a key with a random name, and is searched for the nonces of the
others.
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
"""Without them a lock could be acquired and not be released."""
MARK = re.compile(r"\d{1,12}\.\d{3}( \w{0,40}){3}")
"""The format of the value of `TRUSTED_KEY`; any other value is foreign."""
READ_MARK = b"return string.sub(redis.call('GET', KEYS[1]) or '', 1, 200)"
"""Only a beginning: a foreign value may have megabytes, and a reply that long is an error."""
NONCE_LIFE_MS = b"60000"
"""Two nodes that are reached within this time, in ms, can be recognised as the same."""


def introduce(
    connection: Any, *, index: int, nonces: Sequence[str], prefix: str, guarded: bool
) -> NodeInfo:
    """Query a node about itself, over a connection of redis-py.

    Args:
        connection: The connection.
        index: The number of the node.
        nonces: A key per node, with a name that only this process has.
        prefix: Prefix of our keys.
        guarded: True if it matters whether the node keeps the locks that it has acknowledged.

    Raises:
        NodeError, redis.RedisError, OSError: The answer is invalid, or an error other than a
            missing right.
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
    # In this order: if two processes do it at the same time, at least one finds the other's nonce.
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
    """Parse the replies to `INFO`: return their text, the facts, and the error if it is refused."""
    for reply in sections:
        if isinstance(reply, ResponseError):
            return "", NodeInfo(), reply
    text = "\n".join(map(_text, sections))
    return text, NodeInfo.of(text), None


def marked(facts: NodeInfo, ask: Callable[[Sequence[bytes]], list[Any]], prefix: str) -> NodeInfo:
    """Return a node's facts, with its mark if it was promoted and has one."""
    if not facts.history:
        return facts
    (reply,) = ask([request(b"EVAL", READ_MARK, b"1", (prefix + TRUSTED_KEY).encode())])
    mark = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else ""
    return replace(facts, mark=mark) if MARK.fullmatch(mark) else facts


def ask(connection: Any, requests: Sequence[bytes]) -> list[Any]:
    """Return the replies to requests that are written at once, error replies included."""
    connection.send_packed_command([b"".join(requests)], check_health=False)
    replies: list[Any] = []
    for _ in requests:
        try:
            replies.append(connection.read_response())
        except ResponseError as error:
            replies.append(error)
    return replies


def _forbidden(error: ResponseError) -> bool:
    """Return True if a command is not permitted (ACL), or renamed away."""
    return isinstance(error, NoPermissionError) or "unknown command" in str(error).lower()


def _text(reply: Any) -> str:
    if not isinstance(reply, bytes):
        raise NodeError(f"answered INFO with a {type(reply).__name__}, which is no valid reply")
    return reply.decode("utf-8", "replace")
