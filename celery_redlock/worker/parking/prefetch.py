"""Widen the prefetch window by what is parked, and give messages back.

Parked deliveries are unacknowledged. They would fill the prefetch window, and tasks of other keys
could not pass by: so the window is made wider by their number. Where that cannot be done, they may
fill half of it at most. If this worker dies, nobody should wait for them for an hour: a Redis
broker is told to give them to another worker a minute after we stop saying that we are here. (An
AMQP broker does that at once, by itself.)
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from queue import Empty
from typing import Any

from celery.worker import state
from celery.worker.request import Request
from kombu.transport import virtual

from ...messages.broker import has_quorum_queues
from ...protocol.texts import event
from ...runtime.clock import monotonic
from .admission import Parked

__all__ = ["Prefetch"]

logger = logging.getLogger("celery_redlock.parking")

RETURN_S = 60.0
"""Seconds after which a Redis broker gives what is parked to another worker, if we are silent. It
looks every 100 s or so."""
RENEW_S = 15.0
"""Seconds between two times that we say that we are here."""
RENEWED_AT_ONCE = 1000
"""Messages of which a sweep says so; more would block the event loop for longer than 5 ms."""
BACK_AT_ONCE = 100
"""Messages that go back in one sweep: each takes a Redis broker 0.5 ms, in the event loop."""
LAST_READ_S = 0.2
"""Seconds for which a worker that stops reads what its broker was sending."""
LAST_POP_S = 1.5
"""The same with Redis: kombu's last BRPOP takes messages from the queue for another second."""
LOOP_S = 0.5
"""Seconds for which a loop that blocks (a green pool's, or where the transport has no event loop)
waits for messages. Celery's waits for two: until then it does not see which delivery may go on, nor
that the window is wider, and with Redis it may have asked for nothing."""
QOS = (60, 10)
"""The number of basic.qos in AMQP 0-9-1."""


class Prefetch:
    """The prefetch window of one worker; all calls are the main thread's.

    Attributes:
        widens: Whether the window of Celery's consumer can be changed.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._extra = 0
        self._own = 0
        self._failing = False
        self.widens = True

    def connected(self) -> None:
        """Begin with the window of a new connection, which is Celery's own."""
        self._extra = 0
        self._own = int(self._consumer.qos.value)
        self.widens = not self._is_per_consumer
        _wait_for_no_answer(self._consumer.task_consumer.channel)
        if self._consumer.hub is None:
            _wait_less_long(self._consumer.connection)
        qos = self._consumer.qos
        qos.callback = self._with_extra(qos.callback)

    @property
    def _is_per_consumer(self) -> bool:
        """Whether Celery sets the window for new consumers only: a running one keeps its own."""
        app, connection = self._consumer.app, self._consumer.connection
        detects = app.conf.get("worker_detect_quorum_queues", False)  # Celery 5.4 has no such
        if detects and has_quorum_queues(app):
            return True
        # Any queue of RabbitMQ 4, for kombu 5.7.
        return bool(self.amqp and connection.qos_semantics_matches_spec)

    @property
    def _is_fixed(self) -> bool:
        """Whether there is a window, and it cannot be wider; zero is no limit."""
        return not self.widens and self._own > 0

    @property
    def amqp(self) -> bool:
        """Whether the broker speaks AMQP."""
        return bool(self._consumer.connection.transport.driver_type == "amqp")

    def _with_extra(self, tell_broker: Callable[..., Any]) -> Callable[..., Any]:
        """Return what tells the broker the window: Celery's own count, and ours.

        Celery counts up and down, and from the start after a reconnect. Our part is added only
        when the broker is told, so that neither count can spoil the other.
        """

        def callback(prefetch_count: int) -> Any:
            while True:
                extra = self._extra
                # Zero is no limit.
                result = tell_broker(prefetch_count=prefetch_count and prefetch_count + extra)
                if extra == self._extra:  # it may be a thread of the pool, and more be parked now
                    return result

        return callback

    def widen(self, parked: int) -> None:
        """Make the window wider than Celery's own by those that are parked.

        Celery's loop tells the broker. Many are rounded up, by an eighth at most, or each one that
        is parked or goes would be a change.
        """
        step = 1 << max(0, parked.bit_length() - 4)
        extra = -(-parked // step) * step
        if extra != self._extra and self.widens:
            self._extra = extra
            self._consumer.qos.prev = None

    @property
    def most(self) -> float:
        """How many deliveries may be parked, by the window."""
        return max(1, self._own // 2) if self._is_fixed else math.inf

    @property
    def surplus(self) -> int:
        """How many go back: by which the unacknowledged messages exceed Celery's own window.

        What is with the pool counts: RabbitMQ has it in the window until it is acknowledged.
        """
        return min(max(0, _unacknowledged() - int(self._consumer.qos.value)), BACK_AT_ONCE)

    def is_full(self, over: bool) -> bool:
        """Return whether nothing more can come, as the window is full and must not be wider.

        What waits for a rate limit of Celery's is in it as well. So is what waits for its ETA; but
        Celery widens a window for that if it can.

        Args:
            over: Whether more is parked than fits into memory.
        """
        if not (self._is_fixed or over):
            return False
        buckets = [one for one in self._consumer.task_buckets.values() if one]
        waiting = sum(len(bucket.contents) for bucket in buckets)
        if self._is_fixed:
            entries = [waiting.entry for waiting in self._consumer.timer.schedule.queue]
            waiting += sum(isinstance(one, Request) for entry in entries for one in entry.args[:1])
        return _unacknowledged() + waiting >= self._own + self._extra

    def give_back(self, requests: Collection[Any]) -> None:
        """Give messages back to the heads of their queues."""
        if not requests:
            return
        self._consumer.qos.update()
        for request in requests:
            request.message.reject_log_error(logger, self._consumer.connection_errors, requeue=True)
            request.acknowledged = True
            state.task_ready(request)
        logger.info(
            "%d parked tasks are back in their queues",
            len(requests),
            extra=event("deliveries_returned"),
        )

    def stop(self, requests: Collection[Any]) -> None:
        """Ask for no more, and give messages back: this worker stops, if it still has a broker."""
        consumer = self._consumer
        if consumer.connection is None or consumer.task_consumer is None:
            return
        with contextlib.suppress(socket.timeout, *consumer.connection_errors):
            consumer.task_consumer.cancel()  # or they would come back to us
            self.give_back(requests)
            if self._redis_qos is None:
                consumer.connection.drain_events(timeout=LAST_READ_S)
            else:
                self._read_last_pop()

    def _read_last_pop(self) -> None:
        """Wait for the answer to our last BRPOP: a message would stay in the socket until the end.

        kombu gives it back, as nobody here consumes any more.
        """
        channel, until = self._consumer.task_consumer.channel, monotonic() + LAST_POP_S
        while channel._in_poll and (left := until - monotonic()) > 0:
            with contextlib.suppress(Empty):
                if channel._in_poll.can_read(timeout=left):
                    channel.handlers["BRPOP"]()

    # -- A Redis broker ---------------------------------------------------------------------------

    def renew(self, parked: Iterable[Parked], now: float) -> None:
        """Say that we still have these messages: for a minute, not for the visibility timeout.

        It is said at once of new ones, and every `RENEW_S` seconds or so of all. Where that fails,
        it is tried again, and the log says so once.
        """
        due = list(islice((one for one in parked if now - one.dated >= RENEW_S), RENEWED_AT_ONCE))
        if not due:
            return
        requests = [one.request for one in due]
        try:
            qos = self._redis_qos
            if qos is not None and qos.visibility_timeout > 2 * RETURN_S:
                self._date(qos, requests, time.time() + RETURN_S - qos.visibility_timeout)
        except Exception as error:
            if not self._failing:
                logger.warning(
                    "cannot tell the broker to give parked tasks to another worker soon if this"
                    " one dies; trying again until it answers: %r",
                    error,
                    extra=event("broker_uninformed"),
                )
            self._failing = True
            return
        for one in due:
            one.dated = now
        if self._failing:
            logger.info(
                "the broker knows again what is parked here", extra=event("broker_informed")
            )
        self._failing = False

    def keep(self, request: Any) -> bool:
        """Keep a message for the whole visibility timeout; return whether it is still ours."""
        qos = self._redis_qos
        try:
            return qos is None or self._date(qos, [request], time.time()) > 0
        except Exception as error:  # in doubt it runs here as well
            logger.warning(
                "%s: the broker does not say who has it now: %r",
                request.id,
                error,
                extra=event("broker_uninformed"),
            )
            return True

    def let_go(self, request: Any) -> None:
        """Make room in the window for another message: this one is another worker's by now.

        Neither acknowledge it nor give it back: the other one has it under the same tag.
        """
        qos = self._redis_qos
        if qos is not None:
            virtual.QoS.ack(qos, request.message.delivery_tag)  # kombu's count, not the broker's

    @property
    def _redis_qos(self) -> Any:
        """The object by which kombu emulates acknowledgement on Redis; None with other brokers."""
        qos = getattr(self._consumer.task_consumer.channel, "qos", None)
        return qos if hasattr(qos, "unacked_index_key") else None

    def _date(self, qos: Any, requests: Iterable[Any], at: float) -> int:
        """Have messages count as delivered at a time; return how many of them are still ours."""
        dates = {request.message.delivery_tag: at for request in requests}
        if not dates:
            return 0
        with qos.channel.conn_or_acquire() as client:
            # Only those that are there (xx): others are acknowledged, or another worker's.
            return int(client.zadd(qos.unacked_index_key, dates, xx=True, ch=True))


def _unacknowledged() -> int:
    # What is acknowledged is at work: that is less to look through than all that is reserved.
    at_work = tuple(state.active_requests)
    return len(state.reserved_requests) - sum(bool(one.acknowledged) for one in at_work)


def _wait_less_long(connection: Any) -> None:
    drain_events = connection.drain_events

    def drain_soon(**options: Any) -> Any:
        if options.get("timeout") is not None:
            options["timeout"] = min(options["timeout"], LOOP_S)
        return drain_events(**options)

    connection.drain_events = drain_soon


def _wait_for_no_answer(channel: Any) -> None:
    """Have an AMQP channel tell its broker of the window, and not wait for the answer.

    py-amqp waits by reading the connection, and two that read it take each other's answers, and
    halves of frames: either waits on, and the worker with it. The main thread reads it all the
    time; but Celery tells the broker in threads of the pool as well, while it restores the window
    after a reconnect, and in a pool of greenlets we do, in the timer's. The answer says nothing: a
    refusal ends the channel, which the main thread learns. An answer nobody waits for is dropped.
    """
    if not hasattr(channel, "send_method"):  # not py-amqp's
        return

    def basic_qos(size: int, count: int, a_global: bool, argsig: str = "lBb") -> Any:
        return channel.send_method(QOS, argsig, (size, count, a_global))

    channel.basic_qos = basic_qos
