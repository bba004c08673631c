"""Reads from a subscription, as the threads that wait do."""

from __future__ import annotations

import contextlib
import math
import select
from collections.abc import Iterator

from celery_redlock.runtime.polling import WAITS
from celery_redlock.stores.subscription import Subscription

__all__ = ["calls"]


def calls(subscription: Subscription) -> Iterator[bytes]:
    """Yield the names that a connected subscription is sent, and keep it alive meanwhile."""
    while True:
        ready = select.select([subscription.fileno()], [], [], min(1.0, subscription.every))[0]
        with contextlib.suppress(WAITS):
            if ready or subscription.every < math.inf:
                yield from subscription.read()
