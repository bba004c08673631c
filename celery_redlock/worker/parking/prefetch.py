"""Widen the prefetch window by the parked deliveries, and give messages back.

Parked deliveries are unacknowledged. They would fill the prefetch window, and tasks of other keys
could not pass by. So the window is widened by their number. If that is impossible, they may
fill half of it at most. If this worker dies, nobody should wait an hour for them: a Redis broker
must give them to another worker a minute after we stop renewing them. (An AMQP broker does so at
once, by itself.)
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

__all__ = ["Prefetch", "size_of_pool"]

logger = logging.getLogger("celery_redlock.parking")

RETURN_S = 60.0
"""Seconds after which a Redis broker gives parked messages to another worker, if we stop renewing
them. It checks every 100 s or so."""
RENEW_S = 15.0
"""Seconds between two renewals of a message."""
RENEWED_AT_ONCE = 1000
"""Messages to renew in one sweep; more would block the event loop for longer than 5 ms."""
BACK_AT_ONCE = 100
"""Messages that go back in one sweep: each takes a Redis broker 0.5 ms, in the event loop."""
LAST_READ_S = 0.2
"""Seconds for which a worker that stops reads what its broker was still sending."""
LAST_POP_S = 1.5
"""The same with Redis: kombu's last BRPOP takes messages from the queue for another second."""
LOOP_S = 0.5
"""Seconds for which a blocking loop (of a green pool, or with a transport without an event loop)
waits for messages. Celery waits for two seconds: during that time the loop neither lets a delivery
go nor widens the window, and with Redis it may have asked for no message at all."""
QOS = (60, 10)
"""Class and method number of basic.qos in AMQP 0-9-1."""


class Prefetch:
    """The prefetch window of one worker. Only the main thread may call it.

    Attributes:
        widens: True if the window of Celery's consumer can be changed.
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
        """True if Celery sets the window for new consumers only: a running one keeps its own."""
        app, connection = self._consumer.app, self._consumer.connection
        detects = app.conf.get("worker_detect_quorum_queues", False)  # not in Celery 5.4
        if detects and has_quorum_queues(app):
            return True
        # For any queue of RabbitMQ 4, with kombu 5.7.
        return bool(self.amqp and connection.qos_semantics_matches_spec)

    @property
    def _is_fixed(self) -> bool:
        """True if there is a window that cannot be widened; zero is no limit."""
        return not self.widens and self._own > 0

    @property
    def amqp(self) -> bool:
        """True if the broker speaks AMQP."""
        return bool(self._consumer.connection.transport.driver_type == "amqp")

    def _with_extra(self, inform_broker: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that sends the broker the window: Celery's own count, plus ours.

        Celery counts up and down, and starts anew after a reconnect. Our part is added only when
        the window is sent, so that neither count can spoil the other.
        """

        def callback(prefetch_count: int) -> Any:
            while True:
                extra = self._extra
                # Zero is no limit.
                result = inform_broker(prefetch_count=prefetch_count and prefetch_count + extra)
                if extra == self._extra:  # in a pool's thread, more may be parked meanwhile
                    return result

        return callback

    def widen(self, parked: int) -> None:
        """Make the window wider than Celery's own by the number of parked deliveries.

        Celery's loop sends it to the broker. Large numbers are rounded up, by at most an eighth;
        otherwise each delivery that is parked or goes would be a change.
        """
        step = 1 << max(0, parked.bit_length() - 4)
        extra = -(-parked // step) * step
        if extra != self._extra and self.widens:
            self._extra = extra
            self._consumer.qos.prev = None

    @property
    def most(self) -> float:
        """The number of deliveries that may be parked, by the window."""
        return max(1, self._own // 2) if self._is_fixed else math.inf

    @property
    def surplus(self) -> int:
        """Number to give back: the unacknowledged messages in excess of Celery's own window.

        Messages with the pool count: for RabbitMQ they are in the window until acknowledged.
        """
        return min(max(0, _unacknowledged() - int(self._consumer.qos.value)), BACK_AT_ONCE)

    def is_full(self, over: bool) -> bool:
        """Return True if nothing more can come, because the window is full and must not be wider.

        Messages that wait for a rate limit of Celery's are in it as well. So are those that wait
        for their ETA, but Celery widens a window for them if it can.

        Args:
            over: True if more is parked than fits into memory.
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
            consumer.task_consumer.cancel()  # otherwise they would come back to us
            self.give_back(requests)
            if self._redis_qos is None:
                consumer.connection.drain_events(timeout=LAST_READ_S)
            else:
                self._read_last_pop()

    def _read_last_pop(self) -> None:
        """Wait for the answer to our last BRPOP: a message would stay in the socket until the end.

        kombu gives such a message back, because nothing here consumes any more.
        """
        channel, until = self._consumer.task_consumer.channel, monotonic() + LAST_POP_S
        while channel._in_poll and (left := until - monotonic()) > 0:
            with contextlib.suppress(Empty):
                if channel._in_poll.can_read(timeout=left):
                    channel.handlers["BRPOP"]()

    # -- A Redis broker ---------------------------------------------------------------------------

    def renew(self, parked: Iterable[Parked], now: float) -> None:
        """Renew our hold on these messages: for a minute, not for the visibility timeout.

        New messages are renewed at once, and all of them every `RENEW_S` seconds or so. If that
        fails, it is tried again, and logged once.
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
                    "the broker could not be asked to redeliver parked tasks soon if this worker"
                    " dies; trying again until it answers: %r",
                    error,
                    extra=event("broker_uninformed"),
                )
            self._failing = True
            return
        for one in due:
            one.dated = now
        if self._failing:
            logger.info(
                "the broker will redeliver parked tasks soon again if this worker dies",
                extra=event("broker_informed"),
            )
        self._failing = False

    def keep(self, request: Any) -> bool:
        """Keep a message for the whole visibility timeout; return True if it is still ours."""
        qos = self._redis_qos
        try:
            return qos is None or self._date(qos, [request], time.time()) > 0
        except Exception as error:  # if in doubt, it runs here as well
            logger.warning(
                "%s runs here, though another worker may have it: the broker failed: %r",
                request.id,
                error,
                extra=event("broker_uninformed"),
            )
            return True

    def drop(self, request: Any) -> None:
        """Make room in the window for another message: another worker has this one by now.

        It is neither acknowledged nor given back, because the other has it under the same tag.
        """
        qos = self._redis_qos
        if qos is not None:
            virtual.QoS.ack(qos, request.message.delivery_tag)  # kombu's count, not the broker's

    @property
    def _redis_qos(self) -> Any:
        """The object with which kombu emulates acknowledgement on Redis; None for other brokers."""
        qos = getattr(self._consumer.task_consumer.channel, "qos", None)
        return qos if hasattr(qos, "unacked_index_key") else None

    def _date(self, qos: Any, requests: Iterable[Any], at: float) -> int:
        """Set the delivery time of messages; return how many of them are still ours."""
        dates = {request.message.delivery_tag: at for request in requests}
        if not dates:
            return 0
        with qos.channel.conn_or_acquire() as client:
            # Only existing ones (xx): others are acknowledged, or another worker's.
            return int(client.zadd(qos.unacked_index_key, dates, xx=True, ch=True))


def size_of_pool(pool: Any) -> int:
    """Return how many tasks a worker's pool runs at once."""
    # In a green pool, Celery before 5.7 counts greenlets as its processes, not slots.
    return int(pool.limit if pool.is_green else pool.num_processes)


def _unacknowledged() -> int:
    # Acknowledged messages are at work: those are fewer to go through than all reserved ones.
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
    """Make an AMQP channel send its broker the window without waiting for the answer.

    py-amqp waits by reading the connection, and two threads that read it take each other's answers,
    and halves of frames: each waits on, and the worker with it. The main thread reads it all the
    time. But Celery also sends it in threads of the pool, while it restores the window
    after a reconnect; and in a pool of greenlets we do so in the timer's. The answer has no
    content: a refusal ends the channel, which the main thread notices. An answer without a reader
    is dropped.
    """
    if not hasattr(channel, "send_method"):  # not a channel of py-amqp
        return

    def basic_qos(size: int, count: int, a_global: bool, argsig: str = "lBb") -> Any:
        return channel.send_method(QOS, argsig, (size, count, a_global))

    channel.basic_qos = basic_qos
