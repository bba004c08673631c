"""What a message's headers tell of its earlier deliveries: foreign input, not trusted far."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any

from kombu import compression, serialization

from ..protocol.errors import NotAcquired, ResourceHeld

__all__ = [
    "ATTEMPTS",
    "MAX_ATTEMPTS",
    "MAX_ID_CHARS",
    "MAX_RETRIES",
    "RESERVATION",
    "attempts_of",
    "count",
    "count_refusal",
    "is_redelivered",
    "mapping_of",
    "mark_copy",
    "receive",
    "said",
    "serializer_of",
    "short_id",
    "waited",
    "written_as",
]

_serialization: Any = serialization  # its stubs lack the registry

ATTEMPTS = "redlock_attempts"
"""Message header: how often a task was sent again because its lock was held or no quorum answered,
since when, which holder was in its way and for how long, and whether it is a copy of a message that
was at work."""
RESERVATION = "redlock_reservation"
"""Message header: what its reservation is. Foreign input: see `Reservation.of`."""
RECEIPT = "redlock_receipt"
"""Put among a request's headers by its worker, for the process that runs it: when it was received,
and in which words. It travels with a retry of the user's, and is replaced at each receipt."""
_HEADERS = frozenset(("argsrepr", "kwargsrepr", "compression", "ignore_result"))
_KEPT: Mapping[type, tuple[str, ...]] = {
    str: (
        *("argsrepr", "kwargsrepr", "compression"),
        *("correlation_id", "app_id", "message_id", "type", "user_id", "cluster_id"),
    ),
    bool: ("ignore_result",),
    int: ("delivery_mode", "timestamp"),
}
"""What `written_as` takes over, by its type: from the headers, or else from the properties."""
MAX_SECONDS = 1e12
"""Since 1970, or of a span: no clock shows more, so whoever sends more forges."""
MAX_RETRIES, MAX_ATTEMPTS = 10**9, 10**6
"""What a header may count: no honest one comes near, and larger numbers would grow a token."""
MAX_ID_CHARS = 200
"""Characters of a task's id in a token; Celery's own have 36."""


def said(request: Any, name: str) -> Any:
    """Return a header of a message: of its headers, or of the request that Celery makes of them.

    There a header may be in the way of a method; and those of protocol 1 are in one of this name.
    """
    headers = request if isinstance(request, dict) else getattr(request, "__dict__", {})
    given = headers.get(name)
    if given is None and isinstance(nested := headers.get("headers"), dict):
        given = nested.get(name)
    return given


def mapping_of(request: Any, name: str) -> Mapping[str, Any]:
    """Return a header of a message that is a mapping; an empty one if there is none."""
    given = said(request, name)
    return given if isinstance(given, dict) else {}


def attempts_of(request: Any) -> dict[str, Any]:
    """How often this message was sent again, and since when."""
    given, now = mapping_of(request, ATTEMPTS), time.time()
    if not given:  # nearly always
        return {"since": now, "stuck": 0.0, "pause": 0.0, "held": 0, "unavailable": 0}
    since = _number(given.get("since"), -MAX_SECONDS)
    attempts: dict[str, Any] = {"since": now if since is None else min(since, now)}
    for name in ("stuck", "pause"):
        attempts[name] = float(_number(given.get(name), 0) or 0)
    holder = given.get("holder")
    if isinstance(holder, str) and len(holder) <= MAX_ID_CHARS:
        attempts["holder"] = holder
    if given.get("copy") is True:
        attempts["copy"] = True
    if isinstance(given.get("parked"), bool):
        attempts["parked"] = given["parked"]
    for why in ("held", "unavailable"):
        attempts[why] = count(given.get(why), MAX_ATTEMPTS)
    return attempts


def count_refusal(request: Any, refusal: NotAcquired) -> dict[str, Any]:
    """Return what `attempts_of` tells of a request, with the refusal that it has just met counted.

    `stuck` is for how many seconds one and the same holder has been in its way. Another one means
    that the key makes progress: counted from 0 again. Only durations are added up, each measured by
    one host: clocks that differ decide nothing. Time that it spends in its queue does not count.
    """
    attempts = attempts_of(request)
    attempts["held" if isinstance(refusal, ResourceHeld) else "unavailable"] += 1
    held_by = refusal.holder if isinstance(refusal, ResourceHeld) else None
    holder = held_by.digest if held_by else None
    # A worker that parked it may have seen the holder before this first refusal.
    first = attempts["held"] + attempts["unavailable"] <= 1 and "holder" not in attempts
    if first or (holder is not None and holder != attempts.get("holder")):
        attempts["stuck"] = 0.0
    else:
        # A worker may have held it for its pause.
        attempts["stuck"] += max(attempts["pause"], waited(request))
    if holder is not None:
        attempts["holder"] = holder
    return attempts


def is_redelivered(delivery_info: Any) -> bool:
    """Whether the broker says that this message was with a worker before."""
    return isinstance(delivery_info, dict) and bool(delivery_info.get("redelivered"))


def mark_copy(request: dict[str, Any]) -> None:
    """Note in a message's headers that its first delivery is at work."""
    given = request.get(ATTEMPTS)
    request[ATTEMPTS] = {**(given if isinstance(given, Mapping) else {}), "copy": True}


def receive(request: dict[str, Any], content_type: Any) -> None:
    """Note in a message's headers that a worker has just received it, and how it was written."""
    request[RECEIPT] = {"at": time.monotonic(), "content_type": content_type}


def waited(request: Any) -> float:
    """Seconds since the worker received this message; 0 where nobody noted when."""
    at = mapping_of(request, RECEIPT).get("at")
    return max(0.0, time.monotonic() - at) if isinstance(at, float) else 0.0


def serializer_of(request: Any) -> str | None:
    """The name of what this message was written with; None if that is not known."""
    content_type = mapping_of(request, RECEIPT).get("content_type")
    names = _serialization.registry.type_to_name
    name = names.get(content_type) if isinstance(content_type, str) else None
    return name if isinstance(name, str) else None


def written_as(request: Any) -> dict[str, Any]:
    """Return the options that write a message as this one was written.

    These are the ones that Celery itself does not copy when it sends a message again: its
    serializer and compression, what stands for its arguments in monitors (they may be secret), its
    AMQP properties, and before Celery 5.7 whether its result is ignored.
    """
    options: dict[str, Any] = {}
    if (serializer := serializer_of(request)) is not None:
        options["serializer"] = serializer
    properties = mapping_of(request, "properties")
    for kind, names in _KEPT.items():
        for name in names:
            given = said(request, name) if name in _HEADERS else properties.get(name)
            if type(given) is kind:
                options[name] = given
    if options.get("compression") not in compression.encoders():  # anybody may have written it
        options.pop("compression", None)
    return options


def _number(given: Any, least: float) -> float | None:
    """Seconds that a header gives, if they can be; else None."""
    number = isinstance(given, (int, float)) and not isinstance(given, bool)
    return given if number and least <= given < MAX_SECONDS else None


def count(given: Any, most: int) -> int:
    """A count that a header gives, if it is one; at most `most`."""
    return min(max(0, given), most) if type(given) is int else 0


def short_id(task_id: Any) -> str:
    """A task's id as it stands in a token, which must fit into what a connection takes at once."""
    try:
        text = "" if task_id is None else str(task_id)
    except (ValueError, RecursionError):  # a number of thousands of digits, a list in a list in...
        text = f"no id, but a {type(task_id).__name__}"
    if len(text) <= MAX_ID_CHARS:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{text[:MAX_ID_CHARS]}#{digest}"
