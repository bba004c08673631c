"""What a message's headers tell of its earlier deliveries: foreign input, not trusted far."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any

from kombu import serialization

__all__ = [
    "ATTEMPTS",
    "FEW",
    "LONG",
    "attempts_of",
    "count",
    "is_redelivered",
    "mark_copy",
    "receive",
    "said",
    "serializer_of",
    "short_id",
    "stuck_for",
    "waited",
]

_serialization: Any = serialization  # its stubs lack the registry

ATTEMPTS = "redlock_attempts"
"""Message header: how often a task was sent again for want of its lock, since when, which holder
was in its way and for how long, whether it is a copy of a message that was at work, and whether the
broker has delivered it more than once."""
RECEIPT = "redlock_receipt"
"""Put among a request's headers by its worker, for the process that runs it: when it was received,
and in which words. Travels with a message that is sent again, and is written anew at each receipt.
"""
FAR = 1e12
"""Seconds since 1970 that no clock shows; who sends more forges."""
FEW, MANY = 10**9, 10**6
"""Counts that no header may exceed: of retries, and of attempts."""
LONG = 200
"""Characters of a task's id; Celery's own have 36."""


def said(request: Any, name: str) -> Any:
    """A header of a message: of its headers, or of the request that Celery has made of them.

    There a header may be in the way of a method; and those of protocol 1 are in one of this name.
    """
    headers = request if isinstance(request, Mapping) else getattr(request, "__dict__", {})
    given = headers.get(name)
    if given is None and isinstance(headers.get("headers"), Mapping):
        given = headers["headers"].get(name)
    return given


def attempts_of(request: Any) -> dict[str, Any]:
    """How often this message was sent again, and since when."""
    given = said(request, ATTEMPTS)
    given = given if isinstance(given, Mapping) else {}
    now = time.time()
    since = given.get("since")
    if isinstance(since, bool) or not isinstance(since, (int, float)) or not abs(since) < FAR:
        since = now
    attempts: dict[str, Any] = {"since": min(since, now)}
    for name in ("stuck", "pause"):
        attempts[name] = _seconds(given.get(name))
    holder = given.get("holder")
    if isinstance(holder, str) and len(holder) <= LONG:
        attempts["holder"] = holder
    for name in ("copy", "again", "parked"):
        if given.get(name) is True:
            attempts[name] = True
    for why in ("held", "unavailable"):
        attempts[why] = count(given.get(why), MANY)
    return attempts


def stuck_for(request: Any, attempts: dict[str, Any], holder: str | None) -> float:
    """Return for how many seconds one and the same holder has been in a message's way.

    Noted in `attempts`, as is the holder. Another one means that the key makes progress: counted
    from 0 again. Only durations are added up, each measured by one host: clocks that differ decide
    nothing. What a message spends in its queue is not counted.

    Args:
        request: The request that was just refused.
        attempts: What `attempts_of` told of it, the refusal counted.
        holder: A digest of the holder's token; None where too few nodes answered.
    """
    first = attempts["held"] + attempts["unavailable"] <= 1
    if first or (holder is not None and holder != attempts.get("holder")):
        attempts["stuck"] = 0.0
    else:
        # A worker may have held it for its pause.
        attempts["stuck"] += max(attempts["pause"], waited(request))
    if holder is not None:
        attempts["holder"] = holder
    return float(attempts["stuck"])


def is_redelivered(delivery_info: Any) -> bool:
    """Whether the broker says that this message was with a worker before."""
    return isinstance(delivery_info, Mapping) and bool(delivery_info.get("redelivered"))


def mark_copy(request: dict[str, Any]) -> None:
    """Note in a message's headers that its first delivery is at work."""
    given = request.get(ATTEMPTS)
    request[ATTEMPTS] = {**(given if isinstance(given, Mapping) else {}), "copy": True}


def receive(request: dict[str, Any], content_type: Any) -> None:
    """Note in a message's headers that a worker has just received it, and how it was written."""
    request[RECEIPT] = {"at": time.monotonic(), "content_type": content_type}


def waited(request: Any) -> float:
    """Seconds since the worker received this message; 0 where nobody noted when."""
    at = _receipt(request).get("at")
    return max(0.0, time.monotonic() - at) if isinstance(at, float) else 0.0


def serializer_of(request: Any) -> str | None:
    """The name of what this message was written with; None if that is not known."""
    content_type = _receipt(request).get("content_type")
    name = None
    if isinstance(content_type, str):
        name = _serialization.registry.type_to_name.get(content_type)
    return name if isinstance(name, str) else None


def _receipt(request: Any) -> Mapping[str, Any]:
    given = said(request, RECEIPT)
    return given if isinstance(given, Mapping) else {}


def _seconds(given: Any) -> float:
    """A duration that a header gives, if it is one; else 0."""
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given < FAR:
        return 0.0
    return float(given)


def count(given: Any, most: int) -> int:
    """A count that a header gives, if it is one; at most `most`."""
    return min(max(0, given), most) if type(given) is int else 0


def short_id(task_id: Any) -> str:
    """A task's id as it stands in a token, which must fit into what a connection takes at once."""
    try:
        text = "" if task_id is None else str(task_id)
    except (ValueError, RecursionError):  # a number of thousands of digits, a list in a list in...
        text = f"no id, but a {type(task_id).__name__}"
    if len(text) <= LONG:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{text[:LONG]}#{digest}"
