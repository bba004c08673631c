"""What a message's headers tell of its earlier deliveries: foreign input, not trusted far."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["ATTEMPTS", "FEW", "attempts_of", "count", "is_redelivered", "mark_copy", "short_id"]

ATTEMPTS = "redlock_attempts"
"""Message header: how often a task was sent again for want of its lock, since when, and whether it
is a copy of a message that was at work."""
FAR = 1e12
"""Seconds since 1970 that no clock shows; who sends more forges."""
FEW, MANY = 10**9, 10**6
"""Counts that no header may exceed: of retries, and of attempts."""
LONG = 200
"""Characters of a task's id; Celery's own have 36."""


def attempts_of(request: Any) -> dict[str, Any]:
    """How often this message was sent again, and since when."""
    given = request.get(ATTEMPTS)
    given = given if isinstance(given, Mapping) else {}
    now = time.time()
    since = given.get("since")
    if isinstance(since, bool) or not isinstance(since, (int, float)) or not abs(since) < FAR:
        since = now
    attempts: dict[str, Any] = {"since": min(since, now)}
    if given.get("copy") is True:
        attempts["copy"] = True
    for why in ("held", "unavailable"):
        attempts[why] = count(given.get(why), MANY)
    return attempts


def is_redelivered(delivery_info: Any) -> bool:
    """Whether the broker says that this message was with a worker before."""
    return isinstance(delivery_info, Mapping) and bool(delivery_info.get("redelivered"))


def mark_copy(request: dict[str, Any]) -> None:
    """Note in a message's headers that its first delivery is at work."""
    given = request.get(ATTEMPTS)
    request[ATTEMPTS] = {**(given if isinstance(given, Mapping) else {}), "copy": True}


def count(given: Any, most: int) -> int:
    """A count that a header gives, if it is one; at most `most`."""
    return min(max(0, given), most) if type(given) is int else 0


def short_id(task_id: Any) -> str:
    """A task's id as it stands in a token, which must fit into what a connection takes at once."""
    text = "" if task_id is None else str(task_id)
    if len(text) <= LONG:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{text[:LONG]}#{digest}"
