"""Decide when a parked delivery has been kept waiting by one holder for its whole deadline.

A task with a `retry_deadline` fails when the same holder has been in its way for that long.
The process of its body decides so, as it does for a delivery that was never parked. Until then a
try would not succeed, so the delivery stays parked while its key changes hands. When it goes, its
message names the holder of the key and the time since then, so that a single try is enough.
"""

from __future__ import annotations

import time

from ...messages.headers import ATTEMPTS, RECEIPT, attempts_of, mapping_of, waited
from ...protocol.values import token_digest
from .admission import Parked
from .watched import Watched

__all__ = ["goes_now"]


def goes_now(parked: Parked, watched: Watched | None, now: float) -> bool:
    """Return True if a delivery goes to the pool now, to meet its lock; if not, set when it is due.

    Args:
        parked: The delivery.
        watched: The results of the looks at its resources on the nodes, if any.
        now: Seconds.
    """
    if parked.until > now:
        return False
    if parked.deadline is None or watched is None or watched.no_quorum is not None:
        return True
    if now >= parked.latest:
        return True
    message = parked.request.request_dict
    attempts, received = attempts_of(message), now - waited(message)
    holder = token_digest(next(iter(watched.holders))) if len(watched.holders) == 1 else None
    if holder is not None and holder == attempts.get("holder"):
        since = received - attempts["stuck"]  # the same holder has refused it before
    else:
        since = max(received, watched.held_since)
    seen = now if watched.is_start else watched.looked  # a start is never released
    if since + parked.deadline > seen:
        parked.until = min(since + parked.deadline, parked.latest)
        return False
    if holder is not None and holder != attempts.get("holder"):
        message[ATTEMPTS] = {**attempts, "holder": holder, "stuck": 0.0, "pause": 0.0}
        at = time.monotonic() - (now - since)
        message[RECEIPT] = {**mapping_of(message, RECEIPT), "at": at}
    return True
