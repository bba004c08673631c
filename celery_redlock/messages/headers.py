"""Read and write the headers of a message that describe its earlier deliveries: untrusted input."""

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
    "header_of",
    "is_redelivered",
    "mapping_of",
    "mark_copy",
    "original_options",
    "receive",
    "serializer_of",
    "short_id",
    "waited",
]

_serialization: Any = serialization  # its stubs lack the registry

ATTEMPTS = "redlock_attempts"
"""Message header: how often a task was sent again because its lock was held or no quorum answered,
since when, which holder was in its way and for how long, and if it is a copy of a message that was
running."""
RESERVATION = "redlock_reservation"
"""Message header: its reservation. Untrusted input: see `Reservation.of`."""
RECEIPT = "redlock_receipt"
"""Header that a worker adds to a request for the process that runs it: the time of its receipt, and
its content type. It travels with a retry by the user, and is replaced at each receipt."""
_HEADERS = frozenset(("argsrepr", "kwargsrepr", "compression", "ignore_result"))
_COPIED: Mapping[type, tuple[str, ...]] = {
    str: (
        *("argsrepr", "kwargsrepr", "compression"),
        *("correlation_id", "app_id", "message_id", "type", "user_id", "cluster_id"),
    ),
    bool: ("ignore_result",),
    int: ("delivery_mode", "timestamp"),
}
"""The names that `original_options` copies, by type, from the headers or else the properties."""
MAX_SECONDS = 1e12
"""The largest time since 1970, or timespan, in seconds: no clock shows more, so a larger number is
forged."""
MAX_RETRIES, MAX_ATTEMPTS = 10**9, 10**6
"""The largest counts of a header: honest ones are far smaller, and larger numbers would make a
token longer."""
MAX_ID_CHARS = 200
"""Maximum number of characters of a task's id in a token; Celery's own ids have 36."""


def header_of(request: Any, name: str) -> Any:
    """Return a header of a message, from its headers or from the request that Celery makes of them.

    The request's `__dict__` is read, because a header may have the name of a method. The headers of
    a message of protocol 1 are in a header named `headers`.
    """
    headers = request if isinstance(request, dict) else getattr(request, "__dict__", {})
    given = headers.get(name)
    if given is None and isinstance(nested := headers.get("headers"), dict):
        given = nested.get(name)
    return given


def mapping_of(request: Any, name: str) -> Mapping[str, Any]:
    """Return a header that is a mapping; an empty mapping if there is none."""
    given = header_of(request, name)
    return given if isinstance(given, dict) else {}


def attempts_of(request: Any) -> dict[str, Any]:
    """Return the checked contents of the `ATTEMPTS` header, with zeros if there is none."""
    given, now = mapping_of(request, ATTEMPTS), time.time()
    if not given:  # the short way, taken nearly always
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
    """Return the `attempts_of` a request, with the refusal that it has just met counted.

    `stuck` is the number of seconds for which one and the same holder has been in its way. A new
    holder means that the key makes progress, so it starts from 0 again. It is a sum of durations,
    each measured on one host, so differences between clocks do not matter. Time in the queue does
    not count.
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
        # A worker may have held it during its pause, so the two are not added up.
        attempts["stuck"] += max(attempts["pause"], waited(request))
    if holder is not None:
        attempts["holder"] = holder
    return attempts


def is_redelivered(delivery_info: Any) -> bool:
    """Return True if the broker reports that a worker had this message before."""
    return isinstance(delivery_info, dict) and bool(delivery_info.get("redelivered"))


def mark_copy(request: dict[str, Any]) -> None:
    """Note in a message's headers that its first delivery is running."""
    given = request.get(ATTEMPTS)
    request[ATTEMPTS] = {**(given if isinstance(given, Mapping) else {}), "copy": True}


def receive(request: dict[str, Any], content_type: Any) -> None:
    """Note in a message's headers that a worker has just received it, and its content type."""
    request[RECEIPT] = {"at": time.monotonic(), "content_type": content_type}


def waited(request: Any) -> float:
    """Return the seconds since the worker received this message; 0 if that was not noted."""
    at = mapping_of(request, RECEIPT).get("at")
    return max(0.0, time.monotonic() - at) if isinstance(at, float) else 0.0


def serializer_of(request: Any) -> str | None:
    """Return the name of the serializer of this message; None if it is not known."""
    content_type = mapping_of(request, RECEIPT).get("content_type")
    names = _serialization.registry.type_to_name
    name = names.get(content_type) if isinstance(content_type, str) else None
    return name if isinstance(name, str) else None


def original_options(request: Any) -> dict[str, Any]:
    """Return the options that send a message again in the form of this one.

    These are the options that Celery itself does not copy when it sends a message again: its
    serializer and compression, the text shown for its arguments in monitors (they may be secret),
    its AMQP properties, and before Celery 5.7 `ignore_result`.
    """
    options: dict[str, Any] = {}
    if (serializer := serializer_of(request)) is not None:
        options["serializer"] = serializer
    properties = mapping_of(request, "properties")
    for kind, names in _COPIED.items():
        for name in names:
            given = header_of(request, name) if name in _HEADERS else properties.get(name)
            if type(given) is kind:
                options[name] = given
    if options.get("compression") not in compression.encoders():  # anybody may have written it
        options.pop("compression", None)
    return options


def _number(given: Any, least: float) -> float | None:
    """Return a number of seconds from a header; None if it is not a possible one."""
    number = isinstance(given, (int, float)) and not isinstance(given, bool)
    return given if number and least <= given < MAX_SECONDS else None


def count(given: Any, most: int) -> int:
    """Return a count from a header, at most `most`; 0 if it is not a count."""
    return min(max(0, given), most) if type(given) is int else 0


def short_id(task_id: Any) -> str:
    """Return a task's id in the form that it has in tokens.

    Its length is limited, because a connection takes a limited number of bytes at once.
    """
    try:
        text = "" if task_id is None else str(task_id)
    except (ValueError, RecursionError):  # a number with thousands of digits, or nested lists
        text = f"no id, but a {type(task_id).__name__}"
    if len(text) <= MAX_ID_CHARS:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{text[:MAX_ID_CHARS]}#{digest}"
