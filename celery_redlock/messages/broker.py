"""Differences between brokers in the treatment of a message that waits.

Three things matter to a task that is sent again because its lock is held:

- How it is delayed. Most brokers deliver at once, and a worker holds the message until its ETA.
  Celery 5.5 and newer let RabbitMQ delay it if the queues are quorum queues and the exchange is not
  a direct one: for whole seconds only, and a shorter delay is an error.
- How long a worker may keep a message that it has not acknowledged.
- How often a message may be returned before the broker drops it: quorum queues count.
"""

from __future__ import annotations

import functools
import math
import numbers
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware

from .headers import header_of

__all__ = [
    "can_be_returned",
    "delayed_by_broker",
    "has_invalid_address",
    "has_quorum_queues",
    "max_unacknowledged_s",
    "may_be_dropped",
    "priority_order",
    "queue_of",
    "resend_options",
    "seconds_until",
    "without_delays",
]

UNACKNOWLEDGED_S = 1800.0
"""Seconds for which a worker may keep a message if nothing is set: the default of SQS, and of
RabbitMQ's `consumer_timeout`. Redis allows an hour."""
DELIVERY_LIMIT = 20
"""The number of returns after which RabbitMQ 4 drops a message of a quorum queue without a limit of
its own. (3.x drops none, but to act as if it did costs only one message.)"""
MAX_PRIORITY = 255
"""The largest priority in AMQP 0-9-1; a larger number is not a priority."""
DELAYS = "celery_delayed_"
"""The common part of the names of the queues in which RabbitMQ delays a message."""
_PREFIX = re.compile(r"^(?:[01]\.){28}")
"""The prefix that Celery puts before the routing key of a message that RabbitMQ delays."""


def max_unacknowledged_s(app: Any) -> float:
    """Return the seconds for which a worker may keep a message that it has not acknowledged.

    After that the broker delivers it to another worker; RabbitMQ closes the worker's channel as
    well, which ends the worker. Clients cannot see a `consumer_timeout` in RabbitMQ's configuration
    or in a policy. A user who sets one must repeat it in `broker_transport_options` as
    `visibility_timeout` (as for Redis), or in the arguments of the queue (`x-consumer-timeout`,
    milliseconds).
    """
    visibility = _seconds((app.conf.broker_transport_options or {}).get("visibility_timeout"))
    given = (visibility, _consumer_timeout(app, len(app.amqp.queues)))
    return min((one for one in given if one is not None), default=UNACKNOWLEDGED_S)


# Cached, because it is needed with every delivery. The number of queues is part of the cache key:
# queues are only added to an app, and none is changed. A process has one app, but tests have many.
@functools.lru_cache(maxsize=8)
def _consumer_timeout(app: Any, _queues: int) -> float | None:
    """Return the shortest timeout in the arguments of an app's queues; seconds."""
    arguments = (queue.queue_arguments or {} for queue in app.amqp.queues.values())
    given = [_seconds(one.get("x-consumer-timeout")) for one in arguments]
    shortest = min((one for one in given if one is not None), default=None)
    return shortest and shortest / 1000


def delayed_by_broker(app: Any, request: Any) -> bool:
    """Return True if RabbitMQ delays a message that is sent again to the queue it came from.

    It makes the check of `Celery.send_task`, but for this message's exchange, and not for that of
    the default queue.
    """
    if not has_quorum_queues(app):
        return False
    exchange, routing_key = _checked_address(request)
    if _PREFIX.match(routing_key):  # it was delayed before
        return True
    queue = queue_of(app, request)
    if queue is not None:
        return bool(queue.exchange.type != "direct")
    types = {one.exchange.type for one in app.amqp.queues.values() if one.exchange.name == exchange}
    return bool(types) and "direct" not in types


def seconds_until(app: Any, when: Any) -> float | None:
    """Return the seconds until a time, or of a timespan, in the way that Celery reads `when`.

    Return None if Celery would not accept it.
    """
    try:
        if when is None:
            return None
        if isinstance(when, str):
            when = maybe_iso8601(when)
        if isinstance(when, datetime):
            aware = maybe_make_aware(when, app.timezone)
            return float((aware - maybe_make_aware(app.now())).total_seconds())
        if isinstance(when, numbers.Real):
            return float(when)
    except (ValueError, OverflowError, TypeError):
        pass
    return None


def resend_options(app: Any, request: Any, countdown: float) -> dict[str, Any]:
    """Return the options that send a message again, after `countdown` seconds, to its old queue.

    If the broker delays it (`delayed_by_broker`), there is no ETA among them. With an ETA Celery
    would derive the route from the default queue, and the worker that gets the message would hold
    it for the missing part of a whole second.
    """
    exchange, routing_key = _checked_address(request)
    queue = queue_of(app, request)
    if not delayed_by_broker(app, request):
        # Without a queue Celery would look at the exchange of the default queue.
        if queue is not None and has_quorum_queues(app):
            return {"countdown": countdown, "queue": queue.name}
        return {"countdown": countdown}
    from kombu import Exchange
    from kombu.transport.native_delayed_delivery import (
        MAX_LEVEL,
        calculate_routing_key,
        level_name,
    )

    if exchange == "" and queue is not None:
        routing_key = queue.routing_key
    seconds = max(1, math.ceil(countdown))
    return {
        # Without a queue Celery would declare the default one.
        **({"queue": queue.name} if queue is not None else {}),
        "exchange": Exchange(level_name(MAX_LEVEL), type="topic"),
        "routing_key": calculate_routing_key(seconds, _PREFIX.sub("", routing_key, count=1)),
    }


def without_delays(headers: Any) -> dict[str, Any]:
    """Return a message's headers without the traces of RabbitMQ's delays, and without CC and BCC.

    RabbitMQ sends a copy to each queue in CC and BCC, and did so when the message first came.
    Traces of delays look like a circle of dead letters: RabbitMQ 3 silently drops a message that
    must pass through a delay queue again and has that queue in its `x-death`.
    """
    kept: dict[str, Any] = dict(headers) if isinstance(headers, Mapping) else {}
    for copies in ("CC", "BCC"):
        kept.pop(copies, None)
    deaths = kept.get("x-death")
    if isinstance(deaths, list):
        del kept["x-death"]
        others = [death for death in deaths if not _is_delay(death)]
        if others:
            kept["x-death"] = others
    return kept


def may_be_dropped(app: Any, request: Any) -> bool:
    """Return True if the broker may drop this message when it is returned once more.

    The result is True one return early, because the message must be sent again before this worker
    ends.
    """
    count = header_of(request, "x-delivery-count")
    if type(count) is not int or count < 1:
        return False
    queue = queue_of(app, request)
    arguments = (queue.queue_arguments if queue is not None else None) or {}
    limit = arguments.get("x-delivery-limit", DELIVERY_LIMIT)
    if type(limit) is not int or limit < 0:  # -1: without a limit
        return False
    return count >= max(1, limit - 1)


def has_quorum_queues(app: Any) -> bool:
    """Return True if an app's broker is RabbitMQ and one of the app's queues is a quorum queue."""
    return _has_quorum_queues(app, len(app.amqp.queues))


@functools.lru_cache(maxsize=8)
def _has_quorum_queues(app: Any, _queues: int) -> bool:
    try:
        from celery.utils.quorum_queues import detect_quorum_queues
    except ImportError:  # Celery 5.4 never lets the broker delay a message
        return False
    driver_type = app.producer_pool.connections.connection.transport.driver_type
    return bool(detect_quorum_queues(app, driver_type)[0])


def _is_delay(death: Any) -> bool:
    queue = death.get("queue") if isinstance(death, Mapping) else None
    return isinstance(queue, str) and DELAYS in queue


def _address(request: Any) -> tuple[Any, Any]:
    """Return the exchange and the routing key that are given in a message.

    On Redis they are part of the message itself, so anybody may have written them.
    """
    info = header_of(request, "delivery_info")
    info = info if isinstance(info, Mapping) else {}
    return info.get("exchange"), info.get("routing_key")


def has_invalid_address(request: Any) -> bool:
    """Return True if the exchange or routing key given in a message cannot be one."""
    return any(by and not isinstance(by, str) for by in _address(request))


def can_be_returned(request: Any) -> bool:
    """Return True if a message can be returned to the broker.

    On Redis kombu returns it to the queue that is given in the message. If that is not the name of
    a queue, kombu raises in the worker's main process, which ends the worker.
    """
    exchange, routing_key = _address(request)
    named = isinstance(routing_key, str) and bool(exchange or routing_key)
    return named and not has_invalid_address(request)


def _checked_address(request: Any) -> tuple[str, str]:
    """Return the exchange and the routing key of a message; empty if they are not text."""
    exchange, routing_key = (by if isinstance(by, str) else "" for by in _address(request))
    return exchange, routing_key


def queue_of(app: Any, request: Any) -> Any:
    """Return the app's queue that a message came from; None if it is not known."""
    exchange, routing_key = _checked_address(request)
    queues = app.amqp.queues
    if exchange == "":
        return dict(queues).get(routing_key)
    delayed = _PREFIX.match(routing_key)
    routing_key = _PREFIX.sub("", routing_key, count=1)
    for queue in queues.values():
        if queue.routing_key == routing_key and (delayed or queue.exchange.name == exchange):
            return queue
    return None


def _seconds(value: Any) -> float | None:
    """Return a setting as seconds; None if it is not a positive number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        return None
    return float(value)


def priority_order(delivery_info: Mapping[str, Any] | None, *, amqp: bool) -> float:
    """Return a message's priority as a number, where smaller numbers go first; 0 without one.

    In AMQP larger priorities go first, in other transports smaller ones.
    """
    priority = (delivery_info or {}).get("priority")
    if not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        return 0.0
    return float(-priority if amqp else priority)
